# SPDX-License-Identifier: MIT OR Apache-2.0
"""FailingBackend: a backend whose driver calls fail when a test wants them to."""

import _thread
import time
from collections import Counter

from libc.stdint cimport uint64_t

from metrale.errors import CaptureError, CudaError, refuse
from metrale.gpu import core

from metrale.gpu.atomic cimport atomic_read, atomic_write
from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.core cimport POLL_US
from metrale.gpu.driver cimport CAPTURE_INVALIDATED, CaptureStatus, CopyKind, Launch, Rows
from metrale.gpu.kernel cimport KernelHandle

cdef str OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

RELEASES = frozenset({"free", "destroy_stream", "destroy_event", "destroy_graph", "close"})
CALLS = RELEASES | {
    "add_module", "alloc", "begin_capture", "capture_status", "check_special", "copy", "copy_rows", "create_event",
    "create_stream", "end_capture", "event_elapsed_ms", "event_query", "event_synchronize", "instantiate",
    "is_pageable", "kernel", "launch", "launch_graph", "memory", "memset", "range", "record_event",
    "stream_wait_event", "synchronize", "update_node",
}


cdef class FailingBackend(GpuBackend):
    """The backend ``inner``, with driver calls that fail when ``fail()`` has asked for it.

    It does all that ``inner`` does, on the ledger of ``inner``, goes where a GpuBackend goes, and closes ``inner`` with
    itself: use ``inner`` no more. Refuses one that is closed, or a FailingBackend.

    ``calls`` counts the driver calls by name since the backend was wrapped, those that failed too, and ``failed`` those
    that were made to fail; both are a ``Counter``, and ``clear()`` starts one again. The names are in
    ``metrale.testing.CALLS``: what the methods of a backend come down to, such as "alloc", "create_stream", "copy",
    "launch".
    """

    cdef GpuBackend inner
    cdef list faults            # [names, calls until it fails, whether the next ones do too, error's code, its name]
    cdef readonly object calls
    cdef readonly object failed

    def __init__(self, GpuBackend inner not None):
        if isinstance(inner, FailingBackend):
            refuse("inner", inner, "a backend of metrale.open()")
        inner.check_open()
        self.starting(inner.checking, inner.band > 0)
        self.inner = inner
        self.faults = []
        self.calls, self.failed = Counter(), Counter()
        self.kind, self.name, self.after_fork = inner.kind, inner.name, inner.after_fork
        self.sm_count, self.compute_capability = inner.sm_count, inner.compute_capability
        self.max_grid, self.max_block, self.overlaps = inner.max_grid, inner.max_block, inner.overlaps
        # Of one of the two the other knows too: kernels, and all that has to be given back.
        self.id, self.ledger, self.loading = inner.id, inner.ledger, inner.loading
        self.stream0, self.scanning, self.own_streams = inner.stream0, inner.scanning, inner.own_streams
        self.spare_events, self.captured_events = inner.spare_events, inner.captured_events
        self.begun, self.captures, self.graphs = inner.begun, inner.captures, inner.graphs
        self.held, inner.held = inner.held, []
        self.closed, self.serving, self.closing = False, True, None
        core._open.add(self)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def fail(self, call="any", *, n=1, forever=False, error=OUT_OF_MEMORY):
        """Make the ``n``-th ``call`` from now on fail, with ``forever`` also those after it.

        ``call``: a name of ``metrale.testing.CALLS``; "any" for all but releases; "release" for what gives something
        back (``metrale.testing.RELEASES``). ``n``: 1 or more. ``error``: the driver's name of the error, such as
        "CUDA_ERROR_LAUNCH_FAILED". Several failures can be asked for, and each counts by itself.

        It is a ``CudaError``, and of an allocation without memory an ``OutOfMemoryError``. A call that fails is not
        made, but for waits, "close" and "end_capture", which raises a ``CaptureError``: these are made, and then fail.
        """
        names = {"any": CALLS - RELEASES, "release": RELEASES}.get(call, {call})
        if not names <= CALLS:
            refuse("call", call, f"any, release, {', '.join(sorted(CALLS))}")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            refuse("n", n, "an integer, 1 or more")
        from cuda.bindings.driver import CUresult
        code = getattr(CUresult, str(error), None) if str(error).startswith("CUDA_ERROR_") else None
        if code is None:
            refuse("error", error, "the name of a driver's error, such as CUDA_ERROR_LAUNCH_FAILED")
        self.faults.append([names, n, bool(forever), int(code), error])

    def heal(self):
        """No call fails from now on."""
        self.faults.clear()

    cdef int reach(self, str call) except -1:
        """Count a call, and raise the error that it is to fail with."""
        failure = None
        self.inner.check_still_open()
        self.calls[call] += 1
        for fault in self.faults:
            if call in fault[0]:
                fault[1] -= 1
                if fault[1] == 0 or (fault[1] < 0 and fault[2]):
                    failure = fault
        if failure is not None:
            self.failed[call] += 1
            raise CudaError(failure[3], failure[4], f"{call}, made to fail")
        return 0

    # life

    cdef int release_each(self, list errors) except -1:
        cdef GpuBackend inner = self.inner
        cdef int own = inner.handling if inner.handler == _thread.get_ident() else 0
        if inner.closed and inner.closing is None:      # by itself, and all that is on the ledger with it
            self.held.clear()
            return 0
        # Its calls look at this, and they are what close() waits for.
        inner.closing, inner.serving = self.closing, False
        atomic_write(<int*>&inner.closed, 1)
        while atomic_read(&inner.in_flight) > own:
            time.sleep(POLL_US * 1e-6)
        return GpuBackend.release_each(self, errors)

    cdef int driver_close(self) except -1:
        try:
            self.inner.driver_close()
            return self.reach("close")
        finally:
            self.inner.closing = None

    # memory

    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0:
        try:
            self.reach("alloc")
        except CudaError as error:
            if error.name == OUT_OF_MEMORY:
                return 0
            raise
        return self.inner.driver_alloc(nbytes, kind)

    cdef size_t driver_rounded(self, size_t nbytes, str kind) except? 0:
        return self.inner.driver_rounded(nbytes, kind)      # which asks the driver nothing

    cdef int driver_free(self, uint64_t ptr, str kind) except -1:
        self.reach("free")
        return self.inner.driver_free(ptr, kind)

    cdef int driver_range(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        self.reach("range")
        return self.inner.driver_range(ptr, base, nbytes)

    cdef bint is_foreign(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        self.reach("range")      # which the host answers here
        return self.inner.is_foreign(ptr, base, nbytes)

    cdef int driver_memory(self, size_t* free, size_t* total) except -1:
        self.reach("memory")
        return self.inner.driver_memory(free, total)

    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        self.reach("memset")
        return self.inner.driver_memset(ptr, value, nbytes, stream)

    cdef int driver_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes,
                         uint64_t stream) except -1:
        self.reach("copy")
        return self.inner.driver_copy(kind, dst, src, nbytes, stream)

    cdef int driver_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1:
        self.reach("copy_rows")
        return self.inner.driver_copy_rows(dst, src, rows, stream)

    cdef bint driver_is_pageable(self, uint64_t host) except -1:
        self.reach("is_pageable")
        return self.inner.driver_is_pageable(host)

    # streams and events; a wait that fails has waited, so that nothing is still at work on what is freed next

    cdef uint64_t driver_create_stream(self) except 0:
        self.reach("create_stream")
        return self.inner.driver_create_stream()

    cdef int driver_destroy_stream(self, uint64_t stream) except -1:
        self.reach("destroy_stream")
        return self.inner.driver_destroy_stream(stream)

    cdef int driver_synchronize(self, uint64_t stream) except -1:
        self.inner.driver_synchronize(stream)
        return self.reach("synchronize")

    cdef uint64_t driver_create_event(self, bint timing) except 0:
        self.reach("create_event")
        return self.inner.driver_create_event(timing)

    cdef int driver_destroy_event(self, uint64_t event) except -1:
        self.reach("destroy_event")
        return self.inner.driver_destroy_event(event)

    cdef int driver_record_event(self, uint64_t event, uint64_t stream) except -1:
        self.reach("record_event")
        return self.inner.driver_record_event(event, stream)

    cdef int driver_stream_wait_event(self, uint64_t stream, uint64_t event) except -1:
        self.reach("stream_wait_event")
        return self.inner.driver_stream_wait_event(stream, event)

    cdef int driver_event_query(self, uint64_t event) except -1:
        self.reach("event_query")
        return self.inner.driver_event_query(event)

    cdef int driver_event_synchronize(self, uint64_t event) except -1:
        self.inner.driver_event_synchronize(event)
        return self.reach("event_synchronize")

    cdef double driver_event_elapsed_ms(self, uint64_t start, uint64_t end) except? -1:
        self.reach("event_elapsed_ms")
        return self.inner.driver_event_elapsed_ms(start, end)

    # kernels

    def add_module(self, path):
        self.check_open()
        self.reach("add_module")
        return self.inner.add_module(path)

    def has_module(self, module):
        return self.inner.has_module(module)

    cdef KernelHandle driver_kernel(self, str module, str name):
        self.reach("kernel")
        return self.inner.driver_kernel(module, name)

    cdef int driver_check_special(self, KernelHandle kernel, Launch* l) except -1:
        self.reach("check_special")
        return self.inner.driver_check_special(kernel, l)

    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil:
        with gil:
            self.reach("launch")
        return self.inner.driver_launch(kernel, l, stream)

    # graphs

    cdef int driver_begin_capture(self, uint64_t stream) except -1:
        self.reach("begin_capture")
        return self.inner.driver_begin_capture(stream)

    cdef CaptureStatus driver_capture_status(self, uint64_t stream, uint64_t* id,
                                             uint64_t* node) except? CAPTURE_INVALIDATED:
        self.reach("capture_status")
        return self.inner.driver_capture_status(stream, id, node)

    cdef uint64_t driver_end_capture(self, uint64_t stream) except 0:
        cdef uint64_t graph = self.inner.driver_end_capture(stream)
        try:
            self.reach("end_capture")
        except CudaError as error:
            self.inner.driver_destroy_graph(graph, 0)
            raise CaptureError(f"the capture of the stream {stream:#x} made no graph: {error}") from error
        return graph

    cdef uint64_t driver_instantiate(self, uint64_t graph) except 0:
        self.reach("instantiate")
        return self.inner.driver_instantiate(graph)

    cdef int driver_destroy_graph(self, uint64_t graph, uint64_t executable) except -1:
        self.reach("destroy_graph")
        return self.inner.driver_destroy_graph(graph, executable)

    cdef int driver_launch_graph(self, uint64_t executable, uint64_t stream) except -1:
        self.reach("launch_graph")
        return self.inner.driver_launch_graph(executable, stream)

    cdef int driver_update_node(self, uint64_t executable, uint64_t node, KernelHandle kernel, Launch* l) except -1:
        self.reach("update_node")
        return self.inner.driver_update_node(executable, node, kernel, l)
