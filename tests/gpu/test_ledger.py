# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the ledger knows of allocations."""

import inspect
import json
import time

import pytest

from metrale.errors import ArgumentError
from metrale.gpu.owner import Owner


def here():
    """file:line of the caller."""
    caller = inspect.currentframe().f_back
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


def test_an_allocation_has_tag_bytes_and_call_site(device):
    before = time.time_ns()
    ptr, site = device.alloc(640, "weights"), here()
    (allocation,) = device.ledger.live()
    assert (allocation.ptr, allocation.nbytes, allocation.kind, allocation.tag) == (ptr, 640, "device", "weights")
    assert allocation.site == f"{allocation.file}:{allocation.line}" == site
    assert before <= allocation.time_ns <= time.time_ns()
    assert allocation.freed_at is None
    device.free(ptr)
    assert allocation.freed_at.startswith(__file__)


def test_each_way_to_allocate_names_its_caller(device):
    sites = []
    ptr, site = device.alloc_managed(16), here()
    sites.append(site)
    pinned, site = device.alloc_host_pinned(16), here()
    sites.append(site)
    buffer, site = device.buffer(16), here()
    sites.append(site)
    upload, site = device.upload(bytes(16)), here()
    sites.append(site)
    assert [allocation.site for allocation in device.ledger.live()] == sites
    device.free(ptr)
    device.free_host_pinned(pinned)
    buffer.free()
    upload.free()


def test_the_call_site_is_outside_the_package(device):
    """Owner is package code that allocates for its caller."""
    own = Owner(device, "Thing")
    _, site = own.alloc("buffer", 100), here()
    assert [(a.tag, a.site) for a in device.ledger.live()] == [("Thing.buffer", site)]
    own.free()


def test_kinds_are_told_apart(device):
    device_ptr, managed, pinned = device.alloc(1), device.alloc_managed(2), device.alloc_host_pinned(4)
    assert [a.kind for a in device.ledger.live()] == ["device", "managed", "pinned"]
    assert device.live_bytes == 3
    assert device.live_alloc_count == 3
    assert device.ledger.pinned_bytes == 4
    device.free(device_ptr)
    device.free(managed)
    device.free_host_pinned(pinned)


def test_the_peak_is_the_most_that_was_live(fresh):
    assert fresh.peak_bytes == 0
    first, second = fresh.alloc(100), fresh.alloc(50)
    fresh.free(first)
    third = fresh.alloc(70)
    assert (fresh.live_bytes, fresh.peak_bytes) == (120, 150)
    fresh.free(second)
    fresh.free(third)
    assert (fresh.live_bytes, fresh.peak_bytes) == (0, 150)


def test_live_allocations_are_listed_oldest_first_and_largest_first(device):
    buffers = [device.buffer(nbytes) for nbytes in (20, 50, 30)]
    buffers.append(buffers.pop(0))
    assert [a.nbytes for a in device.ledger.live()] == [20, 50, 30]
    assert [a.nbytes for a in device.ledger.largest(2)] == [50, 30]
    assert [a.seq for a in device.ledger.live()] == sorted(a.seq for a in device.ledger.live())
    for buffer in buffers:
        buffer.free()


def test_the_report_is_a_table_with_the_largest_first(device):
    with device.buffer(1_000, "small"), device.buffer(2_000_000, "large"), device.buffer(3):
        head, *rows = device.alloc_report().splitlines()
    assert head.split()[:2] == ["2,001,003", "bytes"]
    assert "3 allocations" in head
    assert [row.split()[:2] for row in rows] == [["2,000,000", "large"], ["1,000", "small"], ["3", "-"]]
    assert all(__file__ in row for row in rows)


def test_a_snapshot_is_json(device):
    stream = device.create_stream()
    with device.buffer(77, "kept"):
        snapshot = json.loads(json.dumps(device.snapshot()))
    device.destroy_stream(stream)
    assert (snapshot["live_bytes"], snapshot["live_allocs"]) == (77, 1)
    (entry,) = snapshot["allocations"]
    assert (entry["nbytes"], entry["tag"], entry["file"]) == (77, "kept", __file__)
    assert [*snapshot["streams"]] == [str(stream)]


def test_tags_may_be_any_object(device):
    with device.buffer(1, tag=("layer", 3)):
        assert device.ledger.live()[0].tag == "('layer', 3)"


def test_a_freed_address_can_be_used_again(device):
    for _ in range(50):
        device.free(device.alloc(256))
    assert device.live_alloc_count == 0


def test_what_begins_and_ends_is_counted_together(fresh):
    first, second = fresh.buffer(16), fresh.buffer(16)
    before = time.time_ns()
    first.free()
    third = fresh.buffer(16)
    one, two, three = (a for a in fresh.ledger.records() if a.kind == "device")
    assert one.seq < two.seq < one.freed_seq < three.seq == fresh.ledger.seq
    assert before <= one.freed_ns <= three.time_ns
    assert (two.freed_seq, two.freed_ns) == (0, 0)
    second.free()
    third.free()


def test_an_allocation_is_rounded_up_as_the_driver_does(device):
    with device.buffer(1), device.buffer((2 << 20) + 1):
        small, large = device.ledger.live()
    step = 512 if device.kind == "cuda" else 256
    assert small.rounded == step
    assert large.rounded == ((4 << 20) if device.kind == "cuda" else (2 << 20) + step)


def test_the_stream_is_that_of_the_last_copy_or_memset(device):
    stream = device.create_stream()
    with device.buffer(16, "a") as a, device.buffer(16, "b") as b:
        records = {record.tag: record for record in device.ledger.live()}
        assert records["a"].stream is None
        device.memset(a, 0, 16)
        device.copy_d2d_async(a, b, 16, stream)
        device.memset(a, 1, 16)
        assert (records["a"].stream, records["b"].stream) == (device.default_stream(), stream)
        device.synchronize(stream)
    device.destroy_stream(stream)


# The peak


def peak(gpu):
    return [(a.tag, a.nbytes) for a in gpu.ledger.peak_set()]


def test_the_peak_set_is_what_was_live_at_the_peak(fresh):
    first, second = fresh.buffer(100, "first"), fresh.buffer(50, "second")
    first.free()
    third = fresh.buffer(70, "third")
    assert peak(fresh) == [("first", 100), ("second", 50)]
    second.free()
    third.free()
    assert peak(fresh) == [("first", 100), ("second", 50)]
    higher = fresh.buffer(151, "higher")
    assert peak(fresh) == [("higher", 151)]
    higher.free()


def test_the_peak_set_does_not_depend_on_what_is_remembered(fresh):
    fresh.ledger.history = 0
    buffers = [fresh.buffer(1 + i, i) for i in range(20)]
    for buffer in buffers:
        buffer.free()
    assert peak(fresh) == [(str(i), 1 + i) for i in range(20)]
    assert sum(nbytes for _, nbytes in peak(fresh)) == fresh.peak_bytes


def test_pinned_memory_is_not_part_of_the_peak(fresh):
    with fresh.pinned_buffer(1000), fresh.buffer(10, "device"):
        assert peak(fresh) == [("device", 10)]


# The history


def test_what_is_freed_is_remembered_up_to_a_number(fresh):
    fresh.ledger.history = 3
    for i in range(5):
        fresh.buffer(16, i).free()
    assert [a.tag for a in fresh.ledger.records() if a.kind == "device"] == ["2", "3", "4"]
    assert fresh.ledger.forgotten == 2


def test_all_that_is_freed_is_remembered_if_wanted(fresh):
    assert fresh.ledger.history == 1024
    fresh.ledger.history = None
    for _ in range(2000):
        fresh.buffer(16).free()
    assert len([a for a in fresh.ledger.records() if a.kind == "device"]) == 2000
    assert (fresh.ledger.history, fresh.ledger.forgotten) == (None, 0)


def test_a_shorter_history_counts_what_it_lets_go(fresh):
    for _ in range(4):
        fresh.buffer(16).free()
    fresh.ledger.history = 1
    assert fresh.ledger.forgotten == 3


@pytest.mark.parametrize("number", [-1, 1.5, True, "all"])
def test_a_history_of_another_kind_is_refused(fresh, number):
    with pytest.raises(ArgumentError, match=f"^history: got {number!r}, allowed: 0 or more, or None for all$"):
        fresh.ledger.history = number


# What is not memory


def test_streams_events_graphs_and_modules_have_records(fresh):
    fresh.kernel("moe_v41", "moe_v41_finish")
    stream, line = fresh.create_stream(), here()
    event = fresh.create_event()
    fresh.begin_capture(stream)
    graph = fresh.end_capture(stream)
    records = {a.kind: a for a in fresh.ledger.records()}
    assert {kind: records[kind].ptr for kind in ("stream", "event", "graph")} == {
        "stream": stream, "event": event, "graph": graph,
    }  # fmt: skip
    assert records["stream"].site == line
    assert records["module"].nbytes == fresh.ledger.modules[records["module"].tag] > 1000
    fresh.destroy_graph(graph)
    fresh.destroy_event(event)
    fresh.destroy_stream(stream)
    assert all(records[kind].freed_at.startswith(__file__) for kind in ("stream", "event", "graph"))
    assert not any(a.leaked for a in fresh.ledger.records())


def test_what_close_gives_back_has_leaked(fresh):
    fresh.alloc(16, "left")
    fresh.buffer(16, "freed").free()
    fresh.create_stream()
    fresh.kernel("moe_v41", "moe_v41_finish")
    with pytest.warns(ResourceWarning):
        fresh.close()
    said = {a.tag or a.kind: (a.leaked, a.freed_seq > 0) for a in fresh.ledger.records() if a.kind != "module"}
    assert said == {"left": (True, True), "freed": (False, True), "stream": (True, True)}
    assert not any(a.leaked for a in fresh.ledger.records() if a.kind == "module")


# Sweeping


def test_a_sweep_frees_what_has_no_owner_and_says_what_it_was(device):
    buffer = device.buffer(16, "owned")
    ptr, pinned = device.alloc(32, "raw"), device.alloc_host_pinned(8, "pinned")
    stream, event = device.create_stream(), device.create_event()
    own = Owner(device, "Model")
    owned = own.stream()
    device.begin_capture(stream)
    graph = device.end_capture(stream)
    swept = device.sweep_unreleased()
    assert [a.ptr for a in swept] == [ptr, pinned, stream, event, graph]
    assert all(a.leaked and a.freed_seq for a in swept)
    assert [a.tag for a in device.ledger.live()] == ["owned"]
    assert (list(device.ledger.streams), device.ledger.events, device.ledger.graphs) == ([owned], {}, {})
    buffer.free()
    own.free()


def test_a_sweep_waits_for_the_work_on_what_it_frees(device):
    ptr = device.alloc(1 << 20)
    with device.buffer(1 << 20) as kept:
        device.memset_async(ptr, 7, 1 << 20, device.default_stream())
        device.copy_d2d_async(ptr, kept, 1 << 20, device.default_stream())
        device.sweep_unreleased()
        assert set(kept.numpy().tolist()) == {7}
