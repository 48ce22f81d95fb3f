# SPDX-License-Identifier: MIT OR Apache-2.0
"""Construction and teardown of EngramV41 and of its weights. What a failure leaves: tests/testing."""

import itertools

import numpy as np
import pytest
from engram_layers import LAYER, Arrays, apply, made, running

from metrale.engram_v41 import EngramV41
from metrale.errors import ArgumentError, MetraleError

ARRAYS = Arrays(0, dim=32, hc=2, cols=3)
CYCLES = 1000
STREAMS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 2, 32)
IDS = np.array([[0, 1, 2]])


def held(gpu):
    state = gpu.snapshot()
    return len(state["allocations"]) + len(state["streams"]) + len(state["events"])


def test_the_ledger_has_every_buffer_of_the_table_with_its_tag_and_size(device):
    weights = ARRAYS.upload(device, table=False)
    before = {a.seq for a in device.ledger.live()}
    engram = EngramV41(device, **ARRAYS.shape, max_tokens=5)
    engram.add_layer(weights)
    have = {a.tag: a.nbytes for a in device.ledger.live() if a.seq not in before}
    engram.free()
    weights.free()
    assert have == {f"EngramV41.{spec.name}": max(spec.nbytes, 16) for spec in engram.buffer_table()}


def test_adding_a_layer_again_takes_no_more_memory(device):
    with made(device, ARRAYS) as (engram, weights):
        before = held(device)
        engram.add_layer(weights)
        assert held(device) == before


def test_a_second_free_does_nothing(device):
    engram = EngramV41(device, **ARRAYS.shape, max_tokens=1)
    engram.free()
    engram.free()
    assert held(device) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda engram: engram.apply(0, 16, 1),
        lambda engram: engram.kv_ptr(),
        lambda engram: engram.rows_ptr(0),
        lambda engram: engram.rows_from_ids(0, IDS),
        lambda engram: engram.rows_from_bf16(0, bytes(1536)),
        lambda engram: engram.check_ids(0),
        lambda engram: engram.upload_qk(*ARRAYS.qk),
    ],
)
def test_use_after_free_says_so(device, use):
    engram = EngramV41(device, **ARRAYS.shape, max_tokens=1)
    engram.free()
    with pytest.raises(MetraleError, match="the EngramV41 has been freed"):
        use(engram)


def test_a_thousand_layers_built_and_freed_leave_nothing(device):
    free_after_first = None
    for _ in range(CYCLES):
        with made(device, ARRAYS):
            assert held(device) > 0
        assert (held(device), device.live_bytes) == (0, 0)
        if device.kind == "cuda":
            free_after_first = free_after_first or device.free_memory
    if device.kind == "cuda":
        assert device.free_memory == free_after_first


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from-then-on"])
def test_after_a_step_that_failed_the_next_gives_the_right_bits(failing, forever):
    with made(failing, ARRAYS) as (engram, _), failing.upload(STREAMS) as streams:
        engram.rows_from_ids(0, IDS)
        right, _ = apply(failing, engram, 0, STREAMS)

        def step():
            engram.rows_from_ids(0, IDS)
            engram.apply(0, streams, 1)

        for n in itertools.count(1):
            failing.failed.clear()
            failing.fail(n=n, forever=forever, error="CUDA_ERROR_LAUNCH_FAILED")
            try:
                step()
            except MetraleError as error:
                assert "made to fail" in str(error)
            failing.heal()
            if not failing.failed:
                break
            engram.rows_from_ids(0, IDS)
            np.testing.assert_array_equal(apply(failing, engram, 0, STREAMS)[0], right)


def test_rows_of_a_resident_table_are_not_in_the_file(device):
    with running(device) as (_, loaded):
        with pytest.raises(ArgumentError, match="layer: got 1, allowed: a layer whose table was loaded with resident="):
            loaded.read_rows([0])


def test_a_layer_for_one_token_has_no_bf16_weights(device):
    with running(device, several_tokens=False) as (_, loaded):
        assert loaded.weights.wkv is None


def test_a_layer_with_its_table_in_the_file_takes_no_memory_for_it(device):
    with running(device, resident=False) as (engram, _):
        assert "EngramV41LayerWeights.table" not in {a.tag for a in device.ledger.live()}
        with pytest.raises(MetraleError, match="not resident"):
            engram.rows_from_ids(LAYER, np.zeros((1, 4), np.int64))


def test_a_table_in_the_file_cannot_be_read_after_free(device):
    with running(device, resident=False) as (_, loaded):
        loaded.free()
        with pytest.raises(ArgumentError, match="the file is closed"):
            loaded.read_rows([0])
