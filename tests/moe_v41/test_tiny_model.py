# SPDX-License-Identifier: MIT OR Apache-2.0
"""One token through the layers of a real GGUF file, against values made by other software and against the oracle."""

import numpy as np
import pytest
from layers import DATA, TINY, forward, running

from metrale.formats.deepseek41 import moe_layer_spec
from metrale.formats.gguf import GgufFile
from metrale.reference.bf16 import bf16_values
from metrale.reference.moe import MoeLayer, moe_layer_quantised

TOKENS = 40


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "tiny_v41_expected.npz") as values:
        return dict(values)


@pytest.fixture(params=[0, 1])
def layer(request):
    return request.param


def outputs(gpu, layer, inputs, **options):
    with running(gpu, layer) as (moe, _):
        return np.array([forward(gpu, moe, layer, x, **options) for x in inputs])


def test_picks_equal_the_expected_and_weights_are_within_1e_5(gpu, layer, expected):
    with running(gpu, layer) as (moe, _):
        for token, x in enumerate(expected["x_bf16"]):
            forward(gpu, moe, layer, x)
            routed = moe.routed(layer)
            np.testing.assert_array_equal(routed.picks, expected[f"moe{layer}_picks"][token])
            np.testing.assert_allclose(routed.weights, expected[f"moe{layer}_weights"][token], rtol=0, atol=1e-5)


def test_rms_error_is_within_2_percent_of_the_unquantised_output(gpu, layer, expected):
    got = bf16_values(outputs(gpu, layer, expected["x_bf16"]))
    want = expected[f"moe{layer}_out"]
    assert got.shape == (TOKENS, want.shape[1])
    assert np.sqrt(((got - want) ** 2).mean()) <= 0.02 * np.sqrt((want**2).mean())


def test_each_output_is_within_2_5e_3_of_the_oracle_that_rounds_alike(gpu, layer, expected):
    got = bf16_values(outputs(gpu, layer, expected["x_bf16"]))
    with GgufFile(TINY) as gguf:
        oracle = MoeLayer.of(moe_layer_spec(gguf, layer))
        for out, x in zip(got, expected["x_bf16"], strict=True):
            want = moe_layer_quantised(oracle, x).out
            assert np.linalg.norm(out - want) <= 2.5e-3 * np.linalg.norm(want)


def test_host_selection_gives_the_bits_of_device_selection(gpu, layer, expected):
    inputs = expected["x_bf16"]
    by_device = outputs(gpu, layer, inputs, selection="device")
    np.testing.assert_array_equal(outputs(gpu, layer, inputs, selection="host"), by_device)


def test_the_side_stream_changes_no_bit(gpu, layer, expected):
    inputs = expected["x_bf16"]
    beside = outputs(gpu, layer, inputs, side_stream=True)
    np.testing.assert_array_equal(outputs(gpu, layer, inputs, side_stream=False), beside)


@pytest.mark.parametrize("warps", ["2", "4"])
def test_the_warps_of_the_expert_gemv_change_no_bit(device, layer, expected, warps, monkeypatch):
    inputs = expected["x_bf16"][:8]
    usual = outputs(device, layer, inputs)
    monkeypatch.setenv("METRALE_DS41_EXPERT_WARPS", warps)
    np.testing.assert_array_equal(outputs(device, layer, inputs), usual)


def test_a_stream_of_the_callers_gives_the_bits_of_the_default_one(device, layer, expected):
    x = expected["x_bf16"][0]
    usual = outputs(device, layer, [x])[0]
    stream = device.create_stream()
    with running(device, layer) as (moe, _), device.upload(x) as staged:
        out = moe.forward(layer, staged, stream)
        got = np.zeros(len(x), np.uint16)
        device.copy_d2h_on_stream(out, got, stream)
    device.destroy_stream(stream)
    np.testing.assert_array_equal(got, usual)


@pytest.mark.gpu
def test_host_backend_and_gpu_agree_within_1e_3(cuda, host, layer, expected):
    on_gpu = bf16_values(outputs(cuda, layer, expected["x_bf16"]))
    on_host = bf16_values(outputs(host, layer, expected["x_bf16"]))
    for a, b in zip(on_gpu, on_host, strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.gpu
def test_a_hundred_repeats_give_the_same_bits(cuda, layer, expected):
    x = expected["x_bf16"][3]
    runs = outputs(cuda, layer, [x] * 100)
    np.testing.assert_array_equal(runs, np.broadcast_to(runs[0], runs.shape))
