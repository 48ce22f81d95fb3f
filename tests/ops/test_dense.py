# SPDX-License-Identifier: MIT OR Apache-2.0
"""gemv.dense_gemv_bf16 against float64."""

import launches
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import assert_bf16_near, bf16, same_bits

from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.dense import dense_gemv

ONE, TWO, INF, NAN = 0x3F80, 0x4000, 0x7F80, 0x7FC0


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("k", [1, 7, 8, 31, 256, 257, 2048, 2304])
def test_any_shape(gpu, n, k):
    rng = np.random.default_rng([n, k])
    x, weight = bf16(rng, k), bf16(rng, n, k)
    assert_bf16_near(launches.dense_gemv(gpu, x, weight), dense_gemv(x, weight))


@pytest.mark.parametrize("k", range(1, 18))
def test_every_length_of_the_last_eight(gpu, k):
    rng = np.random.default_rng(k)
    x, weight = bf16(rng, k), bf16(rng, 3, k)
    assert_bf16_near(launches.dense_gemv(gpu, x, weight), dense_gemv(x, weight))


@given(n=st.integers(1, 70), k=st.integers(1, 700), seed=st.integers(0, 99))
def test_exact_sums_are_exact(gpu, n, k, seed):
    """Of small integers every partial sum is an integer that f32 holds, in any order."""
    rng = np.random.default_rng(seed)
    x, weight = bf16_bits(rng.integers(-4, 5, k)), bf16_bits(rng.integers(-4, 5, (n, k)))
    assert same_bits(launches.dense_gemv(gpu, x, weight), bf16_bits(dense_gemv(x, weight)))


@pytest.mark.parametrize("k", [64, 1000])
@pytest.mark.parametrize("shift", [2, 8])
def test_alignment_does_not_change_bits(gpu, k, shift):
    rng = np.random.default_rng(k)
    x, weight = bf16(rng, k), bf16(rng, 20, k)
    assert same_bits(launches.dense_gemv(gpu, x, weight, shift), launches.dense_gemv(gpu, x, weight))


@pytest.mark.parametrize("k", [1, 250, 2047])
def test_zeros_after_a_ragged_row_do_not_change_bits(gpu, k):
    rng = np.random.default_rng(k)
    x, weight = bf16(rng, k), bf16(rng, 20, k)
    padded = launches.dense_gemv(gpu, np.pad(x, (0, 2048 - k)), np.pad(weight, ((0, 0), (0, 2048 - k))))
    assert same_bits(launches.dense_gemv(gpu, x, weight), padded)


def test_an_output_depends_on_its_row_alone(gpu):
    rng = np.random.default_rng(0)
    x, weight = bf16(rng, 600), bf16(rng, 35, 600)
    together = launches.dense_gemv(gpu, x, weight)
    alone = [launches.dense_gemv(gpu, x, row[None])[0] for row in weight]
    assert together.tolist() == alone


@pytest.mark.parametrize("k", [300, 304])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_weight_that_is_not_finite_spoils_its_output_only(gpu, bad, k):
    rng = np.random.default_rng(1)
    x, weight = bf16(rng, k), bf16(rng, 33, k)
    clean = launches.dense_gemv(gpu, x, weight)
    weight[18, k - 1] = bad
    got = launches.dense_gemv(gpu, x, weight)
    assert not np.isfinite(bf16_values(got[18]))
    assert same_bits(np.delete(got, 18), np.delete(clean, 18))


def test_an_infinite_input_gives_signed_infinities_and_nan(gpu):
    x = np.full(40, ONE, np.uint16)
    x[39] = INF
    weight = np.full((3, 40), ONE, np.uint16)
    weight[:, 39] = [TWO, TWO | 0x8000, 0]
    got = bf16_values(launches.dense_gemv(gpu, x, weight))
    np.testing.assert_array_equal(got, [np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("k", [17, 512])
def test_a_nan_input_reaches_every_output(gpu, k):
    x, weight = np.full(k, ONE, np.uint16), np.full((18, k), ONE, np.uint16)
    x[k // 2] = NAN
    assert np.isnan(bf16_values(launches.dense_gemv(gpu, x, weight))).all()


@pytest.mark.gpu
def test_the_engram_projection_of_the_real_model(cuda):
    rng = np.random.default_rng(2)
    x, rows = bf16(rng, 6144), bf16(rng, 512, 6144)
    got = launches.dense_gemv(cuda, x, np.tile(rows, (50, 1)))
    assert_bf16_near(got, np.tile(dense_gemv(x, rows), 50))
