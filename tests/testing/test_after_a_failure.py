# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a backend knows after a driver call has failed: of copies, captures, events, and what is still there."""

import pytest

from metrale.errors import CaptureError, CudaError, MetraleError

gpu_only = pytest.mark.parametrize("failing", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def stream(failing):
    handle = failing.create_stream()
    yield handle
    failing.heal()
    failing.abort_capture_if_active(handle)
    failing.destroy_stream(handle)


@pytest.fixture
def event(failing):
    handle = failing.create_event()
    yield handle
    failing.heal()
    failing.destroy_event(handle)


@pytest.mark.parametrize("call", ["capture_status", "is_pageable"])
def test_memory_of_a_copy_of_which_nothing_is_known_is_kept_until_its_stream_is_waited_for(failing, call):
    with failing.buffer(64) as device, failing.pinned_buffer(64) as pinned:
        failing.fail(call)
        with pytest.raises(CudaError, match=call):
            failing.copy_h2d_async(pinned, device, None)
        with pytest.raises(MetraleError, match="is exported 1 times"):
            pinned.free()
        failing.synchronize()
        pinned.free()


@gpu_only
@pytest.mark.parametrize("call", ["create_event", "record_event", "event_query"])
def test_memory_of_a_copy_whose_end_no_event_tells_is_kept_until_its_stream_is_waited_for(failing, stream, call):
    with failing.buffer(64) as device, failing.pinned_buffer(64) as first, failing.pinned_buffer(64) as pinned:
        failing.copy_h2d_async(first, device, stream)
        failing.fail(call)
        with pytest.raises(CudaError, match=call):
            failing.copy_h2d_async(pinned, device, stream)
        with pytest.raises(MetraleError, match="is exported 1 times"):
            pinned.free()
        failing.synchronize(stream)
        pinned.free()


def test_an_event_is_not_recorded_where_it_cannot_be_known_whether_that_is_in_a_capture(failing, stream, event):
    failing.begin_capture(stream)
    failing.calls.clear()
    failing.fail("capture_status")
    with pytest.raises(CudaError):
        failing.record_event(event, stream)
    assert failing.calls["record_event"] == 0


def test_an_event_that_could_not_be_destroyed_still_never_happens(failing, stream, event):
    failing.begin_capture(stream)
    failing.record_event(event, stream)
    failing.abort_capture_if_active(stream)
    failing.fail("destroy_event")
    with pytest.raises(CudaError):
        failing.destroy_event(event)
    with pytest.raises(CaptureError, match="was recorded in a capture"):
        failing.event_query(event)


def test_a_capture_that_fails_to_begin_has_not_begun(failing, stream):
    failing.fail("capture_status", n=2)
    with pytest.raises(CudaError):
        failing.begin_capture(stream)
    assert not failing.stream_is_capturing(stream)
    with pytest.raises(CaptureError, match="no capture began"):
        failing.end_capture(stream)


def test_a_capture_is_aborted_on_a_device_that_only_fails(failing, stream):
    failing.begin_capture(stream)
    failing.fail(forever=True)
    assert failing.abort_capture_if_active(stream)
    failing.heal()
    assert not failing.stream_is_capturing(stream)


def test_a_stream_is_destroyed_on_a_device_that_only_fails(failing):
    stream = failing.create_stream()
    failing.fail(forever=True)
    failing.destroy_stream(stream)
    assert failing.ledger.streams == {}


@pytest.mark.parametrize("call", ["destroy_graph", "destroy_stream", "destroy_event", "free"])
def test_a_sweep_goes_on_after_a_failure_and_what_failed_is_still_there(failing, call):
    failing.alloc(16)
    failing.create_event()
    failing.create_stream()
    failing.begin_capture()
    failing.end_capture()
    failing.fail(call)
    with pytest.raises(CudaError, match=f"^{call}, made to fail"):
        failing.sweep_unreleased()
    (left,) = failing.ledger.left()
    assert left.kind == {"free": "device"}.get(call, call.removeprefix("destroy_"))
    assert not left.leaked
    failing.sweep_unreleased()
    assert failing.ledger.left() == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("call", ["destroy_graph", "destroy_stream", "destroy_event", "free", "close"])
def test_close_gives_back_all_else_and_tells_what_failed(failing, call):
    for _ in range(2):
        failing.alloc(16)
        failing.create_event()
        failing.create_stream()
        failing.begin_capture()
        failing.end_capture()
    failing.calls.clear()
    failing.fail(call)
    with pytest.raises(CudaError, match=f"^{call}, made to fail"):
        failing.close()
    assert failing.closed
    assert (failing.calls["free"], failing.calls["destroy_graph"], failing.calls["close"]) == (2, 2, 1)
    assert failing.close() == []
