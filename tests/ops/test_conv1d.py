# SPDX-License-Identifier: MIT OR Apache-2.0
"""causal_conv1d.causal_conv1d_update_chunk2 against float64."""

import launches
import numpy as np
import pytest
from samples import assert_bf16_near, bf16, same_bits

from metrale.reference.bf16 import bf16_values
from metrale.reference.conv1d import conv1d_update_chunk2


def inputs(batch, dim, seed=0):
    rng = np.random.default_rng([batch, dim, seed])
    state = rng.standard_normal((batch, dim, 4), np.float32)
    return state, bf16(rng, batch, 2, dim), bf16(rng, dim, 4), rng.standard_normal(dim, np.float32)


SHAPES = pytest.mark.parametrize(("batch", "dim"), [(1, 1), (1, 257), (2, 256), (3, 500), (5, 8)])


@SHAPES
@pytest.mark.parametrize("biased", [False, True])
def test_outputs(gpu, batch, dim, biased):
    state, x, weight, bias = inputs(batch, dim)
    bias = bias if biased else None
    out, _, _ = launches.conv1d_update_chunk2(gpu, state, x, weight, bias)
    assert_bf16_near(out, conv1d_update_chunk2(state, x, weight, bias).out)


@SHAPES
def test_windows_are_shifted_copies(gpu, batch, dim):
    state, x, weight, bias = inputs(batch, dim)
    _, middle, last = launches.conv1d_update_chunk2(gpu, state, x, weight, bias)
    expected = conv1d_update_chunk2(state, x, weight, bias)
    assert same_bits(middle, expected.state_mid)
    assert same_bits(last, expected.state)


def test_two_calls_are_one_of_four_tokens(gpu):
    """The window that a call leaves is where the next one starts."""
    state, x, weight, bias = inputs(1, 40)
    _, x2, _, _ = inputs(1, 40, seed=1)
    _, _, state2 = launches.conv1d_update_chunk2(gpu, state, x, weight, bias)
    out, _, _ = launches.conv1d_update_chunk2(gpu, state2, x2, weight, bias)
    tokens = bf16_values(np.concatenate([x, x2], axis=1))[0]
    y = (tokens.T * bf16_values(weight)).sum(axis=1) + bias
    assert_bf16_near(out[0, 1], y / (1 + np.exp(-y)))


def test_sequences_do_not_mix(gpu):
    state, x, weight, bias = inputs(3, 70)
    together, _, _ = launches.conv1d_update_chunk2(gpu, state, x, weight, bias)
    for b in range(3):
        alone, _, _ = launches.conv1d_update_chunk2(gpu, state[b : b + 1], x[b : b + 1], weight, bias)
        assert same_bits(alone[0], together[b])


def test_a_nan_spoils_its_channel_only(gpu):
    state, x, weight, bias = inputs(1, 30)
    x[0, 0, 11] = 0x7FC0
    out, _, _ = launches.conv1d_update_chunk2(gpu, state, x, weight, bias)
    assert np.isnan(bf16_values(out[0])).nonzero()[1].tolist() == [11, 11]


@pytest.mark.gpu
def test_the_channels_of_a_real_layer(cuda):
    state, x, weight, bias = inputs(32, 8192)
    out, _, _ = launches.conv1d_update_chunk2(cuda, state, x, weight, bias)
    assert_bf16_near(out, conv1d_update_chunk2(state, x, weight, bias).out)
