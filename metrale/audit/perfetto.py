# SPDX-License-Identifier: MIT OR Apache-2.0
"""A capture as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open."""

from typing import Any

from metrale.audit.capture import BackendCapture, Capture, Entry
from metrale.audit.text import backend_line

__all__ = ["trace"]

BITS_OF_SEQ = 48


def trace(capture: Capture) -> dict[str, Any]:
    """A process a backend: counters of live bytes, and an asynchronous slice an allocation, for they overlap."""
    events: list[dict[str, Any]] = []
    for number, backend in enumerate(capture.backends, start=1):
        name = f"{backend_line(backend)} (pid {capture.process.pid})"
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        events += _counters(capture, backend, number)
        for entry in backend.memory:
            events += _slice(capture, entry, number)
    other = {"command": " ".join(capture.process.argv), "metrale": capture.process.metrale}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}


def _counters(capture: Capture, backend: BackendCapture, number: int) -> list[dict[str, Any]]:
    counters = []
    shown = {"live bytes": -1, "pinned bytes": 0}
    for event in backend.timeline:
        for name, value in (("live bytes", event.live), ("pinned bytes", event.pinned)):
            if shown[name] != value:
                shown[name] = value
                ts = _microseconds(capture, event.time_ns)
                counters.append({"ph": "C", "name": name, "pid": number, "tid": 0, "ts": ts, "args": {"bytes": value}})
    return counters


def _slice(capture: Capture, entry: Entry, number: int) -> list[dict[str, Any]]:
    identity = f"{number << BITS_OF_SEQ | entry.seq:#x}"  # slices are paired by it across processes
    common = {"cat": entry.kind, "name": entry.tag or entry.site, "id": identity, "pid": number, "tid": 0}
    args = {"bytes": entry.nbytes, "address": f"{entry.ptr:#x}", "site": entry.site, "seq": entry.seq}
    ends = {"freed at": entry.freed_at or "never", "leaked": entry.leaked}
    end_ns = entry.freed_ns if entry.freed_seq else capture.process.end_ns
    return [
        common | {"ph": "b", "ts": _microseconds(capture, entry.time_ns), "args": args},
        common | {"ph": "e", "ts": _microseconds(capture, max(end_ns, entry.time_ns)), "args": ends},
    ]


def _microseconds(capture: Capture, time_ns: int) -> float:
    return (time_ns - capture.process.start_ns) / 1e3
