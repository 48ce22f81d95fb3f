# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who may free what, and what belongs to whom."""

import copy
import gc
import pickle

import pytest

import metrale
from metrale import KernelLaunch
from metrale.errors import ArgumentError, CaptureError, LaunchError, MetraleError, OutOfMemoryError
from metrale.gpu.buffer import OwnedHandle
from metrale.gpu.owner import Owner


def test_memory_of_a_buffer_is_freed_by_the_buffer_alone(device):
    with device.buffer(64, "mine") as buffer, pytest.raises(ArgumentError, match="this belongs to a DeviceBuffer"):
        device.free(buffer.ptr)


def test_a_buffer_that_is_freed_late_leaves_its_address_to_the_next_owner(device):
    buffer = device.buffer(256)
    address = buffer.ptr
    buffer.free()
    others = [device.alloc(256) for _ in range(8)]
    buffer.free()
    del buffer
    gc.collect()
    assert device.live_alloc_count == 8
    for other in others:
        device.free(other)
    assert address is not None


def test_a_buffer_has_no_address_after_close(fresh):
    buffer = fresh.buffer(64)
    with pytest.warns(ResourceWarning):
        fresh.close()
    with pytest.raises(MetraleError, match="the DeviceBuffer has been freed"):
        _ = buffer.ptr


def test_the_last_reference_to_an_owner_gives_everything_back(device):
    own = Owner(device, "Thing")
    own.alloc("buffer", 64)
    own.stream()
    own.event()
    del own
    gc.collect()
    state = device.snapshot()
    assert (state["allocations"], state["streams"], state["events"]) == ([], {}, {})


def test_an_interrupt_in_free_leaves_the_rest_for_the_next_call(device):
    own = Owner(device, "Thing")
    own.alloc("first", 64)

    def interrupted():
        raise KeyboardInterrupt

    own._undo.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.free()
    own.free()
    assert device.live_alloc_count == 0


def test_an_owner_of_a_handle_is_not_copied(device):
    event = OwnedHandle(device, device.create_event, device.destroy_event)
    with pytest.raises(TypeError, match="the only owner"):
        copy.copy(event)
    event.free()


def test_a_handle_whose_destruction_is_refused_is_still_owned(device):
    stream = OwnedHandle(device, device.create_stream, device.destroy_stream)
    device.begin_capture(stream.value)
    with pytest.raises(CaptureError, match="^destroy_stream: "):
        stream.free()
    device.abort_capture_if_active(stream.value)
    stream.free()
    assert device.snapshot()["streams"] == {}


def test_a_kernel_outlives_its_backend_but_fits_no_other():
    for _ in range(20):
        with metrale.open("host") as first:
            kernel = first.kernel("moe_v41", "moe_v41_finish")
        del first
        with metrale.open("host") as second, second.buffer(64) as b:
            launch = KernelLaunch(second, kernel).arg_ptr(b).arg_ptr(b).arg_u32(1)
            with pytest.raises(LaunchError, match="the kernel belongs to another backend"):
                launch.launch()


def test_a_backend_is_initialised_once(fresh):
    with pytest.raises(TypeError, match="is initialised once"):
        fresh.__init__()


def test_a_buffer_is_initialised_once(device):
    with device.buffer(64) as buffer, pytest.raises(TypeError, match="a DeviceBuffer is initialised once"):
        buffer.__init__(device, 64)


def test_close_reports_streams_and_events_too(fresh):
    fresh.create_stream()
    fresh.create_event()
    with pytest.warns(ResourceWarning, match=r"never freed: 1 streams \(.*\); 1 events \(.*\)"):
        assert fresh.close() == []


def test_the_ledger_hands_out_copies(device):
    stream = device.create_stream()
    device.ledger.streams.clear()
    assert list(device.ledger.streams) == [stream]
    device.destroy_stream(stream)


def test_an_out_of_memory_error_can_cross_to_another_process(device):
    with pytest.raises(OutOfMemoryError) as caught, device.buffer(64, "held"):
        device.alloc(1 << 50)
    other = pickle.loads(pickle.dumps(caught.value))
    assert (str(other), other.asked, other.total) == (str(caught.value), 1 << 50, caught.value.total)
