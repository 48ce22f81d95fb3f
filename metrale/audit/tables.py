# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a capture says: sums by tag, call site and file, the largest, what leaked, what made up the peak."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from metrale.audit.capture import DEVICE, MEMORY, BackendCapture, Capture, Entry, Process

__all__ = [
    "GROUPINGS",
    "Group",
    "biggest",
    "count_words",
    "facts",
    "groups",
    "leaks",
    "peak_set",
    "started",
]

GROUPINGS: dict[str, Callable[[Entry], str]] = {
    "kind": lambda entry: entry.kind,
    "tag": lambda entry: entry.label,
    "site": lambda entry: entry.site,
    "file": lambda entry: entry.file,
}


@dataclass
class Group:
    """Records of one name: how many, bytes in all, the most that lived at once, at the peak of the ledger, leaked."""

    name: str
    count: int = 0
    nbytes: int = 0
    peak: int = 0
    at_peak: int = 0
    leaked: int = 0
    leaked_bytes: int = 0


def groups(backend: BackendCapture, by: str) -> list[Group]:
    """Sums by one of ``GROUPINGS``, the largest first; of memory, but by kind of every record."""
    key = GROUPINGS[by]
    found: dict[str, Group] = {}
    for entry in backend.entries if by == "kind" else backend.memory:
        name = key(entry)
        group = found.get(name)
        if group is None:
            group = found[name] = Group(name)
        group.count += 1
        group.nbytes += entry.nbytes
        if entry.leaked:
            group.leaked += 1
            group.leaked_bytes += entry.nbytes
    for entry in peak_set(backend):
        found[key(entry)].at_peak += entry.nbytes
    live = dict.fromkeys(found, 0)
    for event in backend.timeline:
        name = key(event.entry)
        if event.born:
            live[name] += event.entry.nbytes
            if live[name] > found[name].peak:
                found[name].peak = live[name]
        else:
            live[name] -= event.entry.nbytes
    return sorted(found.values(), key=lambda group: (-group.peak, -group.nbytes, group.name))


def biggest(entries: Iterable[Entry]) -> list[Entry]:
    """The largest first; equals in the order of their birth."""
    return sorted(entries, key=lambda entry: (-entry.nbytes, entry.seq))


def leaks(backend: BackendCapture) -> list[Entry]:
    """What the program never gave back, the largest first."""
    return biggest(entry for entry in backend.entries if entry.leaked)


def peak_set(backend: BackendCapture) -> list[Entry]:
    """The device and managed memory that lived at the peak, the largest first."""
    at_peak = (e for e in backend.entries if e.kind in DEVICE and e.alive_at(backend.peak_seq))
    return biggest(at_peak)


def count_words(entries: Iterable[Entry]) -> str:
    """``"2 allocations, 8,192 bytes, 1 stream"``."""
    allocations, nbytes = 0, 0
    handles: dict[str, int] = {}
    for entry in entries:
        if entry.kind in MEMORY:
            allocations, nbytes = allocations + 1, nbytes + entry.nbytes
        else:
            handles[entry.kind] = handles.get(entry.kind, 0) + 1
    parts = [f"{_number(allocations, 'allocation')}, {nbytes:,} bytes"] if allocations else []
    return ", ".join(parts + [_number(count, kind) for kind, count in sorted(handles.items())])


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def started(process: Process) -> str:
    """When the recording began, in words."""
    return f"{datetime.fromtimestamp(process.start_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def facts(capture: Capture) -> dict[str, Any]:
    """All tables as plain values, for JSON. A record's times are nanoseconds since the start."""
    start = capture.process.start_ns

    def plain(entries: list[Entry]) -> list[dict[str, Any]]:
        return [
            entry._asdict()
            | {"time_ns": entry.time_ns - start, "freed_ns": entry.freed_ns - start if entry.freed_seq else None}
            for entry in entries
        ]

    backends = []
    for backend in capture.backends:
        totals = backend.totals()
        tables: dict[str, Any] = {
            f"by_{name}": [asdict(group) for group in groups(backend, name)] for name in GROUPINGS
        }
        tables |= {"peak_set": plain(peak_set(backend)), "leaks": plain(leaks(backend))}
        backends.append(totals | {"allocations": len(backend.memory)} | tables)
    return {"process": asdict(capture.process), "backends": backends}
