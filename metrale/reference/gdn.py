# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated delta rule, token by token, on the states of a batch of sequences."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale.reference.bf16 import bf16_values

__all__ = ["GdnSteps", "decay", "gated_delta_rule", "raw_beta", "raw_gate", "unit_rows"]

BF16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

DECAY_MIN, DECAY_MAX = 1e-6, 1 - 1e-6
UNIT_EPS = 1e-6


class GdnSteps(NamedTuple):
    """What K tokens give."""

    out: F64
    """`[batch, K, num_v_heads, v_dim]`, before the rounding to bf16"""
    corrections: F64
    """d, of the same shape"""
    states: F64
    """the state after each token, `[K, batch, num_v_heads, k_dim, v_dim]`"""


def gated_delta_rule(
    h: npt.NDArray[Any],
    query: BF16 | F64,
    key: BF16 | F64,
    value: BF16,
    gate: npt.NDArray[Any],
    beta: npt.NDArray[Any],
    *,
    carry_f16: bool = False,
) -> GdnSteps:
    """`H <- g H; d = beta (v - H^T k); H <- H + k d^T; out = k_dim^-0.5 H^T q`, with g = decay(gate).

    h: `[batch, num_v_heads, k_dim, v_dim]`; query, key: `[batch, K, num_k_heads, k_dim]`, bf16 bits or values;
    value: bf16 bits `[batch, K, num_v_heads, v_dim]`; gate, beta: `[batch, K, num_v_heads]`. carry_f16: each
    token's state is rounded to f16, and so kept and multiplied.
    """
    heads, shared = value.shape[2], value.shape[2] // query.shape[2]
    q, k = (np.repeat(_values(x), shared, axis=2) for x in (query, key))
    v, g, b = bf16_values(value), decay(gate), np.asarray(beta, np.float64)
    state = np.asarray(h, np.float64)
    assert state.shape[1] == heads
    outs, corrections, states = [], [], []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None]
        d = b[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * d[:, :, None, :]
        if carry_f16:
            state = state.astype(np.float16).astype(np.float64)
        outs.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
        corrections.append(d)
        states.append(state)
    return GdnSteps(np.stack(outs, axis=1), np.stack(corrections, axis=1), np.stack(states))


def decay(gate: npt.NDArray[Any]) -> F64:
    """The gate as a decay: within 1e-6 and 1 - 1e-6, NaN the former."""
    values = np.asarray(gate, np.float64)
    return np.clip(np.where(np.isnan(values), DECAY_MIN, values), DECAY_MIN, DECAY_MAX)


def raw_gate(a: npt.NDArray[Any], a_log: npt.NDArray[Any], dt_bias: npt.NDArray[Any]) -> F64:
    """`exp(-exp(A_log) * softplus(a + dt_bias))`; the last two are `[num_v_heads]`."""
    x = np.asarray(a, np.float64) + np.asarray(dt_bias, np.float64)
    decays: F64 = np.exp(-np.exp(np.asarray(a_log, np.float64)) * np.logaddexp(0, x))
    return decays


def raw_beta(b: npt.NDArray[Any]) -> F64:
    """`sigmoid(b)`."""
    return 1 / (1 + np.exp(-np.asarray(b, np.float64)))


def unit_rows(x: BF16) -> F64:
    """Rows of bf16 bits divided by `sqrt(sum(x^2) + 1e-6)`."""
    values = bf16_values(x)
    unit: F64 = values / np.sqrt((values**2).sum(axis=-1, keepdims=True) + UNIT_EPS)
    return unit


def _values(x: BF16 | F64) -> F64:
    return bf16_values(np.asarray(x, np.uint16)) if x.dtype == np.uint16 else np.asarray(x, np.float64)
