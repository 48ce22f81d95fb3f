# SPDX-License-Identifier: MIT OR Apache-2.0
"""The figures of a plan, against sizes that were worked out elsewhere."""

from pathlib import Path

import gguf
import pytest
from model_files import ENGRAM_ROWS, moe_tensors, nbytes

from metrale.errors import ArgumentError, FormatError
from metrale.formats.gguf import GgufFile
from metrale.moe_v41 import ExpertArena, MoeV41Cfg, SlotLayout
from metrale.plan import model_plan

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-v41.gguf"
EXPERT = 12_810_240
TABLE_BYTES = {layer: 84 * rows for layer, rows in ENGRAM_ROWS.items()}
GIB = 1 << 30

LLAMA_KEYS = {"block_count": 1, "embedding_length": 512, "attention.head_count": 8}
LLAMA = {
    "token_embd.weight": ("Q6_K", (1000, 512)),
    "output_norm.weight": ("F32", (512,)),
    "blk.0.attn_q.weight": ("Q4_K", (512, 512)),
    "blk.0.attn_k.weight": ("Q4_K", (512, 512)),
    "blk.0.ffn_up.weight": ("Q4_K", (1024, 512)),
}
MOE_KEYS = {"expert_count": 8, "expert_used_count": 2}


@pytest.fixture(scope="module")
def tiny():
    with GgufFile(TINY) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle():
    """`oracle(words)`: tensors and bytes of the small model whose names have one of the words."""
    tensors = gguf.GGUFReader(TINY).tensors

    def total(*words):
        sizes = [int(t.n_bytes) for t in tensors if any(word in t.name for word in words)]
        return len(sizes), sum(sizes)

    return total


def plan_of(path, **options):
    with GgufFile(path) as opened:
        return model_plan(opened, **options)


# What is in the file


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("routed experts", ["_exps."]),
        ("shared expert", ["_shexp."]),
        ("router", ["ffn_gate_inp.", "exp_probs_b"]),
        ("engram tables", ["engram_embd"]),
        ("engram wkv", ["engram_wkv"]),
        ("engram gate", ["engram_q", "engram_k"]),
    ],
)
def test_each_kind_has_the_bytes_that_the_oracle_counts(tiny, oracle, kind, words):
    amount = model_plan(tiny).kinds[kind]
    assert (amount.tensors, amount.nbytes) == oracle(*words)


def test_the_total_is_the_oracles_and_the_sum_over_kinds_and_types(tiny, oracle):
    made = model_plan(tiny)
    by_kind, by_type = (sum(a.nbytes for a in amounts.values()) for amounts in (made.kinds, made.types))
    assert (made.total.tensors, made.total.nbytes) == oracle("")
    assert by_kind == by_type == made.total.nbytes


def test_types_have_the_bytes_that_the_oracle_counts(tiny):
    expected = {}
    for tensor in gguf.GGUFReader(TINY).tensors:
        name = tensor.tensor_type.name
        expected[name] = expected.get(name, 0) + int(tensor.n_bytes)
    assert {name: amount.nbytes for name, amount in model_plan(tiny).types.items()} == expected


@pytest.mark.parametrize("kind", [t.name for t in gguf.GGML_QUANT_SIZES if t.name != "Q8_1"])
def test_every_type_that_files_store_has_its_size(planned, kind):
    made = planned("llama", {}, {"output.weight": (kind, (3, 512))})
    assert {name: a.nbytes for name, a in made.types.items()} == {kind: nbytes(kind, (3, 512))}


def test_a_tensor_of_an_unknown_name_is_other_and_named(planned):
    made = planned("llama", LLAMA_KEYS, LLAMA | {"blk.0.surprise.weight": ("F32", (7,))})
    assert (made.other_names, made.kinds["other"].nbytes) == (("blk.0.surprise.weight",), 28)


# What must be resident, and what fits


def test_all_but_routed_experts_and_engram_tables_must_be_resident(tiny, oracle):
    made = model_plan(tiny)
    streamed = oracle("_exps.", "engram_embd")[1]
    assert (made.streamed_bytes, made.resident_bytes) == (streamed, oracle("")[1] - streamed)


def test_a_slot_is_the_arenas(flash):
    assert plan_of(flash).experts.slot_bytes == SlotLayout(5120, 2304).slot_bytes == EXPERT


def test_slots_take_what_is_left_of_the_memory(flash):
    made = plan_of(flash, gpu_memory=141 * GIB)
    left = 141 * GIB - made.resident_bytes - made.workspace.nbytes
    assert [(fit.engram_layers, fit.slots) for fit in made.fits] == [
        ((), left // EXPERT),
        ((1,), (left - TABLE_BYTES[1]) // EXPERT),
        ((1, 14), (left - sum(TABLE_BYTES.values())) // EXPERT),
    ]


def test_slots_are_told_by_layer_and_as_a_share_of_all_experts(flash):
    fit = plan_of(flash, gpu_memory=141 * GIB).fits[0]
    assert fit.slots_a_layer == pytest.approx(fit.slots / 40)
    assert fit.share_of_experts == pytest.approx(fit.slots / (40 * 384))


def test_a_table_that_does_not_fit_ends_the_list(flash):
    assert [fit.engram_layers for fit in plan_of(flash, gpu_memory=40 * GIB).fits] == [(), (1,)]


def test_all_experts_fit_and_no_more_than_all(flash):
    made = plan_of(flash, gpu_memory=1000 * GIB)
    assert [(fit.slots, fit.share_of_experts) for fit in made.fits] == [(40 * 384, 1.0)] * 3
    assert made.fits[2].unused_bytes == 1000 * GIB - made.all_resident_bytes


def test_a_slot_has_the_size_of_the_largest_expert(planned):
    tensors = {
        "blk.0.ffn_up_exps.weight": ("Q4_K", (8, 256, 512)),
        "blk.1.ffn_up_exps.weight": ("Q6_K", (8, 256, 512)),
    }
    experts = planned("llama", LLAMA_KEYS | MOE_KEYS, tensors).experts
    assert (experts.slot_bytes, experts.smallest_bytes) == (nbytes("Q6_K", (256, 512)), nbytes("Q4_K", (256, 512)))


def test_the_least_that_fits_does_and_a_byte_less_is_refused_with_what_is_missing(tiny):
    least = model_plan(tiny).least_bytes
    assert model_plan(tiny, gpu_memory=least).fits[0].slots == 3
    with pytest.raises(ArgumentError, match=rf"gpu_memory: got {least - 1}, allowed: .*; 1 are missing"):
        model_plan(tiny, gpu_memory=least - 1)


def test_the_slots_of_a_token_take_what_an_arena_of_so_many_does(tiny, host):
    arena = ExpertArena(host, SlotLayout(512, 256), 3)
    held = host.live_bytes
    arena.free()
    assert model_plan(tiny).experts.token_slots_bytes == held


def test_the_workspace_is_the_parts_table_for_that_many_sequences(tiny):
    work = model_plan(tiny, seqs=5).workspace
    table = MoeV41Cfg(dim=512, inter=256, n_routed=8, topk=3, max_tokens=5).buffer_table()
    assert [(b.name, b.formula, b.nbytes) for b in work.buffers] == [tuple(spec) for spec in table]


def test_a_layer_that_moe_v41_does_not_take_has_no_workspace_and_the_reason_is_noted(planned):
    keys = MOE_KEYS | {"block_count": 1, "expert_shared_count": 1, "expert_scoring_func": "softmax"}
    made = planned("deepseek41", keys, moe_tensors(0, 512, 256, 8))
    assert made.workspace is None
    assert any("MoeV41 does not take layer 0" in note and "'softmax'" in note for note in made.notes)


# What a token reads


def test_a_moe_layer_of_the_real_model_is_read_in_93_6_megabytes(flash):
    made = plan_of(flash)
    reads = {read.what: read.nbytes for read in made.reads}
    router = made.kinds["router"].nbytes
    layer = (reads["routed experts, 6 a layer"] + reads["shared expert"] + router) / 40
    assert round(layer / 1e6, 1) == 93.6


def test_the_routed_experts_of_a_token_are_topk_a_layer(flash):
    reads = {read.what: read.nbytes for read in plan_of(flash).reads}
    assert reads["routed experts, 6 a layer"] == 40 * 6 * EXPERT


def test_a_token_reads_24_rows_of_each_engram_table_and_all_of_wkv(flash):
    made = plan_of(flash)
    reads = {read.what: read.nbytes for read in made.reads}
    assert (reads["engram rows"], made.kinds["engram wkv"].nbytes) == (2 * 24 * 84, 2 * 51_609_600)


def test_the_output_is_read_whole_and_one_row_of_the_embedding(flash):
    reads = {read.what: read.nbytes for read in plan_of(flash).reads}
    assert reads["embedding rows"] == 5120 // 256 * 210
    assert reads["dense weights"] > nbytes("Q6_K", (129_280, 5120))


def test_an_embedding_that_is_the_output_too_is_read_whole(planned):
    reads = {read.what: read.nbytes for read in planned("llama", LLAMA_KEYS, LLAMA).reads}
    assert reads["embedding as output"] == nbytes("Q6_K", (1000, 512))


def test_draft_layers_are_resident_but_no_token_reads_them(planned):
    keys = LLAMA_KEYS | {"block_count": 2, "nextn_predict_layers": 1}
    one = planned("llama", LLAMA_KEYS, LLAMA)
    two = planned("llama", keys, LLAMA | {"blk.1.attn_k.weight": ("Q4_K", (512, 512))})
    assert (two.token_bytes, two.state_bytes) == (one.token_bytes, one.state_bytes)
    assert two.resident_bytes - one.resident_bytes == nbytes("Q4_K", (512, 512))


def test_encoders_are_resident_but_no_token_reads_them(planned):
    without = planned("llama", LLAMA_KEYS, LLAMA)
    made = planned("llama", LLAMA_KEYS, LLAMA | {"v.blk.0.attn_q.weight": ("F32", (100,))})
    assert (made.token_bytes, made.resident_bytes) == (without.token_bytes, without.resident_bytes + 400)


def test_the_time_of_a_token_is_its_bytes_over_the_bandwidth(tiny):
    made = model_plan(tiny, bandwidth=1e12)
    assert made.token_bytes == sum(read.nbytes for read in made.reads)
    assert made.token_seconds == pytest.approx(made.token_bytes / 1e12)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context: got 0, allowed: 1 or more"),
        ({"seqs": 0}, "seqs: got 0, allowed: 1 or more"),
        ({"bandwidth": 0.0}, "bandwidth: got 0.0, allowed: more than 0"),
        ({"bandwidth": float("nan")}, "bandwidth: got nan, allowed: more than 0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_name(tiny, options, message):
    with pytest.raises(ArgumentError, match=message):
        model_plan(tiny, **options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_used_count": 2}, "key 'llama.expert_count': got none in the file"),
        ({"expert_count": 8}, "key 'llama.expert_used_count': got none in the file"),
        ({"expert_count": 4, "expert_used_count": 2}, r"ffn_up_exps.weight': got shape \[8, 256, 512\], needed: 4 exp"),
        ({"expert_count": 8, "expert_used_count": 9}, "key 'llama.expert_used_count': got 9, needed: 1 to the 8"),
        ({"expert_count": 8, "expert_used_count": "two"}, "key 'llama.expert_used_count': got 'two', needed: integers"),
    ],
)
def test_keys_that_contradict_the_experts_are_named(planned, keys, message):
    with pytest.raises(FormatError, match=message):
        planned("llama", keys, {"blk.0.ffn_up_exps.weight": ("Q4_K", (8, 256, 512))})


def test_engram_tables_need_the_keys_that_count_their_rows(planned):
    with pytest.raises(FormatError, match="key 'deepseek41.engram.max_ngram_size': got none in the file"):
        planned("deepseek41", {}, {"blk.1.engram_embd.weight": ("Q2_K", (100, 256))})
