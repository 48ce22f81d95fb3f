# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the ledger knows of allocations."""

import inspect
import json
import time

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
