# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers over an arena with a source: what a step leaves behind spoils none of those that come after."""

import itertools
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from layers import TINY

from metrale.errors import ArgumentError, MetraleError
from metrale.formats.load import expert_source, load_moe_layer
from metrale.gpu import Graph
from metrale.moe_v41 import ExpertArena, MoeV41, SlotLayout
from metrale.reference.bf16 import bf16_bits

TOPK, TOKENS, DIM = 3, 2, 512
X = bf16_bits(np.random.default_rng(9).standard_normal((6, DIM)))
FIRST, OTHERS = X[:TOKENS], X[TOKENS : 2 * TOKENS]


@contextmanager
def layers(gpu, n_slots):
    """`(moe, loaded)`: layers 0 and 1 of the file over one arena."""
    with ExitStack() as stack:
        source = stack.enter_context(expert_source(TINY))
        arena = ExpertArena(gpu, SlotLayout(DIM, 256), n_slots, source, random_share=0)
        stack.callback(arena.free)
        loaded = []
        for layer in (0, 1):
            loaded.append(load_moe_layer(gpu, TINY, layer, arena))
            stack.callback(loaded[-1].free)
        moe = MoeV41(gpu, replace(loaded[0].cfg, max_tokens=TOKENS))
        stack.callback(moe.free)
        for layer in (0, 1):
            moe.add_layer(layer, loaded[layer].weights, arena)
        yield moe, loaded


def forward(gpu, moe, layer, x, **options):
    out = np.full_like(x, 0xFFFF)
    with gpu.upload(x) as staged:
        gpu.memset(moe.out_ptr(), 0xFF, out.nbytes)
        gpu.copy_d2h(moe.forward(layer, staged, tokens=len(x), **options), out)
    return out


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from-then-on"])
def test_after_a_step_that_failed_the_next_ones_give_the_right_bits(failing, tokens, forever):
    inputs = FIRST[:tokens], OTHERS[:tokens]
    with layers(failing, TOPK) as (moe, _), failing.upload(FIRST) as x:
        right = [forward(failing, moe, layer, inputs[layer]) for layer in (0, 1)]
        for n in itertools.count(1):
            failing.failed.clear()
            failing.fail(n=n, forever=forever, error="CUDA_ERROR_LAUNCH_FAILED")
            try:
                moe.forward(0, x, tokens=tokens)
            except MetraleError as error:
                assert "made to fail" in str(error)
            failing.heal()
            if not failing.failed:
                break
            for layer in (0, 1):
                np.testing.assert_array_equal(forward(failing, moe, layer, inputs[layer]), right[layer])


def test_a_stage_without_a_second_half_holds_no_slots(device):
    with layers(device, TOPK) as (moe, _), device.upload(FIRST[:1]) as x:
        right = forward(device, moe, 1, OTHERS)
        stream = device.create_stream()
        moe.stage(0, x, stream)
        device.destroy_stream(stream)
        np.testing.assert_array_equal(forward(device, moe, 1, OTHERS), right)


def test_a_step_after_settle_needs_no_slots_beside_those_of_the_graph(device):
    with layers(device, TOPK) as (moe, _), device.upload(FIRST[:1]) as x:
        right = forward(device, moe, 0, FIRST[:1]), forward(device, moe, 1, OTHERS)
        with Graph(device) as graph:
            moe.forward(0, x)
        for _ in range(2):
            graph.launch()
            while not moe.settle(0):
                graph.launch()
            got = np.empty_like(right[0])
            device.copy_d2h(moe.out_ptr(), got)
            np.testing.assert_array_equal(got, right[0])
            np.testing.assert_array_equal(forward(device, moe, 1, OTHERS), right[1])
        graph.free()


def test_settle_and_routed_tell_of_the_graphs_step_not_of_one_in_between(device):
    with layers(device, 8) as (moe, _), device.upload(FIRST[:1]) as x:
        right = forward(device, moe, 0, FIRST[:1])
        picks = moe.routed(0).picks
        with Graph(device) as graph:
            moe.forward(0, x)
        forward(device, moe, 0, FIRST)
        forward(device, moe, 1, X[:2])
        graph.launch()
        while not moe.settle(0):
            graph.launch()
        got = np.empty_like(right)
        device.copy_d2h(moe.out_ptr(), got)
        graph.free()
        np.testing.assert_array_equal(moe.routed(0).picks, picks)
    np.testing.assert_array_equal(got, right)


def test_what_goes_from_an_arena_that_a_layer_has_left_is_not_the_layers(device):
    with layers(device, TOPK) as (moe, loaded), expert_source(TINY) as source:
        right = forward(device, moe, 0, FIRST[:1])
        own = ExpertArena(device, SlotLayout(DIM, 256), 8, source)
        moe.add_layer(0, loaded[0].weights, own)
        forward(device, moe, 0, FIRST[:1])
        forward(device, moe, 1, OTHERS)
        got = forward(device, moe, 0, FIRST[:1])
        own.free()
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("other", [{"layer": 1}, {"tokens": 2}, {"path": "mmq"}], ids=str)
def test_compute_refuses_what_was_not_staged(device, other):
    with layers(device, 8) as (moe, _), device.upload(FIRST) as x:
        with pytest.raises(ArgumentError, match="step: got 'layer 0, tokens 1, path gemv', .* left last, nothing"):
            moe.compute(0, x)
        moe.stage(0, x)
        with pytest.raises(ArgumentError, match="allowed: what stage left last, layer 0, tokens 1, path gemv"):
            moe.compute(**{"layer": 0, "x": x, **other})


def test_predict_refuses_freed_weights(device):
    with layers(device, 8) as (moe, loaded), device.upload(FIRST) as x:
        loaded[0].weights.free()
        with pytest.raises(MetraleError, match="layer 0: its weights have been freed"):
            moe.predict(0, x)
