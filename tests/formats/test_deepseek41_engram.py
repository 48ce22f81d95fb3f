# SPDX-License-Identifier: MIT OR Apache-2.0
"""The description of an engram layer, on the real small file and on variations of a made one; rows of its table."""

import re

import numpy as np
import pytest
from gguf_files import F32, I32, STRING, U32, Image, array, value
from test_deepseek41 import BF16_ID, F32_ID, Q2_K_ID, Q3_K_ID, tensor

from metrale.errors import ArgumentError, FormatError
from metrale.formats.deepseek41 import engram_layer_spec, engram_layers
from metrale.formats.gguf import GgufFile

DIM, HC, COLS, ROWS = 64, 2, 4, 20
KEY = "deepseek41."


def model():
    """A valid model of which layers 1 and 3 are engram layers."""
    keys = {
        "embedding_length": value(U32, DIM),
        "hyper_connection.count": value(U32, HC),
        "attention.layer_norm_rms_epsilon": value(F32, 0.25),
        "engram.layer_ids": array(I32, [1, 3]),
        "engram.max_ngram_size": value(U32, 3),
        "engram.head_count": value(U32, 2),
        "engram.key_length": value(U32, 256),
        "engram.pad_id": value(U32, 0),
        "engram.token_map": array(I32, [0, -1, 4]),
        "engram.multipliers": array(I32, [1, 3, 5, 7, 9, 11]),
        "engram.primes": array(I32, [2, 3, 5, 7, 3, 5, 7, 5]),
        "engram.offsets": array(I32, [0, 2, 5, 10, 0, 3, 8, 15]),
    }
    tensors = {}
    for layer, rows in ((1, 17), (3, ROWS)):
        tensors |= {
            f"blk.{layer}.engram_embd.weight": tensor(Q2_K_ID, 256, rows),
            f"blk.{layer}.engram_wkv.weight": tensor(Q2_K_ID, COLS * 256, (HC + 1) * DIM),
            f"blk.{layer}.engram_q.weight": tensor(F32_ID, DIM, HC),
            f"blk.{layer}.engram_k.weight": tensor(F32_ID, DIM, HC),
        }
    named = {"general.architecture": value(STRING, "deepseek41")}
    return Image(named | {KEY + name: encoded for name, encoded in keys.items()}, tensors)


def spec_of(tmp_path, image, layer=3):
    path = tmp_path / "model.gguf"
    path.write_bytes(image.encode())
    with GgufFile(path) as opened:
        return engram_layer_spec(opened, layer)


def test_the_real_file_is_described(tiny_path):
    with GgufFile(tiny_path) as opened:
        assert engram_layers(opened) == [1]
        spec = engram_layer_spec(opened, 1)
    assert (spec.layer, spec.site, spec.dim, spec.hc, spec.head_dim, spec.cols) == (1, 0, 512, 4, 256, 4)
    assert spec.eps == pytest.approx(1e-6)
    assert (spec.hash.max_ngram, spec.hash.heads, spec.hash.pad) == (3, 2, 2)
    assert (spec.table.shape, spec.wkv.shape, spec.q.shape) == ((1040, 256), (2560, 1024), (4, 512))


def test_a_layer_has_its_place_among_the_sites(tmp_path):
    spec = spec_of(tmp_path, model())
    assert (spec.layer, spec.site, spec.eps) == (3, 1, 0.25)
    assert spec.hash.table_rows.tolist() == [17, ROWS]
    assert spec.hash.multipliers.tolist() == [[1, 3, 5], [7, 9, 11]]


def test_a_projection_may_be_bf16(tmp_path):
    image = model()
    image.tensors["blk.3.engram_wkv.weight"] = tensor(BF16_ID, COLS * 256, (HC + 1) * DIM)
    assert spec_of(tmp_path, image).wkv.type.name == "BF16"


def test_a_layer_without_an_engram_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=re.escape("layer: got 2, allowed: an engram layer (1, 3)")):
        spec_of(tmp_path, model(), 2)


def test_a_model_without_engrams_has_none(tmp_path):
    image = model()
    del image.keys[KEY + "engram.layer_ids"]
    with pytest.raises(ArgumentError, match=re.escape("layer: got 3, allowed: an engram layer (none in the file)")):
        spec_of(tmp_path, image)


@pytest.mark.parametrize(
    ("key", "encoded", "message"),
    [
        ("hyper_connection.count", value(U32, 5), "key 'deepseek41.hyper_connection.count': got 5, needed: 1 to 4"),
        ("engram.key_length", value(U32, 128), "key 'deepseek41.engram.key_length': got 128, needed: 256"),
        ("attention.layer_norm_rms_epsilon", value(F32, -1.0), "layer_norm_rms_epsilon': got -1.0, needed: 0 or more"),
        (
            "engram.primes",
            array(I32, [2, 3]),
            "key 'deepseek41.engram.primes': got 2 values, needed: 8, 4 for each",
        ),
        ("engram.pad_id", value(U32, 1), "engram constants: pad_id: got 1, allowed: a mapped token of the 3"),
        ("engram.multipliers", array(I32, [1, 3, 5, 7, 8, 9]), "multipliers[1, 1]: got 8, allowed: odd numbers"),
        ("engram.multipliers", array(I32, [1, 3, 5, 7, -9, 9]), "engram constants: "),
        (
            "engram.primes",
            array(I32, [2, 3, 5, 7, 3, 5, 7, 6]),
            "primes of site 1: got 'a sum of 21', allowed: 20",
        ),
        ("engram.offsets", array(I32, [0, 2, 5, 11, 0, 3, 8, 15]), "offsets[0, 3]: got 11, allowed: 0 to the rows of"),
    ],
)
def test_keys_that_are_wrong_are_named(tmp_path, key, encoded, message):
    image = model()
    image.keys[KEY + key] = encoded
    with pytest.raises(FormatError, match=re.escape(message)):
        spec_of(tmp_path, image)


@pytest.mark.parametrize("key", [key for key in model().keys if "." in key and "layer_ids" not in key])
def test_a_missing_key_is_named(tmp_path, key):
    image = model()
    del image.keys[key]
    with pytest.raises(FormatError, match=f"key '{key}': got none in the file"):
        spec_of(tmp_path, image)


@pytest.mark.parametrize(
    ("name", "content", "needed"),
    [
        ("engram_wkv", tensor(Q3_K_ID, COLS * 256, (HC + 1) * DIM), "needed: BF16 or Q2_K [192, 1024]"),
        ("engram_wkv", tensor(Q2_K_ID, COLS * 256, HC * DIM), "needed: BF16 or Q2_K [192, 1024]"),
        ("engram_embd", tensor(BF16_ID, 256, ROWS), f"needed: Q2_K [{ROWS}, 256]"),
        ("engram_q", tensor(F32_ID, DIM, HC + 1), "needed: F32 [2, 64]"),
        ("engram_k", tensor(BF16_ID, DIM, HC), "needed: F32 [2, 64]"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_named(tmp_path, name, content, needed):
    image = model()
    image.tensors[f"blk.3.{name}.weight"] = content
    with pytest.raises(FormatError, match=re.escape(f"tensor 'blk.3.{name}.weight': got ") + ".*" + re.escape(needed)):
        spec_of(tmp_path, image)


@pytest.mark.parametrize("name", ["engram_wkv", "engram_q", "engram_k", "engram_embd"])
def test_a_missing_tensor_is_named(tmp_path, name):
    image = model()
    del image.tensors[f"blk.3.{name}.weight"]
    with pytest.raises(FormatError, match=f"tensor 'blk.3.{name}.weight': got none in the file"):
        spec_of(tmp_path, image)


# Rows


def test_rows_are_read_in_the_order_asked_for(tiny_path):
    ids = [1039, 0, 7, 7]
    with GgufFile(tiny_path) as opened:
        table = opened.tensors["blk.1.engram_embd.weight"]
        rows = np.zeros((4, 84), np.uint8)
        table.read_rows_into(rows, ids)
        np.testing.assert_array_equal(rows, table.numpy()[ids])


@pytest.mark.parametrize("index", [-1, 1040])
def test_a_row_outside_the_table_is_refused(tiny_path, index):
    with GgufFile(tiny_path) as opened:
        with pytest.raises(ArgumentError, match=f"index: got {index}, allowed: 0..1039 for tensor 'blk.1.engram_embd"):
            opened.tensors["blk.1.engram_embd.weight"].read_rows_into(bytearray(168), [0, index])


def test_a_buffer_of_another_size_is_refused(tiny_path):
    with GgufFile(tiny_path) as opened:
        with pytest.raises(ArgumentError, match="buffer: got '167 bytes', allowed: 168, 84 an index"):
            opened.tensors["blk.1.engram_embd.weight"].read_rows_into(bytearray(167), [0, 1])


def test_rows_of_a_file_that_was_cut_short_after_it_was_opened(tiny_path, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path.read_bytes())
    with GgufFile(path) as opened:
        table = opened.tensors["blk.1.engram_embd.weight"]
        with open(path, "r+b") as file:
            file.truncate(table.offset + 84)
        with pytest.raises(FormatError, match="tensor 'blk.1.engram_embd.weight': got the end of the file"):
            table.read_rows_into(bytearray(168), [0, 1])
