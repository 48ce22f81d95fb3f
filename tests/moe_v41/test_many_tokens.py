# SPDX-License-Identifier: MIT OR Apache-2.0
"""Several tokens through the layers of a real GGUF file: right, and with the same bits whatever goes with them."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from layers import DATA, TINY

from metrale.errors import ArgumentError, MetraleError
from metrale.formats.load import expert_source, load_moe_layer
from metrale.gpu import Graph
from metrale.moe_v41 import ExpertArena, MoeV41, SlotLayout
from metrale.reference.bf16 import bf16_values

TOKENS = 40
BATCHES = (1, 3, 8, 9, 40)
PATHS = pytest.mark.parametrize("path", ["gemv", "mmq"])


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "tiny_v41_expected.npz") as values:
        return dict(values)


@pytest.fixture(params=[0, 1], ids=["shared K-quants", "shared bf16"])
def layer(request):
    return request.param


@contextmanager
def many(gpu, layer, max_tokens=TOKENS):
    """A `MoeV41` for several tokens, with a layer of the file, all experts resident."""
    loaded = load_moe_layer(gpu, TINY, layer)
    moe = MoeV41(gpu, replace(loaded.cfg, max_tokens=max_tokens))
    try:
        moe.add_layer(layer, loaded.weights, loaded.experts)
        yield moe
    finally:
        moe.free()
        loaded.free()


@contextmanager
def few_slots(gpu, layer, n_slots, **options):
    """The same over an arena that reads the file."""
    loaded = load_moe_layer(gpu, TINY, layer)
    with expert_source(TINY) as source:
        arena = ExpertArena(gpu, SlotLayout(loaded.cfg.dim, loaded.cfg.inter), n_slots, source, **options)
        moe = MoeV41(gpu, replace(loaded.cfg, max_tokens=TOKENS))
        try:
            moe.add_layer(layer, loaded.weights, arena)
            yield moe, arena
        finally:
            moe.free()
            arena.free()
            loaded.free()


def outputs(gpu, moe, layer, inputs, batch=TOKENS, **options):
    """bf16 bits of all tokens, `batch` at a time."""
    found = []
    for first in range(0, len(inputs), batch):
        part = inputs[first : first + batch]
        out = np.full(part.shape, 0xFFFF, np.uint16)
        with gpu.upload(part, "x") as x:
            gpu.memset(moe.out_ptr(), 0xFF, out.nbytes)
            gpu.copy_d2h(moe.forward(layer, x, tokens=len(part), **options), out)
        found.append(out)
    return np.concatenate(found)


def rms(values):
    return np.sqrt((values**2).mean())


@PATHS
@pytest.mark.parametrize("batch", BATCHES)
def test_outputs_are_within_2_percent_of_the_expected_rms(device, layer, expected, path, batch):
    with many(device, layer) as moe:
        got = outputs(device, moe, layer, expected["x_bf16"], batch, path=path)
    want = expected[f"moe{layer}_out"]
    assert rms(bf16_values(got) - want) <= 0.02 * rms(want)


def test_picks_and_weights_of_all_tokens(gpu, layer, expected):
    with many(gpu, layer) as moe:
        outputs(gpu, moe, layer, expected["x_bf16"])
        routed = moe.routed(layer)
    np.testing.assert_array_equal(routed.picks, expected[f"moe{layer}_picks"])
    np.testing.assert_allclose(routed.weights, expected[f"moe{layer}_weights"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(routed.slots, np.sort(routed.picks))


@PATHS
def test_a_tokens_bits_do_not_depend_on_its_batch(device, layer, expected, path):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe:
        one_by_one = outputs(device, moe, layer, inputs, 1, path=path)
        for batch in BATCHES[1:]:
            np.testing.assert_array_equal(outputs(device, moe, layer, inputs, batch, path=path), one_by_one)


@PATHS
def test_the_side_stream_changes_no_bit(device, layer, expected, path):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe:
        beside = outputs(device, moe, layer, inputs, path=path, side_stream=True)
        np.testing.assert_array_equal(outputs(device, moe, layer, inputs, path=path, side_stream=False), beside)


def test_the_paths_agree_within_3_percent(device, layer, expected):
    with many(device, layer) as moe:
        by_gemv, by_mmq = (outputs(device, moe, layer, expected["x_bf16"], path=path) for path in ("gemv", "mmq"))
    assert rms(bf16_values(by_gemv) - bf16_values(by_mmq)) <= 0.03 * rms(bf16_values(by_gemv))


@PATHS
def test_a_replayed_graph_has_the_bits_of_an_eager_step(device, layer, expected, path):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe, device.upload(inputs) as x, device.upload(np.zeros_like(inputs)) as seen:
        eager = outputs(device, moe, layer, inputs, path=path)
        stream = device.create_stream()
        with Graph(device, stream) as graph:
            moe.forward(layer, seen, stream, tokens=TOKENS, path=path)
        device.copy_d2d(x, seen, inputs.nbytes)
        for _ in range(2):
            graph.launch(stream)
        got = np.empty_like(inputs)
        device.copy_d2h_on_stream(moe.out_ptr(), got, stream)
        graph.free()
        device.destroy_stream(stream)
    np.testing.assert_array_equal(got, eager)


# Experts that do not fit


@PATHS
@pytest.mark.parametrize("n_slots", [3, 5, 8])
def test_fewer_slots_than_experts_change_no_bit(device, layer, expected, path, n_slots):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe:
        resident = outputs(device, moe, layer, inputs, path=path)
    with few_slots(device, layer, n_slots) as (moe, arena):
        for batch in (TOKENS, 3, 1):
            np.testing.assert_array_equal(outputs(device, moe, layer, inputs, batch, path=path), resident)
        assert moe.routed(layer).picks.shape[-1] == 3
        assert arena.stats.evictions > 0 or n_slots == 8


@pytest.mark.parametrize("selection", ["device", "host"])
def test_one_token_fetches_what_it_picks(device, layer, expected, selection):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe:
        resident = outputs(device, moe, layer, inputs, 1)
    with few_slots(device, layer, 3) as (moe, arena):
        got = outputs(device, moe, layer, inputs, 1, selection=selection)
        assert arena.stats.hits + arena.stats.misses == 3 * TOKENS
    np.testing.assert_array_equal(got, resident)


@pytest.mark.parametrize(("tokens", "path"), [(1, "gemv"), (1, "mmq"), (2, "mmq"), (2, "gemv")])
def test_a_miss_in_a_captured_step_is_fetched_and_the_step_run_again(device, layer, expected, tokens, path):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe:
        resident = outputs(device, moe, layer, inputs, tokens, path=path)
    again, got = 0, []
    with few_slots(device, layer, 6) as (moe, _), device.upload(inputs[:tokens]) as x:
        stream = device.create_stream()
        with Graph(device, stream) as graph:
            moe.forward(layer, x, stream, tokens=tokens, path=path)
        for first in range(0, TOKENS, tokens):
            device.copy_h2d(inputs[first : first + tokens], x)
            graph.launch(stream)
            if not moe.settle(layer, stream=stream):
                again += 1
                graph.launch(stream)
                assert moe.settle(layer, stream=stream)
            out = np.empty((tokens, inputs.shape[1]), np.uint16)
            device.copy_d2h_on_stream(moe.out_ptr(), out, stream)
            got.append(out)
        graph.free()
        device.destroy_stream(stream)
    assert 0 < again < TOKENS // tokens
    np.testing.assert_array_equal(np.concatenate(got), resident)


def test_both_halves_of_a_step_have_its_bits(device, layer, expected):
    inputs = expected["x_bf16"]
    with few_slots(device, layer, 8) as (moe, _), device.upload(inputs) as x:
        for tokens in (1, TOKENS):
            whole = outputs(device, moe, layer, inputs[:tokens], tokens)
            moe.stage(layer, x, tokens=tokens)
            got = np.empty_like(whole)
            device.copy_d2h(moe.compute(layer, x, tokens=tokens), got)
            np.testing.assert_array_equal(got, whole)


def test_predicted_keys_are_the_picks(device, layer, expected):
    with few_slots(device, layer, 8) as (moe, arena), device.upload(expected["x_bf16"][0]) as x:
        keys = moe.predict(layer, x)
        assert keys == [(layer, pick) for pick in expected[f"moe{layer}_picks"][0]]
        assert arena.prefetch(keys) == 3
        moe.forward(layer, x)
        assert arena.stats.prefetches_useful == 3


# Errors


class Failing:
    """A source of the file whose expert fails."""

    def __init__(self, source, expert):
        self.source, self.expert = source, expert

    def read_into(self, layer, expert, part, memory):
        if expert == self.expert:
            raise OSError("the disk is gone")
        return self.source.read_into(layer, expert, part, memory)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_source_that_fails_is_named_and_the_next_step_works(device, layer, expected, tokens):
    inputs = expected["x_bf16"]
    with many(device, layer) as moe:
        resident = outputs(device, moe, layer, inputs[:tokens], tokens)
    with few_slots(device, layer, 4) as (moe, arena):
        source, broken = arena.source, int(expected[f"moe{layer}_picks"][0][0])
        arena.source = Failing(source, broken)
        with pytest.raises(MetraleError, match=rf"layer {layer}, expert {broken}: .*the disk is gone"):
            outputs(device, moe, layer, inputs[:tokens], tokens)
        arena.source = source
        np.testing.assert_array_equal(outputs(device, moe, layer, inputs[:tokens], tokens), resident)


def test_a_token_that_is_not_finite_is_named_and_spoils_no_other(device, layer, expected):
    inputs = expected["x_bf16"][:5].copy()
    with many(device, layer) as moe:
        clean = outputs(device, moe, layer, inputs)
        inputs[3, 7] = 0x7FC0
        got = outputs(device, moe, layer, inputs)
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))
        with pytest.raises(MetraleError, match=rf"layer {layer}, token 3: a router logit is NaN or infinite"):
            moe.routed(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens: got 0, allowed: an integer, 1 to 4"),
        ({"tokens": 5}, "tokens: got 5, allowed: an integer, 1 to 4"),
        ({"path": "fast"}, "path: got 'fast', allowed: auto or gemv or mmq"),
        ({"tokens": 2, "selection": "host"}, "selection: got 'host', allowed: device, for several tokens"),
        ({"path": "mmq", "selection": "host"}, "selection: got 'host', allowed: device, for several tokens"),
    ],
)
def test_what_a_step_refuses(device, options, message):
    with many(device, 0, 4) as moe, pytest.raises(ArgumentError, match=message):
        moe.forward(0, 16, **options)


def test_a_workspace_for_one_token_has_one_path(device):
    with many(device, 0, 1) as moe, pytest.raises(ArgumentError, match=r"path: got 'mmq', allowed: auto or gemv"):
        moe.forward(0, 16, path="mmq")


def test_fewer_slots_than_one_tokens_picks_are_refused(device):
    with pytest.raises(ArgumentError, match="experts: got '2 slots', allowed: at least one token's picks, 3"):
        few_slots(device, 0, 2).__enter__()


def test_an_arena_that_is_read_for_another_workspace_is_refused(device, expected):
    with few_slots(device, 0, 5) as (moe, arena):
        other = MoeV41(device, moe.cfg)
        try:
            weights = moe._layers[0].weights
            with pytest.raises(ArgumentError, match="experts: got .an arena whose changes go to another MoeV41"):
                other.add_layer(0, weights, arena)
            moe.free()
            other.add_layer(0, weights, arena)
            assert outputs(device, other, 0, expected["x_bf16"][:2]).shape == (2, other.cfg.dim)
        finally:
            other.free()


def test_stage_refuses_more_experts_than_slots(device, expected):
    with few_slots(device, 0, 3) as (moe, _), device.upload(expected["x_bf16"]) as x:
        with pytest.raises(
            ArgumentError, match=r"tokens: got '40 that pick \d experts', allowed: as many experts as slots"
        ):
            moe.stage(0, x, tokens=TOKENS)


def test_selections_that_another_layer_has_replaced_are_refused(device, expected):
    loaded = [load_moe_layer(device, TINY, layer) for layer in (0, 1)]
    moe = MoeV41(device, replace(loaded[0].cfg, max_tokens=2))
    try:
        with device.upload(expected["x_bf16"][:2]) as x:
            for layer in (0, 1):
                moe.add_layer(layer, loaded[layer].weights, loaded[layer].experts)
                moe.forward(layer, x, tokens=2)
        assert moe.routed(1).picks.shape == (2, 3)
        with pytest.raises(ArgumentError, match="layer: got 0, allowed: layer 1, the last that ran for several tokens"):
            moe.routed(0)
    finally:
        moe.free()
        for each in loaded:
            each.free()


@pytest.mark.gpu
@PATHS
def test_a_hundred_repeats_give_the_same_bits(cuda, layer, expected, path):
    inputs = expected["x_bf16"]
    with many(cuda, layer) as moe:
        first = outputs(cuda, moe, layer, inputs, path=path)
        for _ in range(99):
            np.testing.assert_array_equal(outputs(cuda, moe, layer, inputs, path=path), first)
