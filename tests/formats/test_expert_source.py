# SPDX-License-Identifier: MIT OR Apache-2.0
"""expert_source: the routed experts of a made file, whole and split, and files that it refuses."""

import pytest
from gguf_files import I32, STRING, U16, U32, Image, value
from test_deepseek41 import DIM, EXPERTS, INTER, Q2_K_ID, Q3_K_ID, Q6_K_ID, tensor

from metrale.errors import ArgumentError, FormatError
from metrale.formats.gguf import expert_source

LAYERS = (1, 3)
SHAPES = {"gate": (Q2_K_ID, DIM, INTER), "up": (Q2_K_ID, DIM, INTER), "down": (Q3_K_ID, INTER, DIM)}


def filled(kind, *dims, first):
    """A tensor whose experts are bytes of ``first``, ``first + 1``, and so on."""
    kind, dims, zeros = tensor(kind, *dims, EXPERTS)
    one = len(zeros) // EXPERTS
    return kind, dims, b"".join(bytes([first + e]) * one for e in range(EXPERTS))


def model():
    """Layers 1 and 3 of 4 have routed experts."""
    keys = {
        "block_count": value(U32, 4),
        "embedding_length": value(U32, DIM),
        "expert_count": value(U32, EXPERTS),
        "expert_feed_forward_length": value(U32, INTER),
    }
    tensors = {
        f"blk.{layer}.ffn_{part}_exps.weight": filled(*shape, first=40 * layer + 10 * n)
        for layer in LAYERS
        for n, (part, shape) in enumerate(SHAPES.items())
    }
    return Image(
        {"general.architecture": value(STRING, "deepseek41")} | {f"deepseek41.{name}": k for name, k in keys.items()},
        tensors,
    )


def whole(folder, image):
    path = folder / "model.gguf"
    path.write_bytes(image.encode())
    return path


def split(folder, image):
    """The same, with each tensor in a file of its own."""
    count = len(image.tensors)
    for number, (name, content) in enumerate(image.tensors.items()):
        keys = {"split.no": value(U16, number), "split.count": value(U16, count)}
        keys["split.tensors.count"] = value(I32, count)
        part = Image(keys | (image.keys if number == 0 else {}), {name: content})
        (folder / f"m-{number + 1:05}-of-{count:05}.gguf").write_bytes(part.encode())
    return folder / f"m-00002-of-{count:05}.gguf"


@pytest.mark.parametrize("write", [whole, split])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("n", range(3))
def test_a_part_of_an_expert_is_read_from_its_tensor(tmp_path, write, layer, n):
    memory = memoryview(bytearray(INTER * DIM // 256 * (110 if n == 2 else 84)))
    with expert_source(write(tmp_path, model())) as source:
        assert source.layers == LAYERS
        source.read_into(layer, 1, list(SHAPES)[n], memory)
    assert set(memory) == {40 * layer + 10 * n + 1}


@pytest.mark.parametrize("change", [None, (Q6_K_ID, DIM, INTER), (Q2_K_ID, DIM, INTER + 256)])
@pytest.mark.parametrize("part", ["up", "down"])
def test_an_expert_tensor_that_is_not_as_needed_is_named(tmp_path, change, part):
    image, name = model(), f"blk.3.ffn_{part}_exps.weight"
    if change is None:
        del image.tensors[name]
    else:
        image.tensors[name] = filled(*change, first=0)
    with pytest.raises(FormatError, match=f"tensor '{name}': got .*, needed: Q._K"):
        expert_source(whole(tmp_path, image))


def test_a_model_without_experts_is_refused(tmp_path):
    image = model()
    image.tensors = {"blk.0.other.weight": tensor(Q2_K_ID, DIM, INTER)}
    with pytest.raises(FormatError, match="tensors: got no blk.N.ffn_gate_exps.weight, needed: a layer with routed"):
        expert_source(whole(tmp_path, image))


def test_a_model_of_another_architecture_is_refused(tmp_path):
    image = model()
    image.keys["general.architecture"] = value(STRING, "llama")
    with pytest.raises(FormatError, match="general.architecture': got 'llama', needed: 'deepseek41'"):
        expert_source(whole(tmp_path, image))


def test_nothing_is_read_from_a_closed_file(tmp_path):
    source = expert_source(whole(tmp_path, model()))
    source.close()
    source.close()
    with pytest.raises(ArgumentError, match="the file is closed"):
        source.read_into(1, 0, "gate", memoryview(bytearray(INTER * DIM // 256 * 84)))
