# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ledger: which line holds which memory."""

import os
from collections import deque
from itertools import islice

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cython.operator cimport dereference, predecrement
from libc.stdint cimport uint64_t
from libcpp.map cimport map as cpp_map

from metrale import errors
from metrale.errors import MetraleError, refuse

cdef extern from *:
    """
    #include <chrono>
    static inline long long metrale_unix_ns() {
        return std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }
    """
    long long now_ns "metrale_unix_ns"() noexcept nogil

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
cdef tuple _NOT_MEMORY = ("stream", "event", "graph", "module")


cdef class Allocation:
    """One allocation, stream, event, graph or module, live or freed.

    ``kind`` is "device", "managed" or "pinned" for memory, else "stream", "event", "graph" or "module". ``ptr`` is the
    address or the handle; ``nbytes`` what was asked for (a module's image; 0 for the others), ``rounded`` what the
    driver takes for it. ``file`` and ``line`` are the caller's, ``stream`` that of the last copy or memset on it.
    ``seq`` and ``freed_seq`` count, together, what begins and ends on the ledger; ``time_ns`` and ``freed_ns`` are Unix
    times. ``leaked``: ``close()`` or the end of the process gave it back, and not the program.
    """

    @property
    def site(self):
        """``file:line`` of the first frame outside the package."""
        return f"{self.file}:{self.line}"

    def as_dict(self):
        """The record as plain values, for JSON."""
        return {"ptr": self.ptr, "nbytes": self.nbytes, "rounded": self.rounded, "kind": self.kind, "tag": self.tag,
                "file": self.file, "line": self.line, "stream": self.stream, "seq": self.seq, "time_ns": self.time_ns,
                "freed_at": self.freed_at, "freed_seq": self.freed_seq, "freed_ns": self.freed_ns,
                "leaked": self.leaked}

    def __repr__(self):
        tag = f" {self.tag}" if self.tag else ""
        what = f"{self.kind} {self.ptr:#x}" if self.kind in _NOT_MEMORY else f"{self.nbytes} bytes at {self.ptr:#x}"
        return f"<Allocation{tag} {what} from {self.site}>"


cdef class Ledger:
    """What one backend holds, held and held at its peak: memory, streams, events, graphs, modules.

    What is live is all there; of what has been freed, the last ``history``. All methods need the GIL.
    """

    def __cinit__(self):
        self._live = {}
        self._freed = deque(maxlen=_KEEP_FREED)
        self._peak_freed = []
        self._scopes = []
        self.handles = {kind: {} for kind in _NOT_MEMORY}
        self.live_streams = self.handles["stream"]
        self.live_events = self.handles["event"]
        self.live_graphs = self.handles["graph"]

    cdef Allocation new(self, uint64_t ptr, size_t nbytes, str kind, str tag):
        cdef Allocation a = Allocation.__new__(Allocation)
        self.seq += 1
        a.ptr, a.nbytes, a.rounded, a.kind, a.tag, a.seq = ptr, nbytes, nbytes, kind, tag, self.seq
        a.time_ns = now_ns()
        a.file, a.line = call_site()
        return a

    cdef Allocation add(self, uint64_t ptr, size_t nbytes, size_t rounded, str kind, str tag, str owner):
        cdef Allocation a = self.new(ptr, nbytes, kind, tag)
        a.rounded, a.owner = rounded, owner
        self.enter(a)
        self.counted[ALLOCATIONS] += 1
        self.counted[ALLOCATED_BYTES] += nbytes
        return a

    cdef Allocation add_handle(self, uint64_t handle, str kind, str tag, size_t nbytes):
        cdef Allocation a = self.new(handle, nbytes, kind, tag)
        self.handles[kind][handle] = a
        return a

    cdef int enter(self, Allocation a) except -1:
        cdef Scope scope
        self._live[a.seq] = a
        self._by_ptr[a.ptr] = <void*>a
        if a.kind == "pinned":
            self.pinned_bytes += a.nbytes
            return 0
        self.live_bytes += a.nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_seq = self.live_bytes, self.seq
            self._peak_freed.clear()
        for scope in self._scopes:
            scope.peak_bytes = max(scope.peak_bytes, self.live_bytes)
        return 0

    cdef int remove(self, Allocation a) except -1:
        self.ended(a)
        self._by_ptr.erase(a.ptr)
        del self._live[a.seq]
        self.counted[FREES] += 1
        self.counted[FREED_BYTES] += a.nbytes
        if a.kind == "pinned":
            self.pinned_bytes -= a.nbytes
            return 0
        self.live_bytes -= a.nbytes
        if a.seq <= self.peak_seq:
            self._peak_freed.append(a)
        return 0

    cdef Allocation remove_handle(self, uint64_t handle, str kind):
        cdef Allocation a = self.handles[kind].pop(handle, None)
        if a is not None:
            self.ended(a)
        return a

    cdef int ended(self, Allocation a) except -1:
        self.seq += 1
        a.freed_seq, a.freed_ns, a.freed_at = self.seq, now_ns(), call_site_text()
        if len(self._freed) == self._freed.maxlen:
            self.forgotten += 1
        self._freed.append(a)
        return 0

    cdef int restore(self, Allocation a) except -1:
        a.freed_seq, a.freed_ns, a.freed_at = 0, 0, None
        if a in self._freed:      # unless others pushed it out meanwhile
            self._freed.remove(a)
        if a.kind in _NOT_MEMORY:
            self.handles[a.kind][a.ptr] = a
            return 0
        self.counted[FREES] -= 1
        self.counted[FREED_BYTES] -= a.nbytes
        if a in self._peak_freed:
            self._peak_freed.remove(a)
        return self.enter(a)

    cdef Allocation at(self, uint64_t ptr):
        cdef cpp_map[uint64_t, void*].iterator it = self._by_ptr.find(ptr)
        if it == self._by_ptr.end():
            return None
        return <Allocation>dereference(it).second

    cdef Allocation newest(self, uint64_t handle):
        return max([handles[handle] for handles in self.handles.values() if handle in handles], key=lambda a: a.seq)

    cdef Allocation containing(self, uint64_t ptr):
        cdef Allocation a = self.before(ptr)
        return a if a is not None and ptr - a.ptr < a.nbytes else None

    cdef Allocation before(self, uint64_t ptr):
        cdef cpp_map[uint64_t, void*].iterator it = self._by_ptr.upper_bound(ptr)
        if it == self._by_ptr.begin():
            return None
        predecrement(it)
        return <Allocation>dereference(it).second

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
        for a in islice(reversed(self._freed), _KEEP_FREED):
            if a.ptr <= ptr < a.ptr + a.nbytes and not a.reused and a.kind not in _NOT_MEMORY:
                return a
        return None

    cdef int reused(self, uint64_t ptr) except -1:
        """What has been freed at ``ptr`` says no more of it: memory of another library lies there now."""
        cdef Allocation a = self.freed(ptr)
        while a is not None:
            a.reused = True
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
                sites = sorted({a.site for a in handles.values()})
                parts.append(f"{len(handles)} {what} ({', '.join(sites[:5])})")
        return f"never freed: {'; '.join(parts)}" if parts else None

    @property
    def streams(self):
        """``{handle: "file:line"}`` of the live streams."""
        return {handle: a.site for handle, a in self.live_streams.items()}

    @property
    def events(self):
        """``{handle: "file:line"}`` of the live events."""
        return {handle: a.site for handle, a in self.live_events.items()}

    @property
    def graphs(self):
        """``{handle: "file:line"}`` of the live graphs."""
        return {handle: a.site for handle, a in self.live_graphs.items()}

    @property
    def modules(self):
        """``{name: bytes of the image}`` of the loaded modules."""
        return {a.tag: a.nbytes for a in self.handles["module"].values()}

    @property
    def history(self):
        """How many freed records are remembered (1024); None for all. What is set holds from then on."""
        return self._freed.maxlen

    @history.setter
    def history(self, number):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            refuse("history", number, "0 or more, or None for all")
        if number is not None:
            self.forgotten += max(0, len(self._freed) - number)
        self._freed = deque(self._freed, number)

    def records(self):
        """All that is live and all that is remembered of what was, by ``seq``."""
        others = [a for handles in self.handles.values() for a in handles.values()]
        return sorted([*self._live.values(), *others, *self._freed], key=lambda a: a.seq)

    def peak_set(self):
        """The device and managed memory that was live at the peak, exactly, oldest first: ``peak_bytes`` in all."""
        cdef Allocation a
        held = [a for a in self._live.values() if a.seq <= self.peak_seq and a.kind != "pinned"]
        return sorted([*held, *self._peak_freed], key=lambda a: a.seq)

    def left(self):
        """What is live and has to be given back, by ``seq``: memory, streams, events and graphs."""
        return sorted([*self._live.values(), *self.live_streams.values(), *self.live_events.values(),
                       *self.live_graphs.values()], key=lambda a: a.seq)

    def snapshot(self):
        """Everything as plain values: totals, and one entry a live allocation, stream, event, graph and module."""
        return {
            "live_bytes": self.live_bytes, "pinned_bytes": self.pinned_bytes, "peak_bytes": self.peak_bytes,
            "live_allocs": len(self._live), "allocations": [a.as_dict() for a in self._live.values()],
            "streams": self.streams, "events": self.events, "graphs": self.graphs, "modules": self.modules,
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


cdef class Scope:
    """What happens on a ledger in a ``with`` block, in all threads: ``with gpu.audit("step") as a:``. Scopes nest.

    ``allocated_bytes`` and ``allocations``, ``freed_bytes`` and ``frees`` count memory, pinned memory too;
    ``peak_bytes`` is the most device and managed memory that was live at once. ``leaked`` is what began in the block
    and was live at its end: memory, streams, events, graphs. Inside the block all are of what has happened so far.
    """

    def __cinit__(self, Ledger ledger not None, str name not None):
        self.ledger, self.name = ledger, name

    cdef size_t grown(self, int i) except? 0:
        if self.began == 0 or self._left is not None:
            return self.counted[i]
        return self.ledger.counted[i] - self.counted[i]

    @property
    def allocations(self):
        """Number of allocations made."""
        return self.grown(ALLOCATIONS)

    @property
    def allocated_bytes(self):
        """Bytes allocated."""
        return self.grown(ALLOCATED_BYTES)

    @property
    def frees(self):
        """Number of allocations freed, older ones too."""
        return self.grown(FREES)

    @property
    def freed_bytes(self):
        """Bytes freed, of older allocations too."""
        return self.grown(FREED_BYTES)

    @property
    def leaked(self):
        """What began in the scope and is live, oldest first."""
        if self._left is not None:
            return list(self._left)
        return [a for a in self.ledger.left() if a.seq >= self.began] if self.began else []

    def report(self):
        """A line of totals, and a line for each thing that leaked: bytes, tag, call site."""
        left = self.leaked
        lines = [f"{self.name}: allocated {self.allocated_bytes:,} bytes in {self.allocations}, "
                 f"freed {self.freed_bytes:,} in {self.frees}, peak {self.peak_bytes:,}, leaked {len(left)}"]
        for a in left:
            what = f"{a.kind:>14}" if a.kind in _NOT_MEMORY else f"{a.nbytes:>14,}"
            lines.append(f"{what}  {a.tag or '-':<28}  {a.site}")
        return "\n".join(lines)

    def __enter__(self):
        if self.began:
            raise MetraleError(f"the scope {self.name} has been entered before")
        self.began = self.ledger.seq + 1
        self.peak_bytes = self.ledger.live_bytes
        for i in range(COUNTERS):
            self.counted[i] = self.ledger.counted[i]
        self.ledger._scopes.append(self)
        return self

    def __exit__(self, *exc):
        left = self.leaked
        for i in range(COUNTERS):
            self.counted[i] = self.grown(i)
        self._left = left
        self.ledger._scopes.remove(self)

    def __repr__(self):
        return f"<Scope {self.report().splitlines()[0]}>"


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
