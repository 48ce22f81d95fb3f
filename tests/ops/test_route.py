# SPDX-License-Identifier: MIT OR Apache-2.0
"""moe_v41.moe_v41_route_select against the oracle, and against the same arithmetic step by step in f32."""

import launches
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.moe_v41._select import route_select as select_on_host
from metrale.reference.moe import route_buffers, route_select, routing_scores

NOT_RESIDENT, NOT_FINITE = 1, 2
LAYOUT = {"arena_base": 0x7F00_0000_1000, "slot_bytes": 12_810_240, "offsets": (64, 3_870_720, 7_741_440)}
SIZES = pytest.mark.parametrize(("n", "topk"), [(1, 1), (8, 3), (31, 31), (33, 32), (384, 6), (1000, 8), (1024, 32)])


def sample(n, seed=0):
    rng = np.random.default_rng([n, seed])
    return rng.standard_normal(n, np.float32) * 3, rng.standard_normal(n, np.float32) * np.float32(0.1)


def picks_of(buffers, topk):
    return buffers.hdr[1 : 1 + topk].view(np.int32).tolist()


def weights_of(buffers, topk):
    return buffers.hdr[1 + topk : 1 + 2 * topk].view(np.float32)


def slots_of(buffers, topk):
    return buffers.hdr[1 + 2 * topk :].view(np.int32).tolist()


# Against the oracle


@SIZES
def test_everything_but_the_weights_bits_equals_the_oracles(gpu, n, topk):
    logits, bias = sample(n)
    slot_of = np.random.default_rng(n).permutation(n).astype(np.int32)
    got = launches.route_select(gpu, logits, bias, topk, slot_of=slot_of, **LAYOUT)
    route = route_select(logits, bias, topk)
    want = route_buffers(route, slot_of, LAYOUT["arena_base"], LAYOUT["slot_bytes"], LAYOUT["offsets"])
    assert got.hdr[0] == 0
    assert picks_of(got, topk) == route.picks.tolist()
    assert slots_of(got, topk) == slots_of(want, topk)
    assert got.plan_rows.tolist() == [0] * topk
    assert got.ptrs.tolist() == want.ptrs.tolist()


@SIZES
@pytest.mark.parametrize("norm_topk", [False, True])
@pytest.mark.parametrize(("gate_temp", "route_scale"), [(1.0, 1.0), (0.7, 1.5), (3.0, 2.5)])
def test_weights(gpu, n, topk, norm_topk, gate_temp, route_scale):
    logits, bias = sample(n)
    options = {"gate_temp": gate_temp, "route_scale": route_scale}
    got = launches.route_select(gpu, logits, bias, topk, norm_topk=norm_topk, **options)
    route = route_select(logits, bias, topk, norm_topk_prob=norm_topk, **options)
    np.testing.assert_allclose(weights_of(got, topk), route.weights, rtol=2e-6)
    np.testing.assert_allclose(got.plan_w, route.plan_weights, rtol=2e-6)


@pytest.mark.parametrize("lowest", [-80.0, -95.0, -150.0])
def test_weights_of_scores_as_small_as_the_epsilon(gpu, lowest):
    logits = np.float32(lowest) + np.arange(4, dtype=np.float32)
    want = route_select(logits, np.zeros(4), 3).weights
    assert want.sum() < 1 - 1e-4
    np.testing.assert_allclose(weights_of(launches.route_select(gpu, logits, None, 3), 3), want, rtol=2e-6)


def test_weights_leave_the_bias_out(gpu):
    logits, bias = np.array([1.0, 2.0, 3.0], np.float32), np.array([9.0, 0.0, 0.0], np.float32)
    got = launches.route_select(gpu, logits, bias, 2, norm_topk=False)
    assert picks_of(got, 2) == [0, 2]
    np.testing.assert_allclose(weights_of(got, 2), routing_scores(logits[[0, 2]]), rtol=2e-6)


def test_a_null_bias_is_a_bias_of_zeros(gpu):
    logits, _ = sample(50)
    without = launches.route_select(gpu, logits, None, 5)
    zeros = launches.route_select(gpu, logits, np.zeros(50, np.float32), 5)
    assert without.hdr.tobytes() == zeros.hdr.tobytes()


@given(logits=st.lists(st.sampled_from([-2.0, 0.0, 0.5, 4.0]), min_size=1, max_size=80), data=st.data())
def test_ties_go_to_the_lower_expert(gpu, logits, data):
    topk = data.draw(st.integers(1, min(len(logits), 32)))
    got = launches.route_select(gpu, np.array(logits, np.float32), None, topk)
    assert picks_of(got, topk) == sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:topk]


@pytest.mark.parametrize("n", [40, 1024])
def test_all_equal_picks_the_first_experts(gpu, n):
    got = launches.route_select(gpu, np.zeros(n, np.float32), None, 32)
    assert picks_of(got, 32) == list(range(32))


# Experts without a slot


@pytest.mark.parametrize("missing", [[0], [2], [0, 1, 2, 3]])
def test_a_pick_without_a_slot_points_at_slot_0_and_sets_its_flag(gpu, missing):
    logits, bias = sample(64)
    route = route_select(logits, bias, 4)
    slot_of = np.arange(64, dtype=np.int32)
    slot_of[route.plan[missing]] = -1
    got = launches.route_select(gpu, logits, bias, 4, slot_of=slot_of, **LAYOUT)
    want = route_buffers(route, slot_of, LAYOUT["arena_base"], LAYOUT["slot_bytes"], LAYOUT["offsets"])
    assert got.hdr[0] == NOT_RESIDENT
    assert slots_of(got, 4) == slots_of(want, 4)
    assert got.ptrs.tolist() == want.ptrs.tolist()
    assert got.ptrs[:, missing[0]].tolist() == [LAYOUT["arena_base"] + offset for offset in LAYOUT["offsets"]]


def test_a_missing_expert_that_is_not_picked_sets_no_flag(gpu):
    logits, bias = sample(64)
    slot_of = np.arange(64, dtype=np.int32)
    slot_of[np.setdiff1d(np.arange(64), route_select(logits, bias, 4).picks)] = -1
    assert launches.route_select(gpu, logits, bias, 4, slot_of=slot_of).hdr[0] == 0


def test_slots_far_into_a_large_arena(gpu):
    slot_of = np.array([0, 2**31 - 1], np.int32)
    got = launches.route_select(gpu, np.array([0, 1], np.float32), None, 1, slot_of=slot_of, **LAYOUT)
    address = LAYOUT["arena_base"] + (2**31 - 1) * LAYOUT["slot_bytes"]
    assert got.ptrs[:, 0].tolist() == [address + offset for offset in LAYOUT["offsets"]]


# Logits that are not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logits", "bias"])
@pytest.mark.parametrize("expert", [0, 37, 383])
def test_nothing_is_picked_when_a_value_is_not_finite(gpu, bad, where, expert):
    logits, bias = sample(384)
    {"logits": logits, "bias": bias}[where][expert] = bad
    got = launches.route_select(gpu, logits, bias, 6, **LAYOUT)
    assert got.hdr[0] == NOT_FINITE
    assert picks_of(got, 6) == slots_of(got, 6) == [-1] * 6
    assert not weights_of(got, 6).any()
    assert not got.plan_w.any()
    assert not got.plan_rows.any()
    assert got.ptrs.tolist() == [[LAYOUT["arena_base"] + offset] * 6 for offset in LAYOUT["offsets"]]


# Against the host's selection, and the arithmetic step by step: bits


@SIZES
@pytest.mark.parametrize("norm_topk", [False, True])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_the_host_selects_with_the_same_bits(gpu, n, topk, norm_topk, bad):
    logits, bias = sample(n, seed=2)
    if bad is not None:
        logits[n // 2] = bad
    flags, picks, weights = select_on_host(logits, bias, topk, 0.7, 1.5, norm_topk)
    got = launches.route_select(gpu, logits, bias, topk, gate_temp=0.7, route_scale=1.5, norm_topk=norm_topk)
    assert got.hdr[0] == flags
    assert picks_of(got, topk) == picks.tolist()
    assert weights_of(got, topk).tobytes() == weights.tobytes()


def test_scores(gpu):
    logits = np.concatenate([np.linspace(-160, 60, 4001), [-17, 20, 0, 1e-30, 1e30]]).astype(np.float32)
    np.testing.assert_allclose(launches.route_scores(gpu, logits), routing_scores(logits), rtol=4e-7)


@pytest.mark.parametrize("gate_temp", [0.25, 1.0, 8.0])
def test_scores_divide_by_the_temperature(gpu, gate_temp):
    logits = np.linspace(-4, 4, 100, dtype=np.float32)
    got = launches.route_scores(gpu, logits, gate_temp)
    np.testing.assert_allclose(got, routing_scores(logits, gate_temp), rtol=4e-7)


def test_scores_never_fall_as_logits_rise(gpu):
    logits = np.sort(np.random.default_rng(0).uniform(-30, 30, 20_000).astype(np.float32))
    assert (np.diff(launches.route_scores(gpu, logits)) >= 0).all()


@SIZES
@pytest.mark.parametrize("norm_topk", [False, True])
def test_selection_is_f32_arithmetic_on_the_scores(gpu, n, topk, norm_topk):
    logits, bias = sample(n, seed=1)
    score, scale = launches.route_scores(gpu, logits, 0.9), np.float32(1.5)
    picks = np.lexsort((np.arange(n), -(score + bias)))[:topk]
    total = np.float32(0)
    for pick in picks:
        total += score[pick]
    weights = (score[picks] / (total + np.float32(1e-20)) if norm_topk else score[picks]) * scale

    got = launches.route_select(gpu, logits, bias, topk, gate_temp=0.9, route_scale=1.5, norm_topk=norm_topk)
    order = np.argsort(picks)
    assert picks_of(got, topk) == picks.tolist()
    assert weights_of(got, topk).tobytes() == weights.tobytes()
    assert got.plan_w.tobytes() == weights[order].tobytes()
    assert slots_of(got, topk) == picks[order].tolist()
