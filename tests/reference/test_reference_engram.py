# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engram oracle against values made by other software."""

from pathlib import Path

import numpy as np
import pytest

from metrale.formats.gguf import GgufFile
from metrale.reference import engram
from metrale.reference.bf16 import bf16_bits, bf16_values

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def published():
    with np.load(DATA / "engram_hash.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def tiny():
    with GgufFile(DATA / "tiny-v41.gguf") as file:
        yield file


def key(tiny, name):
    return tiny[f"deepseek41.engram.{name}"]


@pytest.mark.parametrize("site", [0, 1])
def test_ids_are_the_published_ones(published, site):
    constants = [published[name].reshape(2, -1)[site] for name in ("multipliers", "primes", "offsets")]
    token_map = published["token_map"]
    ids = engram.row_ids(token_map[published["tokens"]], *constants, token_map[published["pad_token_id"]])
    np.testing.assert_array_equal(ids, published["rows"][:, site])


def test_ids_of_the_small_model(tiny, tiny_expected):
    token_map = np.array(key(tiny, "token_map"))
    constants = [key(tiny, name) for name in ("multipliers", "primes", "offsets")]
    ids = engram.row_ids(token_map[tiny_expected["tokens"]], *constants, token_map[key(tiny, "pad_id")])
    np.testing.assert_array_equal(ids, tiny_expected["engram_rows"])


def test_a_window_ends_at_the_first_unmapped_token():
    one = engram.row_ids([4, -1, 7, 9], [3, 5, 7], [1009, 1013], [0, 0], 2)[3]
    rolls = [9 * 3 ^ 7 * 5, 9 * 3 ^ 7 * 5 ^ 2 * 7]
    assert one.tolist() == [rolls[0] % 1009, rolls[1] % 1013]


def test_a_product_beyond_63_bits_is_negative_and_its_id_is_not():
    ids = engram.row_ids([1, 2**31 - 1], [2**63 + 1, 1], [1009], [100], 0)
    assert ids[1, 0] == (((2**31 - 1) * (2**63 + 1) % 2**64 - 2**64) ^ 1) % 1009 + 100


def test_kv_of_the_small_model_has_the_expected_bits(tiny, tiny_expected):
    table, wkv = (tiny.tensors[f"blk.1.engram_{name}.weight"].numpy() for name in ("embd", "wkv"))
    a = engram.rows(table, tiny_expected["engram_rows"]).reshape(40, -1)
    np.testing.assert_array_equal(bf16_values(bf16_bits(engram.wkv(a, wkv))), tiny_expected["engram_kv"])


def test_streams_of_the_small_model_are_within_1e_6(tiny, tiny_expected):
    q, k = (tiny.tensors[f"blk.1.engram_{name}.weight"].numpy() for name in ("q", "k"))
    kv = bf16_bits(tiny_expected["engram_kv"])
    out = engram.gate(tiny_expected["streams_in"], kv, q * k, 1e-6)
    np.testing.assert_allclose(out, tiny_expected["streams_out"], rtol=1e-6, atol=1e-6)


def test_a_dot_of_0_gates_by_the_square_root_of_the_floor():
    h, kv = np.zeros((1, 1, 2)), bf16_bits([0, 0, 1, 2])[None]
    out = engram.gate(h, kv, np.ones((1, 2)), 1e-6)
    np.testing.assert_allclose(out[0, 0], np.array([1, 2]) / (1 + np.exp(-1e-3)), rtol=1e-12)


def test_a_row_outside_the_table_is_zero(tiny):
    table = tiny.tensors["blk.1.engram_embd.weight"].numpy()
    found = engram.rows(table, [-1, 0, len(table) - 1, len(table), 2**62])
    assert [bool(row.any()) for row in found] == [False, True, True, False, False]
