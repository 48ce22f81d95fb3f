# SPDX-License-Identifier: MIT OR Apache-2.0
"""Module gemm against float64."""

import launches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launches_gemm import KERNELS, dense_gemm
from samples import assert_bf16_near, assert_near, bf16, same_bits

from metrale.reference import dense as oracle
from metrale.reference.bf16 import bf16_bits, bf16_values

INF, NAN = 0x7F80, 0x7FC0
F32_OUT_BOUND = 1e-4

EACH = pytest.mark.parametrize("form", KERNELS)


def assert_right(got, x, weight):
    expected = oracle.dense_gemm(x, weight)
    if got.dtype == np.uint16:
        assert_bf16_near(got, expected)
    else:
        # Against the length that a row of such products has: one of few outputs may be short by chance.
        length = np.linalg.norm(bf16_values(x), axis=-1) * np.linalg.norm(bf16_values(weight)) / np.sqrt(x.shape[-1])
        assert (np.linalg.norm(got - expected, axis=-1) <= F32_OUT_BOUND * length).all()


def values(got):
    return bf16_values(got) if got.dtype == np.uint16 else got


@EACH
@pytest.mark.parametrize("m", [1, 2, 127, 130])
@pytest.mark.parametrize("n", [1, 33, 128, 131])
@pytest.mark.parametrize("k", [1, 15, 64, 200, 321])
def test_any_shape(device, form, m, n, k):
    rng = np.random.default_rng([m, n, k])
    x, weight = bf16(rng, m, k), bf16(rng, n, k)
    assert_right(dense_gemm(device, form, x, weight), x, weight)


@EACH
@pytest.mark.parametrize(("m", "n", "k"), [(9, 140, 136), (17, 30, 67), (129, 17, 256)])
def test_any_order_of_threads(gpu, form, m, n, k):
    rng = np.random.default_rng([m, n, k])
    x, weight = bf16(rng, m, k), bf16(rng, n, k)
    assert_right(dense_gemm(gpu, form, x, weight), x, weight)


@EACH
@given(m=st.integers(1, 150), n=st.integers(1, 150), k=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_exact_sums_are_exact(device, form, m, n, k, seed):
    """Of small integers every partial sum is an integer that f32 holds, in any order."""
    rng = np.random.default_rng(seed)
    x, weight = (bf16_bits(rng.integers(-4, 5, (rows, k))) for rows in (m, n))
    got = values(dense_gemm(device, form, x, weight))
    expected = oracle.dense_gemm(x, weight)
    np.testing.assert_array_equal(got, bf16_values(bf16_bits(expected)) if form == "dense_gemm_bf16" else expected)


@EACH
@pytest.mark.parametrize("k", [64, 200])
@pytest.mark.parametrize("shift", [2, 8])
def test_alignment_does_not_change_bits(device, form, k, shift):
    rng = np.random.default_rng(k)
    x, weight = bf16(rng, 20, k), bf16(rng, 35, k)
    assert same_bits(dense_gemm(device, form, x, weight, shift), dense_gemm(device, form, x, weight))


@EACH
def test_zeros_after_a_ragged_row_do_not_change_bits(device, form):
    rng = np.random.default_rng(4)
    x, weight = bf16(rng, 20, 250), bf16(rng, 35, 250)
    padded = [np.pad(rows, ((0, 0), (0, 256 - 250))) for rows in (x, weight)]
    assert same_bits(dense_gemm(device, form, x, weight), dense_gemm(device, form, *padded))


@EACH
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 128])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(gpu, form, rows):
    rng = np.random.default_rng(5)
    x, weight = bf16(rng, 129, 136), bf16(rng, 20, 136)
    together = dense_gemm(gpu, form, x, weight)
    assert same_bits(dense_gemm(gpu, form, x[-rows:], weight), together[-rows:].copy())


@pytest.mark.parametrize("k", [64, 300, 2304])
@pytest.mark.parametrize("m", [1, 8, 20])
def test_the_f32_form_has_the_routers_bits(gpu, m, k):
    rng = np.random.default_rng([m, k])
    x, weight = bf16(rng, m, k), bf16(rng, 30, k)
    groups = [x[i : i + 8] for i in range(0, m, 8)]
    expected = [launches.router(gpu, "moe_v41_router_gemv_f32out", group, weight) for group in groups]
    assert same_bits(dense_gemm(gpu, "dense_gemm_bf16_f32out", x, weight), np.concatenate(expected))


@EACH
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("k", [70, 128])
def test_a_value_that_is_not_finite_spoils_its_row_or_column_only(device, form, bad, k):
    rng = np.random.default_rng(6)
    x, weight = bf16(rng, 20, k), bf16(rng, 40, k)
    clean = dense_gemm(device, form, x, weight)
    x[17, k - 1] = weight[33, 0] = bad
    got = dense_gemm(device, form, x, weight)
    assert not np.isfinite(values(got[17])).any()
    assert not np.isfinite(values(got[:, 33])).any()
    kept = np.ix_(np.arange(20) != 17, np.arange(40) != 33)
    assert same_bits(got[kept], clean[kept])


@EACH
def test_infinities_add_like_ieee(device, form):
    x, weight = np.full((1, 40), 0x3F80, np.uint16), np.full((4, 40), 0x3F80, np.uint16)
    x[0, 39] = INF
    weight[:, 39] = [0x4000, 0xC000, 0, 0x4000]
    weight[3, 38], x[0, 38] = 0xFF80, 0x4000
    np.testing.assert_array_equal(values(dense_gemm(device, form, x, weight))[0], [np.inf, -np.inf, np.nan, np.nan])


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize(("m", "n", "k"), [(512, 25600, 6144), (257, 5121, 6137)])
def test_large_products(cuda, form, m, n, k):
    rng = np.random.default_rng(7)
    x, weight = bf16(rng, m, k), bf16(rng, n, k)
    got = values(dense_gemm(cuda, form, x, weight))[:: m // 5, :: n // 50]
    expected = oracle.dense_gemm(x[:: m // 5], weight[:: n // 50])
    assert_near(got, expected, 2.5e-3 if form == "dense_gemm_bf16" else F32_OUT_BOUND)
