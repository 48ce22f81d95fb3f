# SPDX-License-Identifier: MIT OR Apache-2.0
import numpy as np
import pytest

from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.conv1d import conv1d_update_chunk2

BATCH, DIM = 2, 5


@pytest.fixture
def case():
    rng = np.random.default_rng(4)
    state = rng.standard_normal((BATCH, DIM, 4)).astype(np.float32)
    x, weight = (bf16_bits(rng.standard_normal(shape)) for shape in ((BATCH, 2, DIM), (DIM, 4)))
    return state, x, weight, rng.standard_normal(DIM).astype(np.float32)


def test_each_token_pushes_out_the_oldest_value(case):
    state, x, weight, bias = case
    update = conv1d_update_chunk2(state, x, weight, bias)
    values = bf16_values(x)
    assert (update.state_mid[..., :3] == state[..., 1:]).all()
    assert (update.state_mid[..., 3] == values[:, 0]).all()
    assert (update.state[..., :2] == state[..., 2:]).all()
    assert (update.state[..., 2:] == values.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_output_is_the_convolution_of_the_whole_signal(case, with_bias):
    state, x, weight, bias = case
    out = conv1d_update_chunk2(state, x, weight, bias if with_bias else None).out
    signal = np.concatenate([state.astype(np.float64), bf16_values(x).transpose(0, 2, 1)], axis=-1)
    for b in range(BATCH):
        for c in range(DIM):
            y = np.correlate(signal[b, c], bf16_values(weight)[c], "valid")[1:] + (bias[c] if with_bias else 0)
            np.testing.assert_allclose(out[b, :, c], y / (1 + np.exp(-y)), rtol=1e-12)


def test_the_callers_state_is_left_alone(case):
    state, x, weight, bias = case
    before = state.copy()
    conv1d_update_chunk2(state, x, weight, bias)
    assert (state == before).all()
