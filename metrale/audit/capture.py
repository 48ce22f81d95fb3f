# SPDX-License-Identifier: MIT OR Apache-2.0
"""The capture file: one JSON object, its records in columns, its texts in one table.

Times are nanoseconds since the capture's ``start_ns``; a text is its place in ``strings``; what is not there is -1, a
stream that is not known null.
"""

import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from metrale.errors import FormatError, malformed

__all__ = ["DEVICE", "MEMORY", "BackendCapture", "Capture", "Entry", "Event", "Process"]

FORMAT = "metrale-audit"
VERSION = 1
NONE = -1

DEVICE = ("device", "managed")
"""The kinds of memory that the peak counts."""
MEMORY = (*DEVICE, "pinned")
"""The kinds that hold memory; the others are handles, and modules, which nobody frees."""


class Entry(NamedTuple):
    """A record of the ledger as plain values: an allocation, stream, event, graph or module."""

    ptr: int
    nbytes: int
    rounded: int
    kind: str
    tag: str | None
    file: str
    line: int
    stream: int | None
    seq: int
    time_ns: int
    freed_seq: int
    freed_ns: int
    freed_at: str | None
    leaked: bool

    @classmethod
    def of(cls, record: object) -> "Entry":
        """The ledger's record. At the end of a process what is live has leaked, but for modules."""
        entry = cls._make(_values(record))
        return entry if entry.freed_seq or entry.kind == "module" else entry._replace(leaked=True)

    @property
    def site(self) -> str:
        """``file:line`` of the caller."""
        return f"{self.file}:{self.line}"

    @property
    def label(self) -> str:
        """The tag, or "-"."""
        return self.tag or "-"

    def alive_at(self, seq: int) -> bool:
        """Whether it was there right after the event ``seq`` of its ledger."""
        return self.seq <= seq and (self.freed_seq == 0 or self.freed_seq > seq)


_values = operator.attrgetter(*Entry._fields)
_TEXTS = ("kind", "tag", "file", "freed_at")
_TIMES = ("time_ns", "freed_ns")


class Event(NamedTuple):
    """A birth or death in a ledger, and the bytes that lived right after it."""

    seq: int
    time_ns: int
    entry: Entry
    born: bool
    live: int
    pinned: int


@dataclass(frozen=True)
class Process:
    """The process that recorded; times are Unix nanoseconds, of the first backend and of the end."""

    argv: list[str]
    cwd: str
    pid: int
    parent: int
    python: str
    metrale: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class BackendCapture:
    """The ledger of one backend. ``forgotten`` records are missing: the program bounded the history."""

    name: str
    kind: str
    total_bytes: int
    peak_bytes: int
    peak_seq: int
    forgotten: int
    entries: list[Entry]

    @cached_property
    def memory(self) -> list[Entry]:
        """The allocations among the records."""
        return [entry for entry in self.entries if entry.kind in MEMORY]

    @cached_property
    def timeline(self) -> list[Event]:
        """Every birth and death of memory, in order."""
        changes = [(e.seq, e.time_ns, True, e) for e in self.memory]
        changes += [(e.freed_seq, e.freed_ns, False, e) for e in self.memory if e.freed_seq]
        live = pinned = 0
        events = []
        for seq, time_ns, born, entry in sorted(changes, key=operator.itemgetter(0)):
            nbytes = entry.nbytes if born else -entry.nbytes
            if entry.kind == "pinned":
                pinned += nbytes
            else:
                live += nbytes
            events.append(Event(seq, time_ns, entry, born, live, pinned))
        return events

    def totals(self) -> dict[str, Any]:
        """All but the records."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "entries"}

    @classmethod
    def of(cls, name: str, kind: str, total_bytes: int, ledger: Any) -> "BackendCapture":
        """What ``ledger`` knows, of a backend that may be closed by now."""
        entries = [Entry.of(record) for record in ledger.records()]
        return cls(name, kind, total_bytes, ledger.peak_bytes, ledger.peak_seq, ledger.forgotten, entries)


@dataclass(frozen=True)
class Capture:
    """All backends of one process, in the order in which they were opened."""

    process: Process
    backends: list[BackendCapture]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file; what was there is replaced when all is written. OSError as of any file."""
        strings: dict[str, int] = {}
        backends = [_columns(backend, self.process.start_ns, strings) for backend in self.backends]
        facts = {"format": FORMAT, "version": VERSION, "process": asdict(self.process)}
        facts |= {"strings": list(strings), "backends": backends}
        partial = f"{os.fspath(path)}.{os.getpid()}.part"
        try:
            # A path may hold bytes that are no UTF-8: as escapes they come back as they were.
            Path(partial).write_text(json.dumps(facts, separators=(",", ":")), encoding="ascii")
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Capture":
        """Read the file. FormatError for one that is no capture, cut off, or of a newer version."""
        content = Path(path).read_bytes()
        if not content:
            malformed(
                path, "content", "nothing", "a capture; the process still runs, or ended before it could write it"
            )
        try:
            facts = json.loads(content)
        except (ValueError, RecursionError) as error:
            whole = "a whole capture of metrale audit"
            malformed(path, "content", f"no JSON, or not all of it ({error})", whole)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            malformed(path, "format", repr(facts)[:60], f"a capture, with the format {FORMAT!r}")
        version = facts.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            malformed(path, "version", version, f"1..{VERSION}; a newer metrale wrote this")
        try:
            process = Process(**_fields(facts["process"], Process))
            strings = _list(facts["strings"], str)
            backends = [_backend(each, process.start_ns, strings) for each in _list(facts["backends"], dict)]
            return cls(process, backends)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError(f"{os.fspath(path)}: a damaged capture: {type(error).__name__} {error}") from error


def _columns(backend: BackendCapture, start: int, strings: dict[str, int]) -> dict[str, Any]:
    def place(text: str | None) -> int:
        return NONE if text is None else strings.setdefault(text, len(strings))

    columns: dict[str, list[Any]] = {}
    values: Iterable[Any]
    for name, values in zip(Entry._fields, zip(*backend.entries, strict=True) if backend.entries else (), strict=False):
        if name in _TEXTS:
            columns[name] = list(map(place, values))
        elif name in _TIMES:
            columns[name] = [time - start if time else NONE for time in values]
        else:
            columns[name] = list(map(int, values)) if name == "leaked" else list(values)
    return backend.totals() | {"records": columns or {name: [] for name in Entry._fields}}


def _backend(facts: dict[str, Any], start: int, strings: list[str]) -> BackendCapture:
    def text(place: int) -> str | None:
        if not NONE <= place < len(strings):
            raise ValueError(f"a text at {place} of {len(strings)}")
        return None if place == NONE else strings[place]

    def time(since: int) -> int:
        return 0 if since == NONE else start + since

    readers: dict[str, Callable[[int], Any]] = dict.fromkeys(_TEXTS, text) | dict.fromkeys(_TIMES, time)
    readers["leaked"] = bool
    columns = []
    for name in Entry._fields:
        column = facts["records"][name]
        if name != "stream":
            _list(column, int)
        columns.append(map(readers[name], column) if name in readers else column)
    entries = list(map(Entry._make, zip(*columns, strict=True)))
    if any(not (isinstance(e.kind, str) and isinstance(e.file, str)) for e in entries):
        raise ValueError("a record without its kind or file")
    known = _fields(facts, BackendCapture, "entries")
    return BackendCapture(**known, entries=entries)


def _fields(facts: Mapping[str, Any], owner: type, *without: str) -> dict[str, Any]:
    """The fields of a dataclass, each of its type."""
    found = {}
    for name, kind in owner.__annotations__.items():
        if name not in without:
            expected = list if kind == list[str] else kind
            if type(facts[name]) is not expected:
                raise TypeError(f"{name}: {facts[name]!r}"[:100])
            found[name] = facts[name]
    return found


def _list(values: Any, kind: type) -> list[Any]:
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise TypeError(f"not a list of {kind.__name__}")
    return values
