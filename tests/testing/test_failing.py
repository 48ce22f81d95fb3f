# SPDX-License-Identifier: MIT OR Apache-2.0
"""FailingBackend: it does what the backend inside does, until a call is to fail."""

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import metrale
from metrale import KernelLaunch, ops
from metrale.errors import (
    ArgumentError,
    CaptureError,
    CudaError,
    KernelNotFound,
    LaunchError,
    MetraleError,
    OutOfMemoryError,
)
from metrale.gpu import Graph
from metrale.testing import CALLS, RELEASES, FailingBackend

SPIN = Path(__file__).parents[1] / "gpu" / "life" / "spin.cu"
DRIVER = (Path(metrale.__file__).parent / "gpu" / "driver.pxd").read_text()
ASKS_NOTHING = {"rounded"}  # of the driver: an answer that is computed
N = 16


class Things:
    """What the calls below are made with."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.a, self.b = gpu.buffer(4 * N, "a"), gpu.buffer(4 * N, "b")
        self.stream, self.event = gpu.create_stream(), gpu.create_event(timing=True)
        gpu.record_event(self.event)
        gpu.synchronize()
        self.host = np.zeros(4 * N, np.uint8)
        self.kernel = gpu.kernel("moe_v41", "moe_v41_finish")
        self.builder = KernelLaunch(gpu, self.kernel).grid(1).block(256)
        self.builder.arg_ptr(self.a).arg_ptr(self.b).arg_u32(N)
        self.prepared = self.builder.prepare()
        with Graph(gpu) as self.graph:
            self.prepared.launch()


def foreign(gpu):
    with suppress(ArgumentError):  # an address that nobody knows
        gpu.memset(0x10, 0, 1)


def end_capture(gpu):
    gpu.begin_capture()
    gpu.destroy_graph(gpu.end_capture())


def special(t):
    with suppress(LaunchError):
        t.builder.cooperative().launch()


def module(gpu):
    gpu.add_module(SPIN)


def close(gpu):
    with pytest.warns(ResourceWarning):
        gpu.close()


USES = {
    "add_module": lambda gpu, t: module(gpu),
    "alloc": lambda gpu, t: gpu.free(gpu.alloc(64)),
    "begin_capture": lambda gpu, t: end_capture(gpu),
    "capture_status": lambda gpu, t: gpu.stream_is_capturing(),
    "check_special": lambda gpu, t: special(t),
    "close": lambda gpu, t: close(gpu),
    "copy": lambda gpu, t: gpu.copy_h2d(t.host, t.a),
    "copy_rows": lambda gpu, t: gpu.copy_d2d_2d_async(t.a, 8, t.b, 8, 8, 4, None),
    "create_event": lambda gpu, t: gpu.destroy_event(gpu.create_event()),
    "create_stream": lambda gpu, t: gpu.destroy_stream(gpu.create_stream()),
    "destroy_event": lambda gpu, t: gpu.destroy_event(gpu.create_event()),
    "destroy_graph": lambda gpu, t: end_capture(gpu),
    "destroy_stream": lambda gpu, t: gpu.destroy_stream(gpu.create_stream()),
    "end_capture": lambda gpu, t: end_capture(gpu),
    "event_elapsed_ms": lambda gpu, t: gpu.event_elapsed_ms(t.event, t.event),
    "event_query": lambda gpu, t: gpu.event_query(t.event),
    "event_synchronize": lambda gpu, t: gpu.event_synchronize(t.event),
    "free": lambda gpu, t: gpu.free(gpu.alloc(64)),
    "instantiate": lambda gpu, t: end_capture(gpu),
    "is_pageable": lambda gpu, t: gpu.copy_h2d(t.host, t.a),
    "kernel": lambda gpu, t: gpu.kernel("moe_v41", "moe_v41_sum_rows"),
    "launch": lambda gpu, t: ops.moe_v41_finish(gpu, t.kernel, t.a, t.b, N, None),
    "launch_graph": lambda gpu, t: t.graph.launch(),
    "memory": lambda gpu, t: gpu.free_memory,
    "memset": lambda gpu, t: gpu.memset(t.a, 0, 4),
    "range": lambda gpu, t: foreign(gpu),
    "record_event": lambda gpu, t: gpu.record_event(t.event),
    "stream_wait_event": lambda gpu, t: gpu.stream_wait_event(t.stream, t.event),
    "synchronize": lambda gpu, t: gpu.synchronize(),
    "update_node": lambda gpu, t: t.prepared.update(t.graph.handle),
}


@pytest.fixture
def things(failing):
    made = Things(failing)
    yield made
    failing.heal()
    if not failing.closed:
        failing.sweep_unreleased()
        for thing in (made.graph, made.a, made.b):
            thing.free()


def test_every_call_of_the_driver_has_a_name_here():
    methods = set(re.findall(r"\bdriver_(\w+)\(", DRIVER))
    assert methods - ASKS_NOTHING == CALLS - {"add_module"}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_call_is_made_inside_and_counted(failing, things, call):
    failing.calls.clear()
    USES[call](failing, things)
    assert failing.calls[call] > 0
    assert failing.failed.total() == 0


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_call_can_be_made_to_fail(failing, things, call):
    failing.fail(call, error="CUDA_ERROR_LAUNCH_FAILED")
    expected = CaptureError if call == "end_capture" else CudaError
    with pytest.raises(expected, match=rf"{call}, made to fail: CUDA_ERROR_LAUNCH_FAILED \(719\)$"):
        failing.close() if call == "close" else USES[call](failing, things)
    assert dict(failing.failed) == {call: 1}


def test_an_allocation_without_memory_says_who_holds_it(failing):
    with failing.buffer(64, "held") as _:
        failing.fail("alloc")
        with pytest.raises(OutOfMemoryError, match="^allocating 16 bytes of managed memory .* held 64 bytes at "):
            failing.alloc_managed(16)


def test_the_number_of_the_call_that_fails_is_counted_from_the_order_to_fail(failing):
    failing.free(failing.alloc(16))
    failing.fail("alloc", n=2)
    first = failing.alloc(16)
    with pytest.raises(OutOfMemoryError):
        failing.alloc(16)
    failing.free(failing.alloc(16))
    failing.free(first)


def test_from_then_on_every_call_fails_until_it_is_healed(failing):
    failing.fail("create_event", n=2, forever=True)
    events = [failing.create_event()]
    for _ in range(3):
        with pytest.raises(CudaError):
            failing.create_event()
    failing.heal()
    events.append(failing.create_event())
    for event in events:
        failing.destroy_event(event)
    assert failing.failed["create_event"] == 3


def test_any_call_is_none_that_gives_back(failing):
    buffer, stream = failing.buffer(16), failing.create_stream()
    failing.fail(forever=True)
    buffer.free()
    failing.destroy_stream(stream)
    with pytest.raises(CudaError):
        failing.create_stream()


def test_a_release_that_fails_leaves_it_on_the_ledger(failing):
    buffer = failing.buffer(16)
    failing.fail("release")
    with pytest.raises(CudaError, match="^free, made to fail"):
        buffer.free()
    assert failing.live_alloc_count == 1
    buffer.free()
    assert failing.live_alloc_count == 0


def test_several_orders_to_fail_count_by_themselves(failing):
    failing.fail("alloc", n=2)
    failing.fail("create_event", n=1, error="CUDA_ERROR_INVALID_CONTEXT")
    ptr = failing.alloc(16)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
        failing.create_event()
    with pytest.raises(OutOfMemoryError):
        failing.alloc(16)
    failing.free(ptr)


def test_a_launch_that_fails_has_not_been_made(failing, things):
    failing.memset(things.a, 0, 4 * N)
    failing.memset(things.b, 0xFF, 4 * N)
    failing.fail("launch")
    with pytest.raises(CudaError):
        things.prepared.launch()
    assert (things.b.numpy() == 0xFF).all()
    things.prepared.launch()
    assert (things.b.numpy("uint16")[:N] == 0).all()


def test_a_capture_whose_end_fails_is_over(failing, things):
    failing.begin_capture()
    failing.fail("end_capture")
    with pytest.raises(CaptureError, match="made no graph: end_capture, made to fail"):
        failing.end_capture()
    assert not failing.stream_is_capturing()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"call": "malloc"}, r"call: got 'malloc', allowed: any, release, add_module, alloc, begin_capture, "),
        ({"n": 0}, r"n: got 0, allowed: an integer, 1 or more"),
        ({"n": True}, r"n: got True, allowed: an integer, 1 or more"),
        ({"error": "EPERM"}, r"error: got 'EPERM', allowed: the name of a driver's error, such as CUDA_ERROR_LAUNCH"),
        ({"error": "CUDA_ERROR_"}, r"error: got 'CUDA_ERROR_', allowed: the name of a driver's error"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(host, order, message):
    with FailingBackend(metrale.open("host")) as failing, pytest.raises(ArgumentError, match=f"^{message}"):
        failing.fail(**order)


def test_the_releases_are_calls():
    assert RELEASES < CALLS


# It and the backend inside


def test_it_has_what_the_backend_inside_has(failing):
    inner = metrale.open(failing.kind)
    with inner:
        for name in ("kind", "name", "sm_count", "compute_capability"):
            assert getattr(failing, name) == getattr(inner, name)
        own = "ordinal" if failing.kind == "cuda" else "order"
        assert getattr(failing, own) == getattr(inner, own)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = failing.nothing


def test_closing_it_closes_the_backend_inside():
    inner = metrale.open("host")
    FailingBackend(inner).close()
    assert inner.closed


def test_the_backend_inside_may_be_closed_first():
    inner = metrale.open("host")
    failing = FailingBackend(inner)
    failing.create_stream()
    with pytest.warns(ResourceWarning, match="never freed: 1 streams"):
        inner.close()
    with pytest.raises(MetraleError, match="is closed"):
        failing.synchronize()
    assert failing.close() == []


def test_memory_that_the_backend_inside_had_is_on_the_ledger():
    inner = metrale.open("host")
    buffer = inner.buffer(64, "earlier")
    with FailingBackend(inner) as failing:
        assert [a.tag for a in failing.ledger.live()] == ["earlier"]
        np.testing.assert_array_equal(failing.upload(bytes(4)).numpy(), 0)
        buffer.free()


@pytest.mark.parametrize("inner", [None, "closed", "failing"])
def test_what_cannot_be_inside_is_refused(inner):
    backend = metrale.open("host")
    if inner == "closed":
        backend.close()
        with pytest.raises(MetraleError, match="is closed$"):
            FailingBackend(backend)
    elif inner == "failing":
        with FailingBackend(backend) as failing, pytest.raises(ArgumentError, match="^inner: got <FailingBackend host"):
            FailingBackend(failing)
    else:
        backend.close()
        with pytest.raises(TypeError, match="inner"):
            FailingBackend(None)


def test_check_mode_looks_at_launches_as_ever():
    with FailingBackend(metrale.open("host", check=True)) as failing:
        array = np.zeros(4 * N, np.uint8)
        with failing.buffer(4 * N) as out:
            kernel = failing.kernel("moe_v41", "moe_v41_finish")
            ops.moe_v41_finish(failing, kernel, array, out, N, None)  # memory of another library
            address = out.ptr
        with pytest.raises(LaunchError, match="freed at "):
            ops.moe_v41_finish(failing, kernel, array, address, N, None)


def test_a_kernel_that_is_not_there_is_not_there(failing):
    with pytest.raises(KernelNotFound):
        failing.kernel("moe_v41", "nothing")
