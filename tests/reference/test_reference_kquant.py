# SPDX-License-Identifier: MIT OR Apache-2.0
"""K-quant decoding against ggml's values; q8_1 against a transcription of the rule in exact arithmetic."""

from dataclasses import replace
from fractions import Fraction
from math import floor

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metrale.errors import ArgumentError
from metrale.formats.kquant import BF16, Q2_K, Q3_K, Q6_K
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.kquant import dequantize, mmvq, quantize_q8_1_rows

K_QUANTS = pytest.mark.parametrize("kind", [Q2_K, Q3_K, Q6_K], ids=str)
bf16_blocks = hnp.arrays(np.uint16, (1, 32), elements=st.integers(0, 0xFFFF))


def one_block(*values):
    """A block that starts with `values` and is zero after them."""
    return quantize_q8_1_rows(bf16_bits([[*values, *[0.0] * (32 - len(values))]]))


# Weights


@K_QUANTS
def test_blocks_decode_to_ggmls_bits(kquant_blocks, kind):
    name = kind.name.lower()
    decoded = dequantize(kind, kquant_blocks[f"{name}_blocks"])
    assert (decoded.view(np.uint32) == kquant_blocks[f"{name}_dequant_f32"].view(np.uint32)).all()


@K_QUANTS
def test_blocks_decode_as_the_gguf_package_does(kquant_blocks, kind):
    raw = kquant_blocks[f"{kind.name.lower()}_blocks"]
    expected = gguf_package.quants.dequantize(raw, gguf_package.GGMLQuantizationType(kind.ggml_id))
    assert (dequantize(kind, raw) == expected).all()


@K_QUANTS
def test_any_bytes_decode_as_the_gguf_package_does(kind):
    raw = np.random.default_rng(7).integers(0, 256, (64, 3 * kind.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf_package.quants.dequantize(raw, gguf_package.GGMLQuantizationType(kind.ggml_id))
    assert np.array_equal(dequantize(kind, raw), expected, equal_nan=True)


@K_QUANTS
def test_leading_dims_are_kept(kind):
    raw = np.zeros((2, 3, 5, 4 * kind.block_bytes), np.uint8)
    assert dequantize(kind, raw).shape == (2, 3, 5, 1024)


def test_a_type_without_blocks_and_a_partial_block_are_refused():
    with pytest.raises(ArgumentError, match="kind: got 'BF16', allowed: Q2_K, Q3_K, Q6_K"):
        dequantize(BF16, np.zeros((1, 84), np.uint8))
    with pytest.raises(ArgumentError, match=r"row bytes: got 100, allowed: a multiple of 84 \(Q2_K\)"):
        dequantize(Q2_K, np.zeros((1, 100), np.uint8))


# Activations


@given(bf16_blocks)
def test_a_block_follows_the_rule(bits):
    x = bf16_values(bits)[0]
    rows = quantize_q8_1_rows(bits)
    if not np.isfinite(x).all():
        assert rows.d_bits[0, 0] == 0x7FFF
        assert not np.isfinite(rows.sum_bits.view(np.float16)[0, 0])
        assert not rows.q.any()
        return
    amax = np.float32(np.abs(x).max())
    d = amax / np.float32(127)
    assert rows.d_f32[0, 0] == d
    with np.errstate(over="ignore"):
        assert rows.d_bits.view(np.float16)[0, 0] == np.float16(d)
    for value, q in zip(x.astype(np.float32), rows.q[0, 0], strict=True):
        ratio = Fraction(float(value / d)) if d else Fraction(0)
        away = floor(abs(ratio) + Fraction(1, 2))
        assert q == (away if ratio >= 0 else -away)


@given(bf16_blocks)
def test_the_stored_bytes_are_scale_sum_and_ints(bits):
    rows = quantize_q8_1_rows(bits)
    expected = rows.d_bits.astype("<u2").tobytes() + rows.sum_bits.astype("<u2").tobytes() + rows.q.tobytes()
    assert rows.stored.tobytes() == expected


def test_zeros_give_a_block_of_zero_bytes():
    assert not quantize_q8_1_rows(np.zeros((2, 64), np.uint16)).stored.any()
    assert not quantize_q8_1_rows(np.full((1, 32), 0x8000, np.uint16)).stored.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_spoils_its_block_only(bad):
    x = np.ones((1, 96))
    x[0, 40] = bad
    rows = quantize_q8_1_rows(bf16_bits(x))
    assert np.isnan(rows.values()[0].reshape(3, 32)).all(axis=1).tolist() == [False, True, False]
    assert rows.q[0].any(axis=1).tolist() == [True, False, True]


def test_halves_are_rounded_away_from_zero():
    assert one_block(127, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5).q[0, 0, :7].tolist() == [127, 1, -1, 2, -2, 3, -3]


def test_the_ints_use_the_scale_before_it_is_cut_to_f16():
    x = bf16_bits(np.linspace(-1.0, 0.77, 32)[None])
    rows = quantize_q8_1_rows(x)
    assert rows.d_bits.view(np.float16)[0, 0] != rows.d_f32[0, 0]
    assert rows.q[0, 0, 0] == -127
    assert np.abs(rows.d_f32[0, 0] * rows.q[0, 0] - bf16_values(x)).max() <= rows.d_f32[0, 0] * 0.5001


def test_the_smallest_denormals_keep_their_ints_though_the_scale_is_lost():
    rows = quantize_q8_1_rows(np.array([[1, 0x8001, *[0] * 30]], np.uint16))
    assert rows.q[0, 0, :2].tolist() == [127, -127]
    assert rows.d_f32[0, 0] > 0
    assert rows.d_bits[0, 0] == 0


def test_scales_beyond_f16_become_infinite():
    rows = one_block(1e9)
    assert rows.d_bits[0, 0] == rows.sum_bits[0, 0] == 0x7C00


def test_sums_are_added_pairwise_over_distances_16_to_1():
    """2^24 + 1 rounds to 2^24 in f32, so what is left of the ones says which pairs were added first."""
    x = np.zeros(32)
    x[0], x[16], x[8] = 2.0**24, -(2.0**24), 1.0
    x[1], x[9], x[17] = 2.0**24, 1.0, -(2.0**24)
    x[2], x[18], x[10] = 2.0**24, 1.0, -(2.0**24)
    assert one_block(*x).sum_bits.view(np.float16)[0, 0] == 2.0


@pytest.mark.parametrize("k", [0, 16, 48])
def test_a_partial_block_is_refused(k):
    with pytest.raises(ArgumentError, match=f"k: got {k}, allowed: a positive multiple of 32"):
        quantize_q8_1_rows(np.zeros((1, k), np.uint16))


def test_rows_compare_by_identity():
    y = quantize_q8_1_rows(np.zeros((1, 32), np.uint16))
    assert y == y
    assert y != replace(y)


# Products


@K_QUANTS
def test_mmvq_is_the_product_of_what_is_stored(kquant_blocks, kind):
    weight = kquant_blocks[f"{kind.name.lower()}_blocks"][:6]
    rng = np.random.default_rng(3)
    y = quantize_q8_1_rows(bf16_bits(rng.standard_normal((4, 1024))))
    expected = np.zeros((4, 6))
    for m in range(4):
        for n in range(6):
            w = dequantize(kind, weight[n]).astype(np.float64)
            d = y.d_bits.view(np.float16).astype(np.float64)[m]
            expected[m, n] = sum(d[b] * (w[32 * b : 32 * b + 32] @ y.q[m, b]) for b in range(32))
    np.testing.assert_allclose(mmvq(kind, weight, y), expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


def test_mmvq_is_near_the_unquantised_product(kquant_blocks):
    x = np.random.default_rng(5).standard_normal((1, 1024))
    exact = x @ kquant_blocks["q6_k_dequant_f32"][:8].astype(np.float64).T
    near = mmvq(Q6_K, kquant_blocks["q6_k_blocks"][:8], quantize_q8_1_rows(bf16_bits(x)))
    assert np.linalg.norm(near - exact) < 0.02 * np.linalg.norm(exact)
