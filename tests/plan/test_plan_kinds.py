# SPDX-License-Identifier: MIT OR Apache-2.0
"""What tensors are for, by their names."""

import gguf
import pytest

from metrale.plan import kinds

ARCHITECTURES = (
    "LLAMA",
    "QWEN3NEXT",
    "QWEN35MOE",
    "DEEPSEEK2",
    "JAMBA",
    "MAMBA2",
    "FALCON_H1",
    "KIMI_LINEAR",
    "GEMMA3",
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_known_architectures_has_a_kind(name):
    tensors = gguf.MODEL_TENSORS[gguf.MODEL_ARCH[name]]
    names = [f"{gguf.TENSOR_NAMES[tensor].format(bid=3)}.weight" for tensor in tensors]
    assert [name for name in names if kinds.kind_of(name) == "other"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.3.ffn_gate_exps.weight", "routed experts"),
        ("blk.3.ffn_gate_up_exps.weight", "routed experts"),
        ("blk.3.ffn_down_exps.bias", "routed experts"),
        ("blk.3.ffn_down_shexp.weight", "shared expert"),
        ("blk.3.ffn_gate_inp_shexp.weight", "shared expert"),
        ("blk.3.ffn_gate_inp.weight", "router"),
        ("blk.3.exp_probs_b.bias", "router"),
        ("blk.3.exp_probs_b", "router"),
        ("blk.3.ffn_gate.weight", "feed-forward"),
        ("blk.3.attn_kv_a_mqa.weight", "attention"),
        ("blk.3.attn_kv_a_norm.weight", "norms"),
        ("blk.3.post_attention_norm.weight", "norms"),
        ("output_norm.weight", "norms"),
        ("blk.3.indexer.attn_k.weight", "attention"),
        ("blk.3.indexer.k_norm.weight", "norms"),
        ("rope_freqs.weight", "attention"),
        ("blk.3.ssm_a", "recurrent"),
        ("blk.3.ssm_dt.bias", "recurrent"),
        ("blk.3.engram_embd.weight", "engram tables"),
        ("blk.3.engram_wkv.weight", "engram wkv"),
        ("blk.3.engram_q.weight", "engram gate"),
        ("token_embd.weight", "embedding"),
        ("output.weight", "output"),
        ("blk.3.nextn.eh_proj.weight", "draft layers"),
        ("v.blk.3.attn_q.weight", "encoders"),
        ("blk.3.ffn_gate.0.weight", "other"),
        ("blk.3.surprise.weight", "other"),
        ("blk.x.attn_q.weight", "other"),
    ],
)
def test_the_kind_of_a_name(name, kind):
    assert kinds.kind_of(name) == kind
