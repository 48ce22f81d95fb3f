# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams and events."""

import numpy as np
import pytest

from metrale.errors import ArgumentError, MetraleError


@pytest.fixture
def stream(device):
    handle = device.create_stream()
    yield handle
    device.destroy_stream(handle)


@pytest.fixture
def event(device):
    handle = device.create_event()
    yield handle
    device.destroy_event(handle)


def test_the_default_stream_is_the_backends_own(device):
    assert device.default_stream() == device.default_stream() != 0


def test_streams_and_events_differ(device, stream, event):
    other = device.create_stream()
    assert len({device.default_stream(), stream, other, event}) == 4
    device.destroy_stream(other)


def test_streams_and_events_are_on_the_ledger(device, stream, event):
    snapshot = device.snapshot()
    assert [*snapshot["streams"]] == [stream]
    assert [*snapshot["events"]] == [event]
    for site in (snapshot["streams"][stream], snapshot["events"][event]):
        assert site.rpartition(":")[0] == __file__


class Stream:
    """A stream of another library."""

    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


@pytest.mark.parametrize("form", [int, Stream])
def test_work_goes_to_any_form_of_a_stream(device, stream, form):
    with device.buffer(64) as buffer:
        device.memset_async(buffer, 9, 64, form(stream))
        device.synchronize(form(stream))
        assert buffer.numpy().tolist() == [9] * 64


def test_stream_0_is_the_legacy_stream(device):
    with device.buffer(64) as buffer:
        device.memset_async(buffer, 4, 64, 0)
        device.synchronize(0)
        assert buffer.numpy().tolist() == [4] * 64


@pytest.mark.parametrize("what", ["0", 1.0, object()])
def test_what_is_no_stream_is_refused(device, what):
    with pytest.raises(ArgumentError, match="stream: got .*, allowed: an int, an object with __cuda_stream__, or None"):
        device.synchronize(what)


@pytest.mark.parametrize("what", [-1, 1 << 64])
def test_numbers_that_are_no_handle_are_refused(device, what):
    with pytest.raises(ArgumentError, match=f"stream: got {what}, allowed: an integer, 0 to "):
        device.synchronize(what)


def test_a_stream_is_destroyed_once(device):
    handle = device.create_stream()
    device.destroy_stream(handle)
    with pytest.raises(ArgumentError, match=f"stream: got {handle}, allowed: a live stream of create_stream"):
        device.destroy_stream(handle)


def test_the_default_stream_is_not_destroyed(device):
    with pytest.raises(ArgumentError, match="allowed: a live stream of create_stream"):
        device.destroy_stream(device.default_stream())


def test_a_stream_that_is_gone_takes_no_work(host):
    handle = host.create_stream()
    host.destroy_stream(handle)
    with pytest.raises(ArgumentError, match=f"stream: got {handle}, allowed: 0, or a live stream of this backend"):
        host.synchronize(handle)


EVENT_USES = {
    "record_event": lambda gpu, event: gpu.record_event(event),
    "stream_wait_event": lambda gpu, event: gpu.stream_wait_event(None, event),
    "event_synchronize": lambda gpu, event: gpu.event_synchronize(event),
    "event_query": lambda gpu, event: gpu.event_query(event),
    "event_elapsed_ms": lambda gpu, event: gpu.event_elapsed_ms(event, event),
    "destroy_event": lambda gpu, event: gpu.destroy_event(event),
}


@pytest.mark.parametrize("use", EVENT_USES)
def test_an_event_that_is_gone_is_refused(device, use):
    handle = device.create_event()
    device.destroy_event(handle)
    with pytest.raises(ArgumentError, match=f"(event|start): got {handle}, allowed: a live event of create_event"):
        EVENT_USES[use](device, handle)


def test_an_event_happens_after_the_work_before_it(device, stream, event):
    device.record_event(event, stream)
    device.event_synchronize(event)
    assert device.event_query(event) is True


def test_a_stream_waits_for_another(device, stream, event):
    """Work on one stream, then on the other: the second sees the first's result."""
    values = np.arange(1 << 20, dtype=np.uint8)
    with device.upload(values) as a, device.buffer(a.nbytes) as b, device.buffer(a.nbytes) as c:
        device.copy_d2d_async(a, b, a.nbytes, stream)
        device.record_event(event, stream)
        device.stream_wait_event(None, event)
        device.copy_d2d_async(b, c, a.nbytes, None)
        assert (c.numpy() == values).all()


def test_timed_events_measure(device):
    start, end = device.create_event(timing=True), device.create_event(timing=True)
    with device.buffer(1 << 24) as buffer:
        device.record_event(start)
        device.memset_async(buffer, 0, buffer.nbytes, None)
        device.record_event(end)
        device.event_synchronize(end)
        assert 0 < device.event_elapsed_ms(start, end) < 10_000
    device.destroy_event(start)
    device.destroy_event(end)


@pytest.mark.parametrize(("timing", "recorded"), [(False, True), (True, False)])
def test_events_without_a_time_are_refused(device, timing, recorded):
    events = [device.create_event(timing) for _ in range(2)]
    for event in events:
        if recorded:
            device.record_event(event)
    with pytest.raises(MetraleError, match="timing=True"):
        device.event_elapsed_ms(*events)
    for event in events:
        device.destroy_event(event)
