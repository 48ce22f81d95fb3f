# SPDX-License-Identifier: MIT OR Apache-2.0
"""The description of a MoE layer, on the real small file and on variations of a made one."""

import pytest
from gguf_files import BOOL, F32, I32, STRING, U32, Image, array, value

from metrale.errors import ArgumentError, FormatError
from metrale.formats.deepseek41 import moe_layer_spec
from metrale.formats.gguf import GgufFile

DIM, INTER, SHARED_INTER, EXPERTS = 512, 256, 768, 2
F32_ID, Q2_K_ID, Q3_K_ID, Q6_K_ID, BF16_ID = 0, 10, 11, 14, 30
BYTES = {F32_ID: 4, BF16_ID: 2, Q2_K_ID: 84 / 256, Q3_K_ID: 110 / 256, Q6_K_ID: 210 / 256}


def tensor(kind, *dims):
    """Zeros of that ggml type; dims innermost first."""
    values = 1
    for dim in dims:
        values *= dim
    return kind, list(dims), bytes(int(values * BYTES[kind]))


def model():
    """A valid one-layer model."""
    keys = {
        "block_count": value(U32, 1),
        "embedding_length": value(U32, DIM),
        "expert_count": value(U32, EXPERTS),
        "expert_used_count": value(U32, 1),
        "expert_shared_count": value(U32, 1),
        "expert_feed_forward_length": value(U32, INTER),
        "expert_shared_feed_forward_length": value(U32, SHARED_INTER),
        "expert_weights_scale": value(F32, 2.5),
        "expert_weights_norm": value(BOOL, False),
        "expert_scoring_func": value(STRING, "sqrtsoftplus"),
        "swiglu_clamp_exp": array(F32, [7.0]),
        "swiglu_clamp_shexp": array(F32, [0.0]),
    }
    tensors = {
        "ffn_gate_inp.weight": tensor(BF16_ID, DIM, EXPERTS),
        "exp_probs_b.bias": tensor(F32_ID, EXPERTS),
        "ffn_gate_exps.weight": tensor(Q2_K_ID, DIM, INTER, EXPERTS),
        "ffn_up_exps.weight": tensor(Q2_K_ID, DIM, INTER, EXPERTS),
        "ffn_down_exps.weight": tensor(Q3_K_ID, INTER, DIM, EXPERTS),
        "ffn_gate_shexp.weight": tensor(BF16_ID, DIM, SHARED_INTER),
        "ffn_up_shexp.weight": tensor(Q2_K_ID, DIM, SHARED_INTER),
        "ffn_down_shexp.weight": tensor(Q3_K_ID, SHARED_INTER, DIM),
    }
    return Image(
        {"general.architecture": value(STRING, "deepseek41")}
        | {f"deepseek41.{name}": encoded for name, encoded in keys.items()},
        {f"blk.0.{name}": content for name, content in tensors.items()},
    )


def spec_of(tmp_path, image, layer=0):
    path = tmp_path / "model.gguf"
    path.write_bytes(image.encode())
    with GgufFile(path) as opened:
        return moe_layer_spec(opened, layer)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_real_file_is_described(tiny_path, layer):
    with GgufFile(tiny_path) as opened:
        spec = moe_layer_spec(opened, layer)
    assert (spec.layer, spec.dim, spec.inter, spec.shared_inter) == (layer, 512, 256, 256)
    assert (spec.n_routed, spec.topk, spec.route_scale, spec.norm_topk_prob) == (8, 3, 1.5, True)
    assert (spec.gate_temp, spec.swiglu_limit, spec.shared_swiglu_limit) == (1.0, 10.0, 10.0)
    assert spec.down.name == f"blk.{layer}.ffn_down_exps.weight"
    assert spec.shared_up.type.name == ("Q2_K", "BF16")[layer]


def test_numbers_and_limits_come_from_their_keys(tmp_path):
    spec = spec_of(tmp_path, model())
    assert (spec.shared_inter, spec.topk, spec.route_scale, spec.norm_topk_prob) == (768, 1, 2.5, False)
    assert (spec.swiglu_limit, spec.shared_swiglu_limit) == (7.0, 0.0)
    assert [t.type.name for t in (spec.shared_gate, spec.shared_up, spec.shared_down)] == [
        "BF16",
        "Q2_K",
        "Q3_K",
    ]


@pytest.mark.parametrize("layer", [-1, 1])
def test_a_layer_that_the_model_lacks_is_refused(tmp_path, layer):
    with pytest.raises(ArgumentError, match=rf"layer: got {layer}, allowed: 0\.\.0"):
        spec_of(tmp_path, model(), layer)


@pytest.mark.parametrize("key", model().keys)
def test_a_missing_key_is_named(tmp_path, key):
    image = model()
    del image.keys[key]
    with pytest.raises(FormatError, match=f"model.gguf: key '{key}': got none in the file, needed:"):
        spec_of(tmp_path, image)


@pytest.mark.parametrize("name", model().tensors)
def test_a_missing_tensor_is_named(tmp_path, name):
    image = model()
    del image.tensors[name]
    with pytest.raises(FormatError, match=f"model.gguf: tensor '{name}': got none in the file, needed:"):
        spec_of(tmp_path, image)


@pytest.mark.parametrize("name", model().tensors)
def test_a_tensor_of_another_type_is_refused(tmp_path, name):
    image = model()
    _, dims, _ = image.tensors[name]
    other = Q6_K_ID if dims[0] % 256 == 0 else BF16_ID
    image.tensors[name] = tensor(other, *dims)
    with pytest.raises(FormatError, match=f"tensor '{name}': got (Q6_K|BF16) .*, needed: "):
        spec_of(tmp_path, image)


@pytest.mark.parametrize("name", model().tensors)
def test_a_tensor_of_another_shape_is_refused(tmp_path, name):
    image = model()
    kind, dims, _ = image.tensors[name]
    image.tensors[name] = tensor(kind, *dims[:-1], dims[-1] + 256)
    with pytest.raises(FormatError, match=rf"tensor '{name}': got \w+ \[{dims[-1] + 256}.*needed: .*\[{dims[-1]}"):
        spec_of(tmp_path, image)


@pytest.mark.parametrize(
    ("key", "encoded", "message"),
    [
        ("general.architecture", value(STRING, "llama"), "got 'llama', needed: 'deepseek41'"),
        ("deepseek41.expert_scoring_func", value(STRING, "sigmoid"), "got 'sigmoid', needed: 'sqrtsoftplus'"),
        ("deepseek41.expert_scoring_func", value(U32, 2), "got u32, needed: a single str"),
        ("deepseek41.expert_shared_count", value(U32, 2), "got 2, needed: 1"),
        ("deepseek41.expert_used_count", value(U32, 3), "got 3, needed: up to the 2 experts"),
        ("deepseek41.expert_used_count", value(U32, 0), "got 0, needed: 1 or more"),
        ("deepseek41.embedding_length", value(I32, -512), "got -512, needed: 1 or more"),
        ("deepseek41.expert_weights_scale", value(F32, float("nan")), "got nan, needed: a finite number"),
        ("deepseek41.swiglu_clamp_exp", value(F32, 7.0), "got f32, needed: an array of float"),
        ("deepseek41.swiglu_clamp_exp", array(F32, []), "got 0 values, needed: one for layer 0"),
    ],
)
def test_a_model_of_another_form_is_refused(tmp_path, key, encoded, message):
    image = model()
    image.keys[key] = encoded
    with pytest.raises(FormatError, match=f"key '{key}': {message}"):
        spec_of(tmp_path, image)


def test_an_infinite_limit_is_refused_with_its_layer(tmp_path):
    image = model()
    image.keys["deepseek41.swiglu_clamp_shexp"] = array(F32, [float("inf")])
    with pytest.raises(FormatError, match=r"swiglu_clamp_shexp\[0\]': got inf, needed: a finite number"):
        spec_of(tmp_path, image)
