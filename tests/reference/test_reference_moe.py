# SPDX-License-Identifier: MIT OR Apache-2.0
"""The MoE oracle against values computed elsewhere, and the edges of its parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import ArgumentError
from metrale.reference import moe
from metrale.reference.bf16 import bf16_bits, bf16_values

TOKENS = 40
NO_BIAS = np.zeros(8)


# The small model


def test_router_logits_of_the_small_model(tiny_layer, tiny_expected):
    layer, prefix = tiny_layer
    logits = moe.router_logits(tiny_expected["x_bf16"], layer.router)
    np.testing.assert_allclose(logits, tiny_expected[f"{prefix}_logits"], rtol=1e-12, atol=1e-12)


def test_picks_and_weights_of_the_small_model(tiny_layer, tiny_expected):
    layer, prefix = tiny_layer
    routes = [layer.route(logits) for logits in moe.router_logits(tiny_expected["x_bf16"], layer.router)]
    assert len(routes) == TOKENS
    assert ([r.picks for r in routes] == tiny_expected[f"{prefix}_picks"]).all()
    np.testing.assert_allclose([r.weights for r in routes], tiny_expected[f"{prefix}_weights"], rtol=1e-12)


def test_the_exact_layer_gives_the_small_models_outputs(tiny_layer, tiny_expected):
    layer, prefix = tiny_layer
    out = np.array([moe.moe_layer_exact(layer, x) for x in tiny_expected["x_bf16"]])
    expected = tiny_expected[f"{prefix}_out"]
    assert np.linalg.norm(out - expected) < 1e-12 * np.linalg.norm(expected)


def test_the_quantised_layer_is_near_the_exact_one(tiny_layer, tiny_expected):
    layer, prefix = tiny_layer
    out = np.array([moe.moe_layer_quantised(layer, x).out for x in tiny_expected["x_bf16"]])
    expected = tiny_expected[f"{prefix}_out"]
    assert np.linalg.norm(out - expected) < 0.02 * np.linalg.norm(expected)


def test_layers_matrices_and_stages_compare_by_identity(tiny_layer, tiny_expected):
    layer, _ = tiny_layer
    for value in (layer, layer.gate, moe.moe_layer_quantised(layer, tiny_expected["x_bf16"][0])):
        assert value == value
        assert value != replace(value)


def test_the_stages_of_the_quantised_layer_fit_together(tiny_layer, tiny_expected):
    layer, _ = tiny_layer
    x = tiny_expected["x_bf16"][0]
    stages = moe.moe_layer_quantised(layer, x)
    k, inter, dim = layer.topk, 256, len(x)
    assert stages.gate.shape == stages.up.shape == stages.h.shape == (k, inter)
    assert stages.down.shape == (k, dim)
    assert stages.h_q8.q.shape == (k, inter // 32, 32)
    for name in ("gate", "up", "h", "down", "shared_gate", "shared_up", "shared_h", "shared_down", "out"):
        values = getattr(stages, name)
        assert (bf16_values(bf16_bits(values)) == values).all(), name
    assert (stages.acc_routed == moe.sum_rows(np.zeros(dim, np.float32), bf16_bits(stages.down))).all()
    assert (stages.acc == stages.acc_routed + stages.shared_down.astype(np.float32)).all()
    assert (stages.out == bf16_values(bf16_bits(stages.acc))).all()


def test_a_given_route_replaces_the_selection(tiny_layer, tiny_expected):
    layer, _ = tiny_layer
    x = tiny_expected["x_bf16"][0]
    other = moe.route_select(np.arange(8.0), layer.bias * 0, layer.topk)
    for run in (moe.moe_layer_exact, lambda *args: moe.moe_layer_quantised(*args).out):
        assert not np.allclose(run(layer, x, other), run(layer, x, None))
        assert np.array_equal(
            run(layer, x, layer.route(moe.router_logits(x[None], layer.router)[0])), run(layer, x, None)
        )


def test_a_token_that_is_not_finite_is_refused(tiny_layer, tiny_expected):
    layer, _ = tiny_layer
    x = tiny_expected["x_bf16"][0].copy()
    x[3] = 0x7FC0
    for run in (moe.moe_layer_exact, moe.moe_layer_quantised):
        with pytest.raises(ArgumentError, match="logits: got 'NaN or infinity', allowed: finite numbers"):
            run(layer, x)


# Selection


def test_scores_are_roots_of_softplus_and_linear_above_20():
    scores = moe.routing_scores([-700.0, 0.0, 20.0, 20.5, 1000.0])
    np.testing.assert_allclose(scores[1:] ** 2, [np.log(2), 20 + np.log1p(np.exp(-20)), 20.5, 1000.0], rtol=1e-14)
    assert 0 <= scores[0] < 1e-100


def test_the_temperature_divides_the_logits():
    assert (moe.routing_scores([3.0], 2.0) == moe.routing_scores([1.5])).all()


def test_ties_go_to_the_lower_expert():
    route = moe.route_select([1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 1.0, 1.0], NO_BIAS, 5)
    assert route.picks.tolist() == [1, 2, 4, 0, 3]
    assert route.plan.tolist() == [0, 1, 2, 3, 4]


def test_the_bias_chooses_but_does_not_weigh():
    bias = np.array([0, 0, 0, 9, 0, 0, 0, 5.0])
    route = moe.route_select(np.ones(8), bias, 3, norm_topk_prob=False)
    assert route.picks.tolist() == [3, 7, 0]
    np.testing.assert_allclose(route.weights, np.sqrt(np.log1p(np.e)))


def test_weights_are_normed_then_scaled():
    logits = np.linspace(-3, 3, 8)
    normed = moe.route_select(logits, NO_BIAS, 3, route_scale=1.5)
    plain = moe.route_select(logits, NO_BIAS, 3, route_scale=1.5, norm_topk_prob=False)
    assert normed.weights.sum() == pytest.approx(1.5)
    np.testing.assert_allclose(plain.weights, 1.5 * moe.routing_scores(logits[[7, 6, 5]]))


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=64), st.data())
def test_the_plan_is_the_picks_in_ascending_order(logits, data):
    topk = data.draw(st.integers(1, len(logits)))
    route = moe.route_select(logits, np.zeros(len(logits)), topk)
    assert sorted(route.picks) == route.plan.tolist()
    assert len(set(route.picks)) == topk
    by_expert = dict(zip(route.picks, route.weights, strict=True))
    assert [by_expert[e] for e in route.plan] == route.plan_weights.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_or_biases_that_are_not_finite_select_nothing(bad):
    spoilt = np.zeros(8)
    spoilt[5] = bad
    for route in (moe.route_select(spoilt, NO_BIAS, 2), moe.route_select(np.zeros(8), spoilt, 2)):
        assert not route.finite
        assert route.picks.tolist() == route.plan.tolist() == [-1, -1]
        assert route.weights.tolist() == route.plan_weights.tolist() == [0, 0]


@pytest.mark.parametrize("topk", [0, 9])
def test_more_picks_than_experts_are_refused(topk):
    with pytest.raises(ArgumentError, match=rf"topk: got {topk}, allowed: 1\.\.8"):
        moe.route_select(np.zeros(8), NO_BIAS, topk)


# Device layout


def buffers(route, slot_of):
    return moe.route_buffers(route, np.array(slot_of, np.int32), 1 << 40, 1000, (0, 300, 600))


def test_the_header_holds_flags_picks_weights_and_slots():
    route = moe.route_select([0, 3, 1, 2.0], np.zeros(4), 3)
    out = buffers(route, [7, 6, 5, 4])
    assert out.hdr[0] == 0
    assert out.hdr[1:4].tolist() == [1, 3, 2]
    assert (out.hdr[4:7].view(np.float32) == route.weights.astype(np.float32)).all()
    assert out.hdr[7:].tolist() == [6, 5, 4]
    assert (out.plan_w == route.plan_weights.astype(np.float32)).all()
    assert out.plan_rows.tolist() == [0, 0, 0]
    assert out.ptrs.tolist() == [[(1 << 40) + 1000 * s + offset for s in (6, 5, 4)] for offset in (0, 300, 600)]


def test_a_pick_without_a_slot_points_at_slot_0():
    out = buffers(moe.route_select([0, 3, 1, 2.0], np.zeros(4), 2), [-1, 2, -1, -1])
    assert out.hdr[0] == 1
    assert out.hdr[5:].view(np.int32).tolist() == [2, -1]
    assert out.ptrs[0].tolist() == [(1 << 40) + 2000, 1 << 40]


def test_logits_that_are_not_finite_set_the_other_flag():
    out = buffers(moe.route_select([0, np.nan, 1, 2.0], np.zeros(4), 2), [0, 1, 2, 3])
    assert out.hdr.view(np.int32).tolist() == [2, -1, -1, 0, 0, -1, -1]
    assert out.ptrs[2].tolist() == [(1 << 40) + 600] * 2
    assert not out.plan_w.any()


# Elementwise parts


def test_swiglu_clamps_the_gate_above_and_the_value_on_both_sides():
    gate, up = np.array([[20.0, -20.0, 1.0]]), np.array([[-20.0, 20.0, 2.0]])

    def silu(g):
        return g / (1 + np.exp(-g))

    np.testing.assert_allclose(moe.swiglu(gate, up, None, 10.0), [[-10 * silu(10), 10 * silu(-20), 2 * silu(1)]])
    np.testing.assert_allclose(moe.swiglu(gate, up, [0.5], 0.0), [[-10 * silu(20), 10 * silu(-20), silu(1)]])


def test_swiglu_of_a_very_negative_gate_is_zero():
    assert moe.swiglu(np.array([[-1e4]]), np.array([[1.0]]), None, 0.0) == 0


def test_rows_are_added_one_after_the_other_in_f32():
    rows = bf16_bits([[1.0], [2.0**25], [1.0], [-(2.0**25)]])
    assert moe.sum_rows(np.zeros(1, np.float32), rows)[0] == 0
    assert moe.sum_rows(np.zeros(1, np.float32), rows[[1, 3, 0, 2]])[0] == 2
