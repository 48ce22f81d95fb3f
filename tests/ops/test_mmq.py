# SPDX-License-Identifier: MIT OR Apache-2.0
"""Activations and products of the int8 tensor cores, against float64."""

import launches_grouped as launches
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from samples import assert_bf16_near, bf16, kquant_rows, same_bits

from metrale.formats.kquant import Q2_K, Q3_K
from metrale.reference.kquant import dequantize
from metrale.reference.mmq import quantize_mmq

LAYOUTS = pytest.mark.parametrize("layout", ["d4", "d2s6"])
KINDS = pytest.mark.parametrize("kind", [Q2_K, Q3_K], ids=str)


def activations(rng, kind, m, k):
    """What the quantiser of the kind's layout stores, and its values."""
    return quantize_mmq(bf16(rng, m, k), launches.LAYOUTS[kind.name])


def product(kind, weight, y):
    return y.values @ dequantize(kind, weight).astype(np.float64).T


# Activations


@LAYOUTS
@given(x=hnp.arrays(np.uint16, st.just((2, 96)), elements=st.integers(0, 0xFFFF)))
def test_activations_of_any_bits_equal_the_oracles_bytes(gpu, layout, x):
    assert same_bits(launches.quantise_mmq(gpu, layout, x), quantize_mmq(x, layout).stored.reshape(-1))


@LAYOUTS
@pytest.mark.parametrize(("m", "k"), [(1, 32), (3, 256), (129, 288), (2, 2304)])
def test_activations_of_any_shape_equal_the_oracles_bytes(gpu, layout, m, k):
    x = bf16(np.random.default_rng([m, k]), m, k)
    assert same_bits(launches.quantise_mmq(gpu, layout, x), quantize_mmq(x, layout).stored.reshape(-1))


# Products


@KINDS
@pytest.mark.parametrize(("n", "m", "k"), [(1, 1, 256), (128, 8, 512), (130, 9, 768), (300, 130, 256), (16, 64, 2304)])
def test_products(gpu, kind, n, m, k):
    rng = np.random.default_rng([n, m, k])
    weight, y = kquant_rows(rng, kind, n, k), activations(rng, kind, m, k)
    got = launches.mmq128(gpu, kind, weight, y.stored, m)
    assert_bf16_near(got, product(kind, weight, y))


@KINDS
def test_both_forms_have_the_same_bits(gpu, kind):
    rng = np.random.default_rng(1)
    weight, y = kquant_rows(rng, kind, 256, 512), activations(rng, kind, 21, 512)
    checked = launches.mmq128(gpu, kind, weight, y.stored, 21, "wc")
    assert same_bits(launches.mmq128(gpu, kind, weight, y.stored, 21, "nc"), checked)


@KINDS
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(gpu, kind):
    rng = np.random.default_rng(2)
    weight, x = kquant_rows(rng, kind, 40, 512), bf16(rng, 40, 512)
    layout = launches.LAYOUTS[kind.name]
    together = launches.mmq128(gpu, kind, weight, quantize_mmq(x, layout).stored, 40)
    for row in (0, 7, 8, 39):
        alone = launches.mmq128(gpu, kind, weight, quantize_mmq(x[row : row + 1], layout).stored, 1)
        assert same_bits(alone[0], together[row])


@KINDS
def test_strides_and_a_part_of_the_columns(gpu, kind):
    rng = np.random.default_rng(3)
    weight, y = kquant_rows(rng, kind, 5, 768), activations(rng, kind, 200, 512)
    narrow = np.ascontiguousarray(weight[:, : 2 * kind.block_bytes])
    got = launches.mmq128(gpu, kind, weight, y.stored, 3, y_rows=200, out_stride=9, k=512)
    assert same_bits(np.ascontiguousarray(got[:, :5]), launches.mmq128(gpu, kind, narrow, y.stored, 3, y_rows=200))
    assert not got[:, 5:].any()


@KINDS
def test_the_largest_products_are_exact(gpu, kind):
    """All bits set in scales and quants, and the largest ints, of both signs."""
    weight = np.full((16, kind.block_bytes), 0xFF, np.uint8)
    weight[:, -2 if kind is Q3_K else -4 :] = np.array([1, 1], "<f2").view(np.uint8)[: 2 if kind is Q3_K else 4]
    weight[8:, :-4] = 0  # of Q3_K: scale -32 and q -4, whose product is the largest
    x = np.where(np.arange(256) % 2, 0x42FE, 0xC2FE).astype(np.uint16)[None].repeat(2, 0)  # 127, -127
    x[1] &= 0x7FFF
    y = quantize_mmq(x, launches.LAYOUTS[kind.name])
    assert_bf16_near(launches.mmq128(gpu, kind, weight, y.stored, 2), product(kind, weight, y))


@KINDS
@pytest.mark.parametrize("bad", [0x7FC0, 0x7F80])
def test_what_is_not_finite_spoils_its_row_only(gpu, kind, bad):
    rng = np.random.default_rng(4)
    weight, x = kquant_rows(rng, kind, 16, 256), bf16(rng, 9, 256)
    layout = launches.LAYOUTS[kind.name]
    clean = launches.mmq128(gpu, kind, weight, quantize_mmq(x, layout).stored, 9)
    x[4, 100] = bad
    got = launches.mmq128(gpu, kind, weight, quantize_mmq(x, layout).stored, 9)
    assert ((got[4] & 0x7FFF) > 0x7F80).all()
    assert same_bits(np.delete(got, 4, 0), np.delete(clean, 4, 0))
