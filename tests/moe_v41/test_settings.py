# SPDX-License-Identifier: MIT OR Apache-2.0
"""MoeV41 with other numbers than the model file's: each one reaches the kernels, on both ways of selecting."""

import dataclasses

import numpy as np
import pytest
from layers import forward

from metrale.formats.kquant import BF16, Q2_K
from metrale.formats.load import upload_moe_layer
from metrale.formats.synthetic import random_moe_layer
from metrale.moe_v41 import MoeV41
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.moe import MoeLayer, moe_layer_quantised

SETTINGS = {
    "no clamps": {"swiglu_limit": 0.0, "shared_swiglu_limit": 0.0},
    "limits of their own": {"swiglu_limit": 0.25, "shared_swiglu_limit": 1.0},
    "the other way round": {"swiglu_limit": 1.0, "shared_swiglu_limit": 0.25},
    "weights not normalised": {"norm_topk_prob": False},
    "a gate temperature": {"gate_temp": 0.5},
    "a route scale": {"route_scale": 2.5},
}


@pytest.mark.parametrize("selection", ["device", "host"])
@pytest.mark.parametrize("shared", [Q2_K, BF16], ids=str)
@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_the_output_follows_the_layers_numbers(device, change, shared, selection):
    spec = random_moe_layer(3, dim=256, inter=256, n_routed=8, topk=3, shared=shared)
    spec = dataclasses.replace(spec, **change)
    loaded = upload_moe_layer(device, spec)
    moe = MoeV41(device, loaded.cfg)
    try:
        moe.add_layer(0, loaded.weights, loaded.experts)
        x = bf16_bits(np.random.default_rng(5).standard_normal(256))
        out = bf16_values(forward(device, moe, 0, x, selection=selection))
        routed = moe.routed(0)
    finally:
        moe.free()
        loaded.free()
    want = moe_layer_quantised(MoeLayer.of(spec), x)
    np.testing.assert_array_equal(routed.picks, want.route.picks)
    np.testing.assert_allclose(routed.weights, want.route.weights, rtol=0, atol=1e-5)
    assert np.linalg.norm(out - want.out) <= 2.5e-3 * np.linalg.norm(want.out)
