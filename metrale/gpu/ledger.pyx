# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ledger: which line holds which memory."""

import os
import time
from collections import deque

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cython.operator cimport dereference, predecrement
from libc.stdint cimport uint64_t
from libcpp.map cimport map as cpp_map

from metrale import errors

cdef extern from "Python.h":
    ctypedef struct PyFrameObject
    ctypedef struct PyCodeObject
    PyFrameObject* PyEval_GetFrame()                       # borrowed
    PyFrameObject* PyFrame_GetBack(PyFrameObject* frame)   # new or null
    int PyFrame_GetLineNumber(PyFrameObject* frame)
    PyCodeObject* PyFrame_GetCode(PyFrameObject* frame)        # new

# Where the package's Python files lie: in an editable install not where this compiled module does.
cdef str _PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
cdef str _COMMANDS = os.path.join(_PACKAGE, "cli") + os.sep     # a caller like any other
cdef size_t NEAR = 4096      # bytes: an address so little behind an allocation was probably meant to be inside
cdef size_t _KEEP_FREED = 1024


cdef class Allocation:
    """One allocation: address, bytes, kind, tag, the caller's ``file`` and ``line``, sequence number, time."""

    @property
    def site(self):
        """``file:line`` of the first frame outside the package."""
        return f"{self.file}:{self.line}"

    def as_dict(self):
        """The record as plain values, for JSON."""
        return {"ptr": self.ptr, "nbytes": self.nbytes, "kind": self.kind, "tag": self.tag, "file": self.file,
                "line": self.line, "seq": self.seq, "time_ns": self.time_ns}

    def __repr__(self):
        tag = f" {self.tag}" if self.tag else ""
        return f"<Allocation{tag} {self.nbytes} bytes at {self.ptr:#x} from {self.site}>"


cdef class Ledger:
    """Live allocations, streams and events of one backend, and the peak. All methods need the GIL."""

    def __cinit__(self):
        self._live = {}
        self._freed = deque(maxlen=_KEEP_FREED)
        self.live_streams = {}
        self.live_events = {}
        self.live_graphs = {}

    cdef Allocation add(self, uint64_t ptr, size_t nbytes, str kind, str tag, str owner):
        cdef Allocation a = Allocation.__new__(Allocation)
        self.seq += 1
        a.ptr, a.nbytes, a.kind, a.seq, a.owner = ptr, nbytes, kind, self.seq, owner
        a.tag = tag
        a.time_ns = time.time_ns()
        a.file, a.line = call_site()
        self.restore(a)
        return a

    cdef int restore(self, Allocation a) except -1:
        a.freed_at = None
        self._live[a.seq] = a
        self._by_ptr[a.ptr] = <void*>a
        if a.kind == "pinned":
            self.pinned_bytes += a.nbytes
        else:
            self.live_bytes += a.nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return 0

    cdef Allocation at(self, uint64_t ptr):
        cdef cpp_map[uint64_t, void*].iterator it = self._by_ptr.find(ptr)
        if it == self._by_ptr.end():
            return None
        return <Allocation>dereference(it).second

    cdef Allocation containing(self, uint64_t ptr):
        cdef Allocation a = self.before(ptr)
        return a if a is not None and ptr - a.ptr < a.nbytes else None

    cdef Allocation before(self, uint64_t ptr):
        cdef cpp_map[uint64_t, void*].iterator it = self._by_ptr.upper_bound(ptr)
        if it == self._by_ptr.begin():
            return None
        predecrement(it)
        return <Allocation>dereference(it).second

    cdef int remove(self, Allocation a) except -1:
        a.freed_at = call_site_text()
        self._by_ptr.erase(a.ptr)
        del self._live[a.seq]
        self._freed.append(a)
        if a.kind == "pinned":
            self.pinned_bytes -= a.nbytes
        else:
            self.live_bytes -= a.nbytes
        return 0

    cdef str describe(self, uint64_t ptr):
        if ptr == 0:
            return "a null pointer"
        cdef Allocation a = self.containing(ptr)
        if a is not None:
            return f"{ptr:#x}, {ptr - a.ptr} bytes into {a!r}"
        a = self.freed(ptr)
        if a is not None:
            return f"{ptr:#x}, inside {a!r} freed at {a.freed_at}"
        a = self.before(ptr)
        if a is not None and ptr - a.ptr < a.nbytes + NEAR:
            return f"{ptr:#x}, {ptr - a.ptr - a.nbytes} bytes past the end of {a!r}"
        return f"{ptr:#x}, an address the ledger does not know"

    cdef Allocation freed(self, uint64_t ptr):
        cdef Allocation a
        for a in reversed(self._freed):
            if a.ptr <= ptr < a.ptr + a.nbytes:
                return a
        return None

    cdef int reused(self, uint64_t ptr) except -1:
        """Forget what has been freed at ``ptr``, where memory of another library lies now."""
        cdef Allocation a = self.freed(ptr)
        while a is not None:
            self._freed.remove(a)
            a = self.freed(ptr)
        return 0

    cdef str left_over(self):
        parts = []
        if self._live:
            sizes = f"{len(self._live)} allocations, {self.live_bytes + self.pinned_bytes:,} bytes"
            names = [f"{a.tag or a.nbytes} ({a.site})" for a in self.largest(5)]
            parts.append(f"{sizes}: {', '.join(names)}{', ...' if len(self._live) > 5 else ''}")
        for what, handles in (("streams", self.live_streams), ("events", self.live_events),
                              ("graphs", self.live_graphs)):
            if handles:
                parts.append(f"{len(handles)} {what} ({', '.join(sorted(set(handles.values()))[:5])})")
        return f"never freed: {'; '.join(parts)}" if parts else None

    @property
    def streams(self):
        """``{handle: "file:line"}`` of the live streams."""
        return dict(self.live_streams)

    @property
    def events(self):
        """``{handle: "file:line"}`` of the live events."""
        return dict(self.live_events)

    @property
    def graphs(self):
        """``{handle: "file:line"}`` of the live graphs."""
        return dict(self.live_graphs)

    def snapshot(self):
        """Everything as plain values: totals, and one entry a live allocation, stream, event and graph."""
        return {
            "live_bytes": self.live_bytes, "pinned_bytes": self.pinned_bytes, "peak_bytes": self.peak_bytes,
            "live_allocs": len(self._live), "allocations": [a.as_dict() for a in self._live.values()],
            "streams": self.streams, "events": self.events, "graphs": self.graphs,
        }

    def report(self):
        """A table of the live allocations, largest first: bytes, tag, call site."""
        pinned = f", {self.pinned_bytes:,} bytes pinned," if self.pinned_bytes else ""
        rows = [f"{a.nbytes:>14,}  {a.tag or '-':<28}  {a.site}" for a in self.largest(len(self._live))]
        return "\n".join([f"{self.live_bytes:>14,}  bytes live{pinned} in {len(self._live)} allocations, "
                          f"peak {self.peak_bytes:,}", *rows])

    def live(self):
        """The live allocations, oldest first."""
        return list(self._live.values())

    def largest(self, size_t n=5):
        """The ``n`` largest live allocations."""
        return sorted(self._live.values(), key=lambda a: -a.nbytes)[:n]

    def __len__(self):
        return len(self._live)


cdef tuple call_site():
    """``(file, line)`` of the innermost Python frame outside the package; of the outermost if there is none."""
    cdef PyFrameObject* frame = PyEval_GetFrame()
    cdef PyFrameObject* back
    cdef PyObject* code
    cdef str file = "<native>"
    cdef int line = 0
    if frame != NULL:
        Py_INCREF(<object><PyObject*>frame)
    while frame != NULL:
        code = <PyObject*>PyFrame_GetCode(frame)
        file = (<object>code).co_filename
        line = PyFrame_GetLineNumber(frame)
        Py_XDECREF(code)
        back = NULL
        if file.startswith(_PACKAGE) and not file.startswith(_COMMANDS):
            back = PyFrame_GetBack(frame)
        Py_XDECREF(<PyObject*>frame)
        frame = back
    return file, line


cdef str call_site_text():
    file, line = call_site()
    return f"{file}:{line}"
