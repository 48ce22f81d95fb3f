# SPDX-License-Identifier: MIT OR Apache-2.0
"""causal_conv1d for 1 to 17 tokens: every window kept, or none and a commit of the accepted inputs."""

import launches
import launches_conv1d
import numpy as np
import pytest
from samples import assert_bf16_near, bf16, same_bits

from metrale.reference.conv1d import conv1d_update

TABLES = pytest.mark.parametrize("is_table", [False, True], ids=["contiguous", "table"])


def inputs(batch, tokens, dim, seed=0):
    rng = np.random.default_rng([batch, tokens, dim, seed])
    state = rng.standard_normal((batch, dim, 4), np.float32)
    return state, bf16(rng, batch, tokens, dim), bf16(rng, dim, 4), rng.standard_normal(dim, np.float32)


@TABLES
@pytest.mark.parametrize("tokens", range(1, 18))
def test_every_number_of_tokens(device, tokens, is_table):
    case = inputs(2, tokens, 131)
    out, windows = launches_conv1d.chunk(device, *case, is_table)
    want = conv1d_update(*case)
    assert_bf16_near(out, want.out)
    assert same_bits(windows, want.windows)


@TABLES
@pytest.mark.parametrize(("batch", "dim"), [(1, 1), (3, 257), (5, 8)])
def test_shapes(gpu, batch, dim, is_table):
    state, x, weight, _ = inputs(batch, 3, dim)
    out, windows = launches_conv1d.chunk(gpu, state, x, weight, None, is_table)
    want = conv1d_update(state, x, weight)
    assert_bf16_near(out, want.out)
    assert same_bits(windows, want.windows)


def test_two_tokens_are_those_of_chunk2(gpu):
    case = inputs(2, 2, 300)
    out, middle, last = launches.conv1d_update_chunk2(gpu, *case)
    got, windows = launches_conv1d.chunk(gpu, *case)
    assert same_bits(got, out)
    assert same_bits(windows, np.stack([middle, last]))


@TABLES
@pytest.mark.parametrize("tokens", range(1, 18))
def test_a_verify_has_the_outputs_of_the_chunk(device, tokens, is_table):
    case = inputs(2, tokens, 40)
    assert same_bits(launches_conv1d.verify(device, *case, is_table), launches_conv1d.chunk(device, *case)[0])


@TABLES
@pytest.mark.parametrize("tokens", range(1, 18))
def test_a_commit_has_the_window_after_that_token(device, tokens, is_table):
    state, x, weight, _ = inputs(1, tokens, 40)
    windows = conv1d_update(state, x, weight).windows
    for count in range(1, tokens + 1):
        assert same_bits(launches_conv1d.commit(device, state, x, [count], is_table), windows[count - 1])


@TABLES
def test_each_sequence_has_a_count_of_its_own(gpu, is_table):
    state, x, weight, _ = inputs(4, 6, 300)
    windows = conv1d_update(state, x, weight).windows
    got = launches_conv1d.commit(gpu, state, x, [6, 0, 1, 5], is_table)
    assert same_bits(got, np.stack([windows[5, 0], state[1], windows[0, 2], windows[4, 3]]))


@pytest.mark.parametrize(("count", "as_if"), [(-1, 0), (4, 3)])
def test_a_count_out_of_range_is_the_nearest_in_range(device, count, as_if):
    state, x, _, _ = inputs(1, 3, 9)
    expected = launches_conv1d.commit(device, state, x, [as_if])
    assert same_bits(launches_conv1d.commit(device, state, x, [count]), expected)
