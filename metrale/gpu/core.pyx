# SPDX-License-Identifier: MIT OR Apache-2.0
"""Core: a driver with a ledger and a life. What ``GpuBackend`` offers to Python stands on it, as may other Cython
code."""

import _thread
import atexit
import os
import sys
import time
import weakref

from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport uint64_t

from metrale.errors import ArgumentError, CaptureError, MetraleError, OutOfMemoryError, refuse

from metrale.gpu.atomic cimport atomic_add, atomic_read, atomic_write
from metrale.gpu.driver cimport CAPTURE_NONE, COPY_D2D, COPY_D2H, COPY_H2D, CopyKind, Driver, Rows
from metrale.gpu.interop cimport as_handle
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.ledger cimport Allocation, Ledger

cdef enum:
    RED_ZONE = 1024             # bytes: a row or two of a small matrix

cdef size_t LONGEST = <size_t>1 << 62
cdef uint64_t backends = 0      # opened so far: a number that is never used again


_open = weakref.WeakSet()
_recorder = None
if os.environ.get("METRALE_AUDIT"):
    from metrale.audit import recorder as _recorder      # now: what it does at exit comes after _close_all


def open_backends():
    """The backends of this process that are open, in no order."""
    cdef Core gpu
    return [gpu for gpu in list(_open) if not gpu.closed and not gpu.forked]


def _mark_forked():
    cdef Core gpu
    for gpu in list(_open):
        gpu.forked, gpu.serving = True, False


os.register_at_fork(after_in_child=_mark_forked)


cdef class Core(Driver):
    """Allocations, copies and streams of one device: checked, on the ledger, safe against close() in another thread."""

    def __cinit__(self, *args, **kwargs):
        global backends
        backends += 1
        self.id = backends
        self.ledger = Ledger()
        self.kernels = {}
        self.loading = _thread.RLock()
        self.closed = True
        self.held = []
        self.spare_events = []

    def __reduce__(self):
        raise TypeError("a GpuBackend belongs to its process and cannot be pickled")

    cdef int release_all(self) except -1:
        errors = []
        self.closing = _thread.get_ident()
        self.serving = False
        self.interrupted = False
        atomic_write(<int*>&self.closed, 1)      # before the look at the calls in flight: they look the other way round
        try:
            self.release_each(errors)
        except BaseException:      # an interrupt: what is left is for the next call
            self.interrupted = True
            self.closing = None
            raise
        self.closing = None
        if errors:
            raise errors[0]
        return 0

    cdef int release_each(self, list errors) except -1:
        """Give back one thing after another, none of them twice, also by a second call; failures are appended."""
        cdef int own = self.handling if self.handler == _thread.get_ident() else 0
        while atomic_read(&self.in_flight) > own:
            time.sleep(POLL_US * 1e-6)
        self.release_graphs(errors)
        try:
            self.let_go(True)
        except MetraleError as error:
            errors.append(error)
        while self.own_streams:
            stream = self.own_streams.pop()
            try:
                self.driver_destroy_stream(stream)
            except MetraleError as error:
                errors.append(error)
        while self.spare_events:
            event = self.spare_events.pop()
            try:
                self.driver_destroy_event(event)
            except MetraleError as error:
                errors.append(error)
        self.release_left(self.ledger.left(), errors)
        self.kernels.clear()
        for handle in list(self.ledger.handles["module"]):
            self.ledger.remove_handle(handle, "module")
        try:
            self.driver_close()
        except MetraleError as error:
            errors.append(error)
        return 0

    cdef int release_left(self, list left, list errors) except -1:
        """Give back streams, events and memory that the program left; failures are appended."""
        cdef Allocation a
        for a in left:
            a.leaked = True
            try:
                if a.kind == "stream":
                    self.ledger.remove_handle(a.ptr, "stream")
                    self.driver_destroy_stream(a.ptr)
                elif a.kind == "event":
                    self.ledger.remove_handle(a.ptr, "event")
                    self.driver_destroy_event(a.ptr)
                else:
                    self.ledger.remove(a)
                    self.driver_free(a.ptr, a.kind)
            except MetraleError as error:
                errors.append(error)
                if self.serving:      # a sweep: it is still there, and close() comes later
                    a.leaked = False
                    self.ledger.restore(a)
        return 0

    cdef int release_graphs(self, list errors) except -1:
        """End captures and destroy graphs; failures are appended."""
        return 0

    cdef int starting(self, bint check, bint redzone) except -1:
        """Called first by a constructor, which may run once."""
        if self.started:
            raise TypeError(f"a {type(self).__name__} is initialised once")
        self.checking = check or redzone
        self.band = RED_ZONE if redzone else 0
        self.started = True
        self.closing = _thread.get_ident()
        return 0

    cdef int opened(self) except -1:
        """Called last by a constructor."""
        self.own_streams = [self.stream0]
        if self.band > 0:
            self.scanning = self.driver_create_stream()
            self.own_streams.append(self.scanning)
        self.closed = False
        self.serving = True
        self.closing = None
        if _recorder is not None:
            try:
                _recorder.opened(self)
            except BaseException:      # the constructor gives back the rest
                self.closed, self.serving = True, False
                raise
        _open.add(self)
        return 0

    cdef bint to_be_closed(self) noexcept nogil:
        """Whether there is something for ``release_all`` to do."""
        return not self.closed or self.interrupted

    cdef int check_open(self) except -1:
        if self.serving:
            return 0
        if self.closed:
            raise MetraleError(f"{self!r} is closed")
        if self.forked:
            raise MetraleError(f"{self!r} was opened before fork(): {self.after_fork}")
        return 0

    cdef int check_still_open(self) except -1:
        """For a driver call that is in flight: whether another thread closed the backend before it was."""
        if self.closed and self.closing != _thread.get_ident():
            raise MetraleError(f"{self!r} is closed")
        return 0

    cdef int check_waitable(self, uint64_t stream, str call) except -1:
        """Refuse a call that waits for ``stream`` while it is being captured: the driver would end the capture."""
        if self.driver_capture_status(stream, NULL, NULL) != CAPTURE_NONE:
            raise CaptureError(f"{call}: the stream {stream:#x} is being captured, and what is captured runs when its "
                               "graph is launched: allowed are calls that do not wait")
        return 0

    cdef int launched(self, uint64_t stream, str what) except -1:
        """After a launch in check mode: wait for it, and say what it did wrong."""
        raise NotImplementedError

    cdef int hold(self, object what, uint64_t stream) except -1:
        """Keep ``what`` until the work that is queued on ``stream`` is done."""
        cdef uint64_t event = 0
        cdef bint recorded = False
        try:
            self.let_go(False)
            event = self.driver_create_event(False)
            self.driver_record_event(event, stream)
            recorded = True
        finally:      # where no event tells when the work is done, close() waits for the stream
            self.held.append((event if recorded else 0, stream, what))
            if event != 0 and not recorded:
                self.driver_destroy_event(event)
        return 0

    cdef int let_go(self, bint wait) except -1:
        """Drop what is held for copies that are done; with ``wait``, wait for all."""
        cdef Py_ssize_t seen = 0
        held, self.held = self.held, []
        kept, busy = [], set()
        try:
            for event, stream, what in held:
                if wait:
                    self.driver_event_synchronize(event) if event else self.driver_synchronize(stream)
                elif not event or stream in busy or not self.driver_event_query(event):
                    busy.add(stream)      # what it has later is not done either
                    kept.append((event, stream, what))
                    seen += 1
                    continue
                seen += 1
                if event:
                    self.driver_destroy_event(event)
        finally:
            self.held = kept + held[seen:] + self.held
        return 0

    cdef uint64_t as_stream(self, object stream) except? 0xFFFFFFFFFFFFFFFF:
        if not self.serving:
            self.check_open()
        if stream is None:
            return self.stream0
        if PyLong_CheckExact(stream):      # what a hot loop passes
            return as_handle(stream, "stream")
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            try:
                _, stream = protocol() if callable(protocol) else protocol     # a property in its first users
            except (TypeError, ValueError):
                pass
        if not hasattr(stream, "__index__"):
            refuse("stream", stream, "an int, an object with __cuda_stream__, or None")
        return as_handle(stream, "stream")

    cdef uint64_t as_event(self, object event, str name) except? 0xFFFFFFFFFFFFFFFF:
        self.check_open()
        cdef uint64_t e = as_handle(event, name)
        if e not in self.ledger.live_events:
            refuse(name, event, "a live event of create_event")
        return e

    cdef int check_range(self, str what, uint64_t ptr, size_t nbytes, uint64_t stream) except -1:
        """Refuse ``[ptr, ptr + nbytes)`` unless it lies in one live allocation, here or as the driver knows it. One
        that is here is used on ``stream``."""
        cdef Allocation a = self.ledger.containing(ptr)
        cdef uint64_t base = 0
        cdef size_t size = 0
        if a is not None:
            if nbytes > a.nbytes - (ptr - a.ptr):
                raise ArgumentError(f"{what}: got {nbytes} bytes at offset {ptr - a.ptr}, allowed: inside {a!r}")
            a.stream = stream
            return 0
        if ptr != 0 and self.driver_range(ptr, &base, &size):
            if nbytes > size - (ptr - base):
                raise ArgumentError(f"{what}: got {nbytes} bytes at {ptr:#x}, allowed: inside a foreign allocation "
                                    f"of {size} bytes at {base:#x}")
            return 0
        raise ArgumentError(f"{what}: got {self.ledger.describe(ptr)}, allowed: memory of this backend or "
                            "device memory that the driver knows")

    cdef Allocation allocate(self, size_t nbytes, str kind, object tag, str owner):
        """Allocate ``kind`` ("device", "managed" or "pinned") memory and put it on the ledger."""
        cdef size_t free = 0, total = 0
        cdef uint64_t ptr
        self.check_open()
        if nbytes == 0:
            refuse("nbytes", nbytes, "1 or more")
        if tag is not None:
            tag = str(tag)                   # may run Python code, which close() would wait for below
            self.check_open()
        atomic_add(&self.in_flight, 1)       # until it is on the ledger: close() waits for it
        try:
            ptr = self.driver_alloc(nbytes + self.band, kind)
            if ptr == 0:
                self.driver_memory(&free, &total)
                raise OutOfMemoryError(kind, nbytes, free, total, self.ledger.largest(5))
            try:
                return self.ledger.add(ptr, nbytes, self.driver_rounded(nbytes + self.band, kind), kind, tag, owner)
            except BaseException:
                self.driver_free(ptr, kind)
                raise
        finally:
            atomic_add(&self.in_flight, -1)

    cdef int release(self, Allocation a) except -1:
        """Free ``a``; nothing if it has been freed."""
        if a.freed_at is not None:
            return 0
        self.ledger.remove(a)      # first, so that a second thread cannot free it too
        try:
            self.driver_free(a.ptr, a.kind)
        except BaseException:
            self.ledger.restore(a)
            raise
        return 0

    cdef uint64_t c_alloc(self, size_t nbytes, str kind, object tag) except 0:
        """``allocate`` for the base address alone."""
        return self.allocate(nbytes, kind, tag, None).ptr

    cdef int c_free(self, uint64_t ptr, str kind) except -1:
        """Free the allocation whose base is ``ptr``; ``kind`` is "pinned" or "device" (managed included)."""
        self.check_open()
        cdef Allocation a = self.ledger.at(ptr)
        cdef bint pinned = kind == "pinned", held_pinned = a is not None and a.kind == "pinned"
        if a is None or pinned != held_pinned:
            raise ArgumentError(f"ptr: got {self.ledger.describe(ptr)}, allowed: the base of a live {kind} "
                                "allocation of this backend")
        if a.owner is not None:
            raise ArgumentError(f"ptr: got {a!r}, allowed: memory without an owner; this belongs to a {a.owner}, "
                                "whose free() frees it")
        return self.release(a)

    cdef int c_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        """Set bytes in stream order; the range is checked."""
        self.check_open()
        self.check_range("ptr", ptr, nbytes, stream)
        if nbytes == 0:
            return 0
        return self.driver_memset(ptr, value, nbytes, stream)

    cdef int c_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes, uint64_t stream) except -1:
        """Copy in stream order. Device ranges are checked, and may not overlap; host ranges are the caller's word."""
        self.check_open()
        if kind != COPY_D2H:
            self.check_range("dst", dst, nbytes, stream)
        if kind != COPY_H2D:
            self.check_range("src", src, nbytes, stream)
        if nbytes == 0:
            return 0
        if kind == COPY_D2D and src < dst + nbytes and dst < src + nbytes:
            raise ArgumentError(f"dst: got {dst:#x}, allowed: {nbytes} bytes that do not overlap the source at "
                                f"{src:#x}")
        return self.driver_copy(kind, dst, src, nbytes, stream)

    cdef int c_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1:
        """Copy rows in stream order; both ranges are checked, and no byte may be of both."""
        cdef size_t src_span, dst_span, shift
        self.check_open()
        if rows.width == 0 or rows.height == 0:
            return 0
        for name, pitch in (("src_pitch", rows.src_pitch), ("dst_pitch", rows.dst_pitch)):
            if pitch < rows.width:
                refuse(name, pitch, f"the width, {rows.width} bytes, or more")
            if pitch > LONGEST // rows.height:
                refuse(name, pitch, f"at most 2**62 bytes in {rows.height} rows")
        src_span = (rows.height - 1) * rows.src_pitch + rows.width
        dst_span = (rows.height - 1) * rows.dst_pitch + rows.width
        self.check_range("src", src, src_span, stream)
        self.check_range("dst", dst, dst_span, stream)
        if src < dst + dst_span and dst < src + src_span:
            # Columns beside each other in one matrix interleave and do not overlap.
            shift = (dst - src if dst > src else src - dst) % rows.src_pitch
            if rows.src_pitch != rows.dst_pitch or shift < rows.width or shift + rows.width > rows.src_pitch:
                raise ArgumentError(f"dst: got {dst:#x}, allowed: {rows.height} rows of {rows.width} bytes that do "
                                    f"not overlap the source at {src:#x}")
        return self.driver_copy_rows(dst, src, rows, stream)

    cdef KernelHandle new_kernel(self, str module, str name):
        cdef KernelHandle handle = KernelHandle.__new__(KernelHandle)
        handle.module, handle.name, handle.owner = module, name, self.id
        return handle


@atexit.register
def _close_all():
    cdef Core gpu
    for gpu in list(_open):
        if not gpu.to_be_closed() or gpu.forked:
            continue
        said = gpu.ledger.left_over()
        try:
            gpu.release_all()
        except MetraleError as error:
            said = f"{said + '; ' if said else ''}closing it: {error}"
        if said:
            try:
                print(f"metrale: {gpu.name}: {said}", file=sys.stderr, flush=True)
            except OSError:      # nobody reads; what could not be written must not change the exit status
                sys.stderr = None
