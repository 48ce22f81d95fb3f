# SPDX-License-Identifier: MIT OR Apache-2.0
"""Module moe_v41 but for its selection: SwiGLU, sums, router products, the slot table."""

import launches
import numpy as np
import pytest
from launches import ROUTERS
from samples import assert_bf16_rounded, bf16, same_bits

from metrale.reference import moe as oracle
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.dense import dense_gemm

LENGTHS = pytest.mark.parametrize("n", [1, 7, 8, 9, 2048, 2055, 5120])
SHIFTS = pytest.mark.parametrize("shift", [0, 2, 8])
EACH_ROUTER = pytest.mark.parametrize("form", ROUTERS)
NAN, INF, MINUS = 0x7FC0, 0x7F80, 0x8000


# SwiGLU


@pytest.mark.parametrize("limit", [0.0, -1.0, 0.75, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "inter"), [(1, 1), (3, 256), (2, 2304), (5, 77)])
def test_swiglu(gpu, rows, inter, weighted, limit):
    rng = np.random.default_rng([rows, inter])
    gate, up = bf16(rng, rows, inter, scale=4), bf16(rng, rows, inter, scale=4)
    w = rng.uniform(0.1, 2, rows).astype(np.float32) if weighted else None
    want = oracle.swiglu(bf16_values(gate), bf16_values(up), w, limit)
    assert_bf16_rounded(launches.swiglu(gpu, gate, up, w, limit), want)


@SHIFTS
@pytest.mark.parametrize("inter", [40, 45])
def test_swiglu_at_any_alignment(gpu, inter, shift):
    rng = np.random.default_rng(inter)
    gate, up = bf16(rng, 3, inter), bf16(rng, 3, inter)
    assert same_bits(launches.swiglu(gpu, gate, up, None, 1.0, shift), launches.swiglu(gpu, gate, up, None, 1.0))


def test_swiglu_of_more_rows_than_a_grid_is_high(gpu):
    rng = np.random.default_rng(0)
    gate, up = bf16(rng, 65_540, 8), bf16(rng, 65_540, 8)
    w = rng.uniform(0.1, 2, 65_540).astype(np.float32)
    want = oracle.swiglu(bf16_values(gate), bf16_values(up), w, 10.0)
    assert_bf16_rounded(launches.swiglu(gpu, gate, up, w, 10.0), want)


def test_swiglu_over_every_finite_gate(gpu):
    gate = np.arange(1 << 16, dtype=np.uint16).reshape(2, -1)
    gate = gate[:, np.isfinite(bf16_values(gate[0]))]
    ones = np.full(gate.shape, 0x3F80, np.uint16)
    want = oracle.swiglu(bf16_values(gate), bf16_values(ones), None, 0.0)
    assert_bf16_rounded(launches.swiglu(gpu, gate, ones, None, 0.0), want)


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_a_nan_goes_through_swiglu(gpu, limit):
    gate, up = np.full((1, 24), 0x3F80, np.uint16), np.full((1, 24), 0x3F80, np.uint16)
    gate[0, 3], up[0, 17] = NAN, NAN
    got = bf16_values(launches.swiglu(gpu, gate, up, None, limit))
    assert np.isnan(got[0]).nonzero()[0].tolist() == [3, 17]


def test_the_limit_holds_back_infinities(gpu):
    gate, up = np.array([[INF, 0x3F80, 0x3F80]], np.uint16), np.array([[0x3F80, INF, INF | MINUS]], np.uint16)
    want = oracle.swiglu(bf16_values(gate), bf16_values(up), None, 2.0)
    assert np.isfinite(want).all()
    assert_bf16_rounded(launches.swiglu(gpu, gate, up, None, 2.0), want)


# Sums


@LENGTHS
@SHIFTS
def test_accumulate_adds_once_in_f32(gpu, n, shift):
    rng = np.random.default_rng(n)
    acc, src = rng.standard_normal(n, np.float32), bf16(rng, n)
    assert same_bits(launches.accumulate(gpu, acc, src, shift), oracle.accumulate(acc, src))


@LENGTHS
@pytest.mark.parametrize("rows", [1, 2, 6, 9])
def test_sum_rows_has_the_bits_of_accumulating_row_after_row(gpu, n, rows):
    rng = np.random.default_rng([n, rows])
    acc, src = rng.standard_normal(n, np.float32) * 100, bf16(rng, rows, n)
    one_by_one = acc
    for row in src:
        one_by_one = launches.accumulate(gpu, one_by_one, row)
    assert same_bits(launches.sum_rows(gpu, acc, src), one_by_one)


@SHIFTS
def test_sum_rows_rounds_after_each_row(gpu, shift):
    rng = np.random.default_rng(1)
    acc, src = rng.standard_normal(75, np.float32) * 100, bf16(rng, 6, 75)
    assert same_bits(launches.sum_rows(gpu, acc, src, shift), oracle.sum_rows(acc, src))


@LENGTHS
@SHIFTS
def test_finish_rounds_to_nearest_even(gpu, n, shift):
    acc = np.random.default_rng(n).integers(0, 0x7F7F8000, n).astype(np.uint32).view(np.float32)
    acc.view(np.uint32)[::3] |= 0x8000
    acc.view(np.uint32)[::3] &= 0xFFFF8000  # ties
    assert same_bits(launches.finish(gpu, acc, shift), bf16_bits(acc))


def test_finish_keeps_infinities_and_nan(gpu):
    acc = np.array([np.inf, -np.inf, np.nan, 3.4e38, -0.0], np.float32)
    np.testing.assert_array_equal(bf16_values(launches.finish(gpu, acc)), [np.inf, -np.inf, np.nan, np.inf, -0.0])


# Router products


def sum_error_bound(x, weight):
    """What f32 can round off a sum in the router's order: the additions of a lane, and five between lanes."""
    additions = -(-x.shape[1] // 256) * 8 + 5
    return additions * 2.0**-24 * 1.01 * (np.abs(bf16_values(x)) @ np.abs(bf16_values(weight)).T)


@EACH_ROUTER
@pytest.mark.parametrize(("n", "k"), [(1, 8), (3, 256), (8, 512), (9, 1000), (17, 2304), (5, 5), (6, 4097)])
def test_logits(gpu, form, n, k):
    rng = np.random.default_rng([n, k])
    x, weight = bf16(rng, 3, k), bf16(rng, n, k)
    error = np.abs(launches.router(gpu, form, x, weight) - dense_gemm(x, weight))
    assert (error <= sum_error_bound(x, weight)).all()


@EACH_ROUTER
@pytest.mark.parametrize("k", range(1, 18))
def test_logits_of_every_length_of_the_last_eight(gpu, form, k):
    rng = np.random.default_rng(k)
    x, weight = bf16(rng, 2, k), bf16(rng, 3, k)
    error = np.abs(launches.router(gpu, form, x, weight) - dense_gemm(x, weight))
    assert (error <= sum_error_bound(x, weight)).all()


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize(("n", "k"), [(5, 512), (4, 2309), (9, 24)])
def test_both_forms_give_the_same_bits(gpu, m, n, k):
    rng = np.random.default_rng([m, n, k])
    x, weight = bf16(rng, m, k), bf16(rng, n, k)
    one, other = (launches.router(gpu, form, x, weight) for form in ROUTERS)
    assert same_bits(one, other)


@EACH_ROUTER
def test_a_token_does_not_depend_on_the_tokens_beside_it(gpu, form):
    rng = np.random.default_rng(2)
    x, weight = bf16(rng, 8, 520), bf16(rng, 6, 520)
    alone = np.concatenate([launches.router(gpu, form, row[None], weight) for row in x])
    for m in range(1, 9):
        assert same_bits(launches.router(gpu, form, x[:m], weight), alone[:m])


@EACH_ROUTER
@pytest.mark.parametrize("k", [512, 519])
def test_alignment_does_not_change_logits(gpu, form, k):
    rng = np.random.default_rng(k)
    x, weight = bf16(rng, 2, k), bf16(rng, 5, k)
    shifted = launches.router(gpu, form, x, weight, shift=2)
    assert same_bits(shifted, launches.router(gpu, form, x, weight))


@EACH_ROUTER
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_token_spoils_its_own_logits_only(gpu, form, bad):
    rng = np.random.default_rng(3)
    x, weight = bf16(rng, 3, 300), bf16(rng, 7, 300)
    clean = launches.router(gpu, form, x, weight)
    x[1, 299] = bad
    got = launches.router(gpu, form, x, weight)
    assert not np.isfinite(got[1]).any()
    assert same_bits(got[[0, 2]], clean[[0, 2]])


@pytest.mark.gpu
@EACH_ROUTER
@pytest.mark.parametrize("m", [1, 8])
def test_the_router_of_the_real_model(cuda, form, m):
    rng = np.random.default_rng(m)
    x, weight = bf16(rng, m, 5120), bf16(rng, 384, 5120, scale=0.02)
    error = np.abs(launches.router(cuda, form, x, weight) - dense_gemm(x, weight))
    assert (error <= sum_error_bound(x, weight)).all()


# The slot table


@pytest.mark.parametrize("n", [1, 255, 256, 300])
def test_slot_table_set(gpu, n):
    rng = np.random.default_rng(n)
    table = rng.integers(-1, 50, (64, 24)).astype(np.int32)
    keys = rng.choice(table.size, n, replace=False)
    slots = rng.integers(-1, 1000, n)
    want = table.copy()
    want.reshape(-1)[keys] = slots
    triples = np.stack([keys // 24, keys % 24, slots], axis=1).astype(np.int32)
    assert same_bits(launches.slot_table_set(gpu, table, triples), want)


def test_the_last_entry_of_the_largest_table(gpu):
    table = np.full((64, 1024), -1, np.int32)
    got = launches.slot_table_set(gpu, table, np.array([[63, 1023, 7]], np.int32))
    assert got[63, 1023] == 7
    assert (got.reshape(-1)[:-1] == -1).all()
