# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated delta rule's oracle against published cases, and against its closed form."""

import numpy as np
import pytest
from conftest import DATA

from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.gdn import decay, gated_delta_rule, raw_beta, raw_gate, unit_rows


@pytest.mark.parametrize("case", range(5))
def test_published_cases(case):
    with np.load(DATA / "gated_delta_rule.npz") as file:
        names = ("h0", "q", "k", "v", "gate", "beta", "out", "state_steps", "states")
        h, q, k, v, gate, beta, out, steps, states = (file[f"c{case}_{name}"] for name in names)
    got = gated_delta_rule(h, q, k, v, gate, beta)
    np.testing.assert_allclose(got.out, out, rtol=0, atol=1e-6)
    error = np.linalg.norm(got.states[steps] - states, axis=(-2, -1))
    assert (error <= 2e-7 * np.linalg.norm(states, axis=(-2, -1))).all()


def one_head(tokens, seed=0):
    rng = np.random.default_rng(seed)
    bits = [bf16_bits(rng.standard_normal((1, tokens, 1, n)) / 2) for n in (4, 4, 3)]
    gate, beta = rng.uniform(0.1, 0.9, (2, 1, tokens, 1))
    return rng.standard_normal((1, 1, 4, 3)), *bits, gate, beta


def test_a_token_is_a_reflection_and_an_outer_product():
    h, q, k, v, gate, beta = one_head(1)
    got = gated_delta_rule(h, q, k, v, gate, beta)
    kv, vv = bf16_values(k)[0, 0, 0], bf16_values(v)[0, 0, 0]
    want = (np.eye(4) - beta.item() * np.outer(kv, kv)) @ (gate.item() * h[0, 0]) + beta.item() * np.outer(kv, vv)
    np.testing.assert_allclose(got.states[0, 0, 0], want, rtol=1e-12)
    np.testing.assert_allclose(got.out[0, 0, 0], want.T @ bf16_values(q)[0, 0, 0] / 2, rtol=1e-12)


def test_states_are_what_the_corrections_sum_up_to():
    h, q, k, v, gate, beta = one_head(5)
    got = gated_delta_rule(h, q, k, v, gate, beta)
    state = h[0, 0]
    for t in range(5):
        state = gate[0, t, 0] * state + np.outer(bf16_values(k)[0, t, 0], got.corrections[0, t, 0])
        np.testing.assert_allclose(got.states[t, 0, 0], state, rtol=1e-12)


def test_f16_states_are_rounded_before_they_are_multiplied():
    h, q, k, v, gate, beta = one_head(3)
    got = gated_delta_rule(h, q, k, v, gate, beta, carry_f16=True)
    assert (got.states == got.states.astype(np.float16)).all()
    np.testing.assert_allclose(got.out[0, 2, 0], got.states[2, 0, 0].T @ bf16_values(q)[0, 2, 0] / 2, rtol=1e-12)


def test_decays_are_kept_from_0_and_1():
    assert decay(np.array([np.nan, -1, 0, 0.5, 1, 2])).tolist() == [1e-6, 1e-6, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-6]


def test_raw_gates_and_betas():
    assert raw_gate(np.array([1.0]), np.array([0.0]), np.array([-1.0])) == pytest.approx([0.5])  # softplus(0) = ln 2
    assert raw_beta(np.array([0.0, np.log(3)])) == pytest.approx([0.5, 0.75])


def test_unit_rows():
    assert unit_rows(bf16_bits(np.array([[3.0, 4.0], [0.0, 0.0]]))) == pytest.approx(np.array([[0.6, 0.8], [0, 0]]))
