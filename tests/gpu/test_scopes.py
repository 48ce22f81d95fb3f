# SPDX-License-Identifier: MIT OR Apache-2.0
"""`with gpu.audit(name) as scope:` tells what was allocated, freed and leaked inside, and the peak."""

import inspect
import threading

import pytest

from metrale.errors import MetraleError


def test_a_scope_counts_what_happens_inside(device):
    with device.buffer(1000, "before") as before:
        with device.audit("step") as scope:
            inside = device.buffer(300)
            device.buffer(200).free()
            before.free()
    assert (scope.name, scope.allocations, scope.allocated_bytes) == ("step", 2, 500)
    assert (scope.frees, scope.freed_bytes) == (2, 1200)
    assert scope.peak_bytes == 1500
    inside.free()


def test_what_began_inside_and_is_live_at_the_end_has_leaked(device):
    with device.audit() as scope:
        ptr, line = device.alloc(16, "left"), inspect.currentframe().f_lineno
        stream, event = device.create_stream(), device.create_event()
        device.buffer(16).free()
    device.free(ptr)
    first = scope.leaked[0]
    assert (first.kind, first.tag, first.line) == ("device", "left", line)
    assert [a.ptr for a in scope.leaked] == [ptr, stream, event]
    device.destroy_stream(stream)
    device.destroy_event(event)


def test_what_was_there_before_has_not_leaked(device):
    with device.buffer(16):
        with device.audit() as scope:
            pass
    assert (scope.leaked, scope.allocations, scope.frees) == ([], 0, 0)


def test_scopes_nest(device):
    with device.audit("outer") as outer:
        first = device.buffer(100)
        with device.audit("inner") as inner:
            second = device.buffer(10)
            first.free()
        third = device.buffer(80)
    assert (outer.allocations, inner.allocations) == (3, 1)
    assert (inner.freed_bytes, outer.freed_bytes) == (100, 100)
    assert (inner.peak_bytes, outer.peak_bytes) == (110, 110)
    assert [a.nbytes for a in inner.leaked] == [10]
    assert [a.nbytes for a in outer.leaked] == [10, 80]
    second.free()
    third.free()


def test_a_scope_tells_inside_what_has_happened_so_far(device):
    with device.audit() as scope:
        with device.buffer(64) as buffer:
            assert (scope.allocated_bytes, scope.frees) == (64, 0)
            assert [a.ptr for a in scope.leaked] == [buffer.ptr]
        assert (scope.frees, scope.leaked) == (1, [])


def test_a_scope_sees_all_threads(device):
    with device.audit() as scope:
        thread = threading.Thread(target=lambda: device.buffer(64).free())
        thread.start()
        thread.join()
    assert (scope.allocated_bytes, scope.freed_bytes) == (64, 64)


def test_an_exception_inside_is_not_held_up(device):
    with pytest.raises(KeyError):
        with device.audit() as scope:
            ptr = device.alloc(16)
            raise KeyError
    assert [a.ptr for a in scope.leaked] == [ptr]
    device.free(ptr)


def test_the_report_names_what_leaked(device):
    with device.audit("request") as scope:
        ptr = device.alloc(123_456, "cache")
    head, row = scope.report().splitlines()
    device.free(ptr)
    assert head == "request: allocated 123,456 bytes in 1, freed 0 in 0, peak 123,456, leaked 1"
    assert row.split()[:2] == ["123,456", "cache"]
    assert row.split()[2].startswith(f"{__file__}:")


def test_a_scope_is_entered_once(device):
    with device.audit("once") as scope:
        pass
    with pytest.raises(MetraleError, match="^the scope once has been entered before$"):
        scope.__enter__()


def test_nothing_has_happened_before_a_scope_begins(device):
    scope = device.audit()
    with device.buffer(16):
        assert (scope.allocations, scope.freed_bytes, scope.peak_bytes, scope.leaked) == (0, 0, 0, [])
