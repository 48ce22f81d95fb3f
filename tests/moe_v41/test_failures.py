# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps, layers and free() of MoeV41 on a device whose driver fails: what comes after is right again."""

import itertools

import numpy as np
import pytest
from layers import forward, running

from metrale.errors import ArgumentError, CudaError, MetraleError
from metrale.gpu import Graph
from metrale.moe_v41 import ExpertArena, SlotLayout
from metrale.reference.bf16 import bf16_bits

X = bf16_bits(np.linspace(-1, 1, 512))
ERROR = "CUDA_ERROR_LAUNCH_FAILED"
STEPS = {
    "device": {},
    "one stream": {"side_stream": False},
    "host": {"selection": "host"},
}


@pytest.fixture(params=[False, True], ids=["once", "from-then-on"])
def forever(request):
    return request.param


def made_to_fail(failing, n, forever, work):
    """Whether the ``n``-th driver call of ``work()`` was made to fail: there is one, and what it raises says so."""
    failing.failed.clear()
    failing.fail(n=n, forever=forever, error=ERROR)
    try:
        work()
    except MetraleError as error:
        assert "made to fail" in str(error)
    failing.heal()
    return bool(failing.failed)


@pytest.mark.parametrize("step", STEPS)
def test_after_a_step_that_failed_the_next_gives_the_right_bits(failing, step, forever):
    with running(failing, 0) as (moe, _), failing.upload(X) as x:
        right = forward(failing, moe, 0, X)
        for n in itertools.count(1):
            if not made_to_fail(failing, n, forever, lambda: moe.forward(0, x, **STEPS[step])):
                break
            np.testing.assert_array_equal(forward(failing, moe, 0, X, **STEPS[step]), right)


def test_after_a_capture_of_a_step_that_failed_the_next_capture_gives_the_right_bits(failing, forever):
    with running(failing, 0) as (moe, _), failing.upload(X) as x:
        right = forward(failing, moe, 0, X)

        def capture():
            with Graph(failing) as graph:
                moe.forward(0, x)
            return graph

        for n in itertools.count(1):
            if not made_to_fail(failing, n, forever, lambda: capture().free()):
                break
            graph = capture()
            out = np.empty_like(right)
            failing.memset(moe.out_ptr(), 0xFF, out.nbytes)
            graph.launch()
            failing.copy_d2h(moe.out_ptr(), out)
            graph.free()
            np.testing.assert_array_equal(out, right)


def test_free_after_a_step_that_failed_leaves_nothing(failing, forever):
    for n in itertools.count(1):
        failing.failed.clear()
        with running(failing, 0) as (moe, _), failing.upload(X) as x:
            failing.fail(n=n, forever=forever, error=ERROR)
            try:
                moe.forward(0, x)
            except MetraleError as error:
                assert "made to fail" in str(error)
        state = failing.snapshot()
        assert (state["allocations"], state["streams"], state["events"]) == ([], {}, {})
        failing.heal()
        if not failing.failed:
            break


def test_a_side_stream_that_was_not_joined_is_waited_for_by_the_next_step(failing):
    with running(failing, 0) as (moe, _), failing.upload(X) as x:
        moe.forward(0, x)
        failing.fail("stream_wait_event", n=2)
        with pytest.raises(CudaError, match="^stream_wait_event, made to fail"):
            moe.forward(0, x)
        failing.calls.clear()
        moe.forward(0, x)
        moe.forward(0, x)
        assert failing.calls["synchronize"] == 1


def test_a_layer_whose_replacement_failed_has_to_be_added_again(failing):
    with running(failing, 0) as (moe, loaded), failing.upload(X) as x:
        failing.fail("synchronize", n=2)
        with pytest.raises(CudaError):
            moe.add_layer(0, loaded.weights, loaded.experts)
        failing.heal()
        with pytest.raises(ArgumentError, match=r"layer: got 0, allowed: a layer of add_layer \(none yet\)"):
            moe.forward(0, x)


def test_an_expert_whose_copy_failed_is_not_there_and_can_be_loaded_again(failing):
    layout = SlotLayout(256, 256)
    gate = up = bytes(layout.up_offset)
    down = bytes(layout.slot_bytes - layout.down_offset)
    arena = ExpertArena(failing, layout, 1)
    failing.fail("copy", n=3)
    with pytest.raises(CudaError, match="^copy, made to fail"):
        arena.load(0, 5, gate, up, down)
    assert arena.slots_of(0) == {}
    arena.load(0, 5, gate, up, down)
    assert arena.slots_of(0) == {5: 0}
    arena.free()


def test_free_that_failed_goes_on_in_the_next_call(failing):
    with running(failing, 0) as (moe, _):
        failing.fail("destroy_event")
        with pytest.raises(CudaError, match="^destroy_event, made to fail"):
            moe.free()
        assert len(failing.snapshot()["events"]) == 1
        moe.free()
        assert failing.snapshot()["events"] == {}
