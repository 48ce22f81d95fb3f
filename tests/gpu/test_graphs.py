# SPDX-License-Identifier: MIT OR Apache-2.0
"""Captures and graphs."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from metrale import Graph, KernelLaunch
from metrale.errors import ArgumentError, CaptureError, CudaError, MetraleError

N = 64


@pytest.fixture
def side(device, stream):
    handle = device.create_stream()
    yield handle
    device.abort_capture_if_active(stream)
    device.destroy_stream(handle)


@pytest.fixture
def out(device):
    with device.buffer(4 * N) as buffer:
        device.memset(buffer, 0, 4 * N)
        yield buffer


@pytest.fixture
def fill(device, probe, out):
    """`fill(value)`: a launch that fills out."""
    return lambda value: KernelLaunch(device, probe("fill")).block(N).arg_ptr(out).arg_u32(N).arg_u32(value)


def words(buffer):
    return buffer.numpy("uint32").tolist()


def graph_of(device, stream, *work):
    device.begin_capture(stream)
    for do in work:
        do()
    return device.end_capture(stream)


# Capture and replay


def test_captured_work_is_not_done(device, stream, out, fill):
    graph = graph_of(device, stream, lambda: fill(7).launch(stream))
    device.synchronize(stream)
    assert words(out) == [0] * N
    device.destroy_graph(graph)


def test_a_graph_does_what_was_captured_each_time_it_is_launched(device, stream, out, fill):
    graph = graph_of(device, stream, lambda: fill(7).launch(stream))
    for _ in range(3):
        device.memset(out, 0, 4 * N)
        device.launch_graph(graph, stream)
        device.synchronize(stream)
        assert words(out) == [7] * N
    device.destroy_graph(graph)


def test_a_graph_runs_on_any_stream(device, stream, side, out, fill):
    graph = graph_of(device, stream, lambda: fill(7).launch(stream))
    device.launch_graph(graph, side)
    device.synchronize(side)
    assert words(out) == [7] * N
    device.destroy_graph(graph)


def test_work_is_done_in_the_order_it_was_captured_in(device, stream, out, fill):
    graph = graph_of(device, stream, lambda: fill(7).launch(stream), lambda: fill(8).launch(stream))
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [8] * N
    device.destroy_graph(graph)


def test_an_empty_capture_is_a_graph(device, stream):
    graph = graph_of(device, stream)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    device.destroy_graph(graph)


def test_copies_and_memsets_are_captured(device, stream):
    source = np.arange(16, dtype=np.uint8)
    taken = np.zeros(16, np.uint8)
    with device.buffer(32) as one, device.buffer(32) as two:
        device.memset(two, 9, 32)
        graph = graph_of(
            device,
            stream,
            lambda: device.memset_async(one, 1, 32, stream),
            lambda: device.copy_h2d_async(source, one, stream),
            lambda: device.copy_d2d_async(one, two, 16, stream),
            lambda: device.copy_d2d_2d_async(one.ptr, 4, two.ptr + 16, 8, 2, 2, stream),
            lambda: device.copy_d2h_async(two, taken, stream),
        )
        assert two.numpy().tolist() == [9] * 32
        device.launch_graph(graph, stream)
        device.synchronize(stream)
        assert one.numpy().tolist() == [*range(16), *[1] * 16]
        assert two.numpy().tolist() == [*range(16), 0, 1, *[9] * 6, 4, 5, *[9] * 6]
        assert taken.tolist() == [*range(16)]
        device.destroy_graph(graph)


def test_streams_join_by_events(device, stream, side, out, fill):
    forked, joined = device.create_event(), device.create_event()
    with device.buffer(4 * N) as copied:
        device.begin_capture(stream)
        fill(7).launch(stream)
        device.record_event(forked, stream)
        device.stream_wait_event(side, forked)
        assert device.stream_is_capturing(side)
        device.copy_d2d_async(out, copied, 4 * N, side)
        device.record_event(joined, side)
        device.stream_wait_event(stream, joined)
        fill(8).launch(stream)
        graph = device.end_capture(stream)
        assert not device.stream_is_capturing(side)
        device.launch_graph(graph, stream)
        device.synchronize(stream)
        assert (words(copied), words(out)) == ([7] * N, [8] * N)
        device.destroy_graph(graph)
    device.destroy_event(forked)
    device.destroy_event(joined)


def test_host_memory_of_a_captured_copy_lives_as_long_as_the_graph(device, stream):
    with device.buffer(1 << 20) as buffer:
        device.begin_capture(stream)
        device.copy_h2d_async(np.full(1 << 20, 5, np.uint8), buffer, stream)
        graph = device.end_capture(stream)
        others = [np.full(1 << 20, 6, np.uint8) for _ in range(8)]  # where the first would have been
        device.launch_graph(graph, stream)
        device.synchronize(stream)
        assert set(buffer.numpy().tolist()) == {5}
        device.destroy_graph(graph)
    assert len(others) == 8


def test_memory_can_be_allocated_and_freed_during_a_capture(device, stream, fill, out):
    device.begin_capture(stream)
    with device.buffer(1 << 22):
        fill(7).launch(stream)
    device.destroy_event(device.create_event())
    device.synchronize()
    device.destroy_graph(device.end_capture(stream))


def test_a_kernel_is_loaded_during_a_capture(fresh, tmp_path):
    (tmp_path / "late.cu").write_text('extern "C" __global__ void late(int* out) { *out = 3; }')
    fresh.add_module(tmp_path / "late.cu")
    stream = fresh.create_stream()
    with fresh.buffer(4) as out:
        fresh.begin_capture(stream)
        KernelLaunch(fresh, fresh.kernel("late", "late")).arg_ptr(out).launch(stream)
        graph = fresh.end_capture(stream)
        fresh.launch_graph(graph, stream)
        fresh.synchronize(stream)
        assert out.numpy("int32").tolist() == [3]
    fresh.destroy_graph(graph)
    fresh.destroy_stream(stream)


# Updates


def test_an_argument_is_updated_in_a_graph(device, stream, out, fill):
    prepared = fill(7).prepare()
    graph = graph_of(device, stream, lambda: prepared.launch(stream))
    prepared.set("value", 9).update(graph)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [9] * N
    device.destroy_graph(graph)


def test_setting_an_argument_leaves_the_graph_alone(device, stream, out, fill):
    prepared = fill(7).prepare()
    graph = graph_of(device, stream, lambda: prepared.launch(stream))
    prepared.set("value", 9)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [7] * N
    device.destroy_graph(graph)


def test_an_update_is_of_the_objects_own_launches(device, stream, probe, out):
    half = 4 * N // 2
    one, two = (KernelLaunch(device, probe("fill")).block(N) for _ in range(2))
    first = one.arg_ptr(out).arg_u32(N // 2).arg_u32(1).prepare()
    second = two.arg_ptr(out.ptr + half).arg_u32(N // 2).arg_u32(2).prepare()
    graph = graph_of(device, stream, lambda: first.launch(stream), lambda: second.launch(stream))
    second.set("value", 5).update(graph)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [1] * (N // 2) + [5] * (N // 2)
    device.destroy_graph(graph)


def test_all_launches_of_one_object_are_updated(device, stream, side, probe, out):
    prepared = KernelLaunch(device, probe("count_threads")).block(N).arg_ptr(out).prepare()
    with device.buffer(4) as other:
        device.memset(other, 0, 4)
        graph = graph_of(device, stream, lambda: prepared.launch(stream), lambda: prepared.launch(stream))
        prepared.set("out", other).update(graph)
        device.launch_graph(graph, stream)
        device.synchronize(stream)
        assert other.numpy("uint32").tolist() == [2 * N]
        assert words(out) == [0] * N
        device.destroy_graph(graph)


def test_a_launch_on_a_joined_stream_is_updated(device, stream, side, event, out, fill):
    prepared, back = fill(7).prepare(), device.create_event()
    device.begin_capture(stream)
    device.record_event(event, stream)
    device.stream_wait_event(side, event)
    prepared.launch(side)
    device.record_event(back, side)
    device.stream_wait_event(stream, back)
    graph = device.end_capture(stream)
    prepared.set("value", 9).update(graph)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [9] * N
    device.destroy_graph(graph)
    device.destroy_event(back)


def test_launches_of_threads_on_one_capture_are_updated_apart(host):
    kernel = host.kernel("moe_v41", "moe_v41_accumulate")
    one = np.full(N, 0x3F80, np.uint16)  # bf16
    for _ in range(20):
        sums = [host.upload(np.zeros(N, np.float32)) for _ in range(5)]
        builders = [KernelLaunch(host, kernel).block(N).arg_ptr(s).arg_ptr(one).arg_u32(N) for s in sums[:4]]
        prepared = [builder.prepare() for builder in builders]

        def launch(each):
            for _ in range(50):
                each.launch()

        with Graph(host) as graph, ThreadPoolExecutor(4) as pool:
            list(pool.map(launch, prepared))
        prepared[0].set("acc", sums[4]).update(graph.handle)
        graph.launch()
        assert [s.numpy("float32")[0] for s in sums] == [0, 50, 50, 50, 50]


class Index:
    """An integer of another type."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_a_graph_is_named_by_any_integer(device, stream, out, fill):
    prepared = fill(1).prepare()
    graph = Index(graph_of(device, stream, lambda: prepared.launch(stream)))
    prepared.set("value", 7).update(graph)
    device.launch_graph(graph)
    assert words(out) == [7] * N
    device.destroy_graph(graph)
    assert device.ledger.graphs == {}


def test_a_graph_without_the_object_refuses_its_update(device, stream, fill):
    graph = graph_of(device, stream, lambda: fill(7).launch(stream))
    with pytest.raises(ArgumentError, match=r"graph: got \d+, allowed: a graph that holds a launch of this Prepared"):
        fill(7).prepare().update(graph)
    device.destroy_graph(graph)


# What a captured stream cannot do

WAITING = {
    "synchronize": lambda gpu, ptr, stream: gpu.synchronize(stream),
    "copy_d2h_on_stream": lambda gpu, ptr, stream: gpu.copy_d2h_on_stream(ptr, bytearray(4), stream),
    "begin_capture": lambda gpu, ptr, stream: gpu.begin_capture(stream),
    "destroy_stream": lambda gpu, ptr, stream: gpu.destroy_stream(stream),
}
WAITING_FOR_THE_DEFAULT_STREAM = {
    "memset": lambda gpu, ptr: gpu.memset(ptr, 0, 4),
    "copy_h2d": lambda gpu, ptr: gpu.copy_h2d(bytes(4), ptr),
    "copy_d2h": lambda gpu, ptr: gpu.copy_d2h(ptr, bytearray(4)),
    "copy_d2d": lambda gpu, ptr: gpu.copy_d2d(ptr, ptr + 4, 4),
    "upload": lambda gpu, ptr: gpu.upload(bytes(4)),
    "synchronize": lambda gpu, ptr: gpu.synchronize(),
}


@pytest.mark.parametrize("call", WAITING)
def test_a_call_that_waits_is_refused_and_the_capture_goes_on(device, stream, out, fill, call):
    device.begin_capture(stream)
    with pytest.raises(CaptureError, match=f"^{call}: the stream {stream:#x} is being captured"):
        WAITING[call](device, out.ptr, stream)
    fill(7).launch(stream)
    graph = device.end_capture(stream)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [7] * N
    device.destroy_graph(graph)


@pytest.mark.parametrize("call", WAITING_FOR_THE_DEFAULT_STREAM)
def test_a_call_that_waits_for_the_default_stream_is_refused_while_that_is_captured(device, out, fill, call):
    device.begin_capture()
    with pytest.raises(CaptureError, match=f"^{call}: the stream .* is being captured"):
        WAITING_FOR_THE_DEFAULT_STREAM[call](device, out.ptr)
    assert device.live_alloc_count == 1
    fill(7).launch()
    device.destroy_graph(device.end_capture())


@pytest.mark.parametrize("call", WAITING_FOR_THE_DEFAULT_STREAM)
def test_the_default_stream_is_free_while_another_is_captured(device, stream, out, call):
    device.begin_capture(stream)
    made = WAITING_FOR_THE_DEFAULT_STREAM[call](device, out.ptr)
    if made is not None:
        made.free()
    device.destroy_graph(device.end_capture(stream))


@pytest.mark.parametrize("call", ["event_synchronize", "event_query", "event_elapsed_ms"])
def test_an_event_of_a_capture_never_happens(device, stream, event, call):
    device.begin_capture(stream)
    device.record_event(event, stream)
    device.destroy_graph(device.end_capture(stream))
    arguments = [event, event] if call == "event_elapsed_ms" else [event]
    with pytest.raises(CaptureError, match=f"^{call}: the event {event:#x} was recorded in a capture"):
        getattr(device, call)(*arguments)
    with pytest.raises(CaptureError, match=f"^stream_wait_event: the event {event:#x} was recorded in a capture"):
        device.stream_wait_event(stream, event)


def test_an_event_of_a_capture_can_be_recorded_again(device, stream, event):
    device.begin_capture(stream)
    device.record_event(event, stream)
    device.destroy_graph(device.end_capture(stream))
    device.record_event(event, stream)
    device.event_synchronize(event)
    assert device.event_query(event)


def test_a_captured_stream_does_not_wait_for_an_event_from_outside(device, stream, event, out, fill):
    device.record_event(event)
    device.begin_capture(stream)
    message = f"^stream_wait_event: the stream {stream:#x} is being captured, and the event {event:#x} was not recorded"
    with pytest.raises(CaptureError, match=message):
        device.stream_wait_event(stream, event)
    fill(7).launch(stream)
    device.destroy_graph(device.end_capture(stream))


def test_two_captures_do_not_wait_for_each_other(device, stream, side, event):
    device.begin_capture(stream)
    device.begin_capture(side)
    device.record_event(event, side)
    with pytest.raises(CaptureError, match="was recorded in another capture"):
        device.stream_wait_event(stream, event)
    device.destroy_graph(device.end_capture(side))
    device.destroy_graph(device.end_capture(stream))


def test_a_graph_does_not_become_part_of_another(device, stream, out, fill):
    graph = graph_of(device, stream)
    device.begin_capture(stream)
    with pytest.raises(CaptureError, match=f"^launch_graph: the stream {stream:#x} is being captured, and a graph"):
        device.launch_graph(graph, stream)
    fill(7).launch(stream)
    device.destroy_graph(device.end_capture(stream))
    device.destroy_graph(graph)


def test_the_legacy_stream_cannot_be_captured(device):
    with pytest.raises(ArgumentError, match="^stream: got 0, allowed: a stream other than the legacy stream"):
        device.begin_capture(0)


# Captures that fail


def test_a_stream_that_is_not_joined_back_fails_the_capture_and_stays_usable(device, stream, side, event, out, fill):
    device.begin_capture(stream)
    device.record_event(event, stream)
    device.stream_wait_event(side, event)
    fill(7).launch(side)
    with pytest.raises(CaptureError, match="made no graph: a stream that joined it was not joined back"):
        device.end_capture(stream)
    for s in (stream, side):
        assert not device.stream_is_capturing(s)
        device.memset(out, 0, 4 * N)
        fill(3).launch(s)
        device.synchronize(s)
        assert words(out) == [3] * N
    assert device.snapshot()["graphs"] == {}


@pytest.mark.gpu
def test_a_capture_that_the_driver_ends_leaves_the_stream_usable(cuda):
    from cuda.bindings import driver

    stream = cuda.create_stream()
    with cuda.buffer(4) as out:
        cuda.begin_capture(stream)
        assert driver.cuStreamSynchronize(stream)[0] != 0  # past the backend
        assert cuda.stream_is_capturing(stream)
        with pytest.raises(CudaError):
            cuda.memset_async(out, 1, 4, stream)
        with pytest.raises(CaptureError, match="a call that cannot be captured ended it"):
            cuda.end_capture(stream)
        cuda.memset_async(out, 1, 4, stream)
        cuda.synchronize(stream)
        assert out.numpy().tolist() == [1] * 4
    cuda.destroy_stream(stream)


def test_a_launch_that_is_refused_leaves_the_capture_alone(device, stream, out, fill):
    device.begin_capture(stream)
    with pytest.raises(MetraleError):
        fill(7).block(0).launch(stream)
    fill(8).launch(stream)
    graph = device.end_capture(stream)
    device.launch_graph(graph, stream)
    device.synchronize(stream)
    assert words(out) == [8] * N
    device.destroy_graph(graph)


def test_a_capture_is_aborted(device, stream, out, fill):
    device.begin_capture(stream)
    fill(7).launch(stream)
    assert device.abort_capture_if_active(stream)
    assert not device.stream_is_capturing(stream)
    assert not device.abort_capture_if_active(stream)
    device.synchronize(stream)
    assert words(out) == [0] * N


def test_ending_what_did_not_begin_is_refused(device, stream):
    with pytest.raises(CaptureError, match=f"^end_capture: no capture began on the stream {stream:#x}"):
        device.end_capture(stream)


def test_a_joined_stream_does_not_end_the_capture(device, stream, side, event):
    device.begin_capture(stream)
    device.record_event(event, stream)
    device.stream_wait_event(side, event)
    for call in ("end_capture", "abort_capture_if_active"):
        with pytest.raises(CaptureError, match=f"^{call}: no capture began on the stream {side:#x}"):
            getattr(device, call)(side)
    assert device.abort_capture_if_active(stream)


def test_another_thread_does_not_end_the_capture(device, stream):
    device.begin_capture(stream)
    raised = []

    def end():
        try:
            device.end_capture(stream)
        except CaptureError as error:
            raised.append(str(error))

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert re.match("end_capture: the capture of the stream .* began in another thread", raised[0])
    device.destroy_graph(device.end_capture(stream))


# Life


def test_graphs_are_on_the_ledger(device, stream):
    graph = graph_of(device, stream)
    assert [*device.snapshot()["graphs"]] == [graph]
    assert device.snapshot()["graphs"][graph].startswith(f"{__file__}:")
    device.destroy_graph(graph)
    assert device.snapshot()["graphs"] == {}


def test_a_graph_may_be_an_integer_of_another_type(device, stream, out, fill):
    class Handle:
        def __index__(self):
            return graph

    graph = graph_of(device, stream, lambda: fill(7).launch(stream))
    device.launch_graph(Handle(), stream)
    device.synchronize(stream)
    assert words(out) == [7] * N
    device.destroy_graph(Handle())
    assert device.snapshot()["graphs"] == {}


@pytest.mark.parametrize("use", ["launch_graph", "destroy_graph"])
def test_a_graph_that_is_gone_is_refused(device, stream, use):
    graph = graph_of(device, stream)
    device.destroy_graph(graph)
    with pytest.raises(ArgumentError, match=f"^graph: got {graph}, allowed: a live graph"):
        getattr(device, use)(graph)


def test_close_destroys_graphs_ends_captures_and_says_so(fresh):
    stream = fresh.create_stream()
    graph_of(fresh, stream)
    fresh.begin_capture(stream)
    with pytest.warns(ResourceWarning, match=r"1 streams .*; 1 graphs \(.*test_graphs"):
        fresh.close()
    assert fresh.snapshot()["graphs"] == {}


# Graph


def test_a_graph_object_captures_launches_and_frees(device, out, fill):
    with Graph(device) as graph:
        fill(7).launch()
    assert words(out) == [0] * N
    graph.launch()
    assert words(out) == [7] * N
    graph.free()
    graph.free()
    assert device.snapshot()["graphs"] == {}


def test_a_block_that_raises_leaves_no_capture_and_no_graph(device, fill):
    graph = Graph(device)
    with pytest.raises(KeyError), graph:
        fill(7).launch()
        raise KeyError
    assert not device.stream_is_capturing()
    with pytest.raises(ArgumentError, match="graph: got 0, allowed: a live graph"):
        graph.launch()


def test_a_graph_object_captures_anew(device, out, fill):
    graph = Graph(device)
    for value in (7, 8):
        with graph:
            fill(value).launch()
    graph.launch()
    assert words(out) == [8] * N
    assert len(device.snapshot()["graphs"]) == 1
    graph.free()


def test_the_last_reference_frees_a_graph(device):
    graph = Graph(device)
    with graph:
        pass
    del graph
    assert device.snapshot()["graphs"] == {}


def test_a_graph_object_outlives_its_backend(fresh):
    with Graph(fresh) as graph:
        pass
    with pytest.warns(ResourceWarning, match="1 graphs"):
        fresh.close()
    graph.free()
