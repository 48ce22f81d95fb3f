# SPDX-License-Identifier: MIT OR Apache-2.0
"""GpuBackend: memory, copies, streams, events and kernels of one device, with every allocation on the ledger."""

import _thread
import atexit
import os
import sys
import warnings
import weakref

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t

from metrale.errors import ArgumentError, MetraleError, OutOfMemoryError, refuse
from metrale.gpu.pointer import DevicePtr

from metrale.gpu.buffer cimport DeviceBuffer
from metrale.gpu.driver cimport COPY_D2D, COPY_D2H, COPY_H2D, CopyKind, Driver
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.ledger cimport Allocation, Ledger, call_site_text

cdef int fork_count = 0     # forks this process descends from; a backend remembers its own


def _count_fork():
    global fork_count
    fork_count += 1


os.register_at_fork(after_in_child=_count_fork)
_open = weakref.WeakSet()


cdef class GpuBackend(Driver):
    """One device. ``metrale.open()`` makes it; ``CudaBackend`` and ``HostBackend`` are its two kinds.

    Pointers are ``DevicePtr`` (an ``int``); wherever one is taken, so is a ``DeviceBuffer`` and any object with
    ``__cuda_array_interface__`` or ``data_ptr()``. Streams and events are integers; wherever a stream is taken,
    so is an object with ``__cuda_stream__``, and None means the backend's default stream. Sizes are bytes.

    A backend may be used from several threads. ``close()`` frees what is left; so does leaving a ``with`` block.
    """

    def __cinit__(self, *args, **kwargs):
        self.ledger = Ledger()
        self.kernels = {}
        self.loading = _thread.RLock()
        self.closed = True
        self.fork_count = fork_count

    def __init__(self):
        raise TypeError("GpuBackend is abstract: use metrale.open()")

    # memory

    def alloc(self, nbytes, tag=None):
        """Allocate device memory and return its ``DevicePtr``, aligned to 256 bytes, contents undefined.

        ``tag`` names the buffer in reports. Zero bytes are refused; ``OutOfMemoryError`` says who holds what.
        """
        return DevicePtr(self.c_alloc(_size("nbytes", nbytes), "device", tag))

    def alloc_managed(self, nbytes, tag=None):
        """Allocate managed (unified) memory, which host and device both address."""
        return DevicePtr(self.c_alloc(_size("nbytes", nbytes), "managed", tag))

    def alloc_host_pinned(self, nbytes, tag=None):
        """Allocate page-locked host memory; returns its host address as an ``int``."""
        return int(self.c_alloc(_size("nbytes", nbytes), "pinned", tag))

    def free(self, ptr):
        """Free device or managed memory. ``ptr`` is the base of a live allocation of this backend; null: no-op."""
        cdef uint64_t p = as_ptr(ptr)
        if p != 0:
            self.c_free(p, "device")

    def free_host_pinned(self, ptr):
        """Free memory of ``alloc_host_pinned``; null: no-op."""
        cdef uint64_t p = as_ptr(ptr)
        if p != 0:
            self.c_free(p, "pinned")

    def memset(self, ptr, value, nbytes):
        """Set ``nbytes`` bytes to ``value`` (0 to 255); done on return."""
        self.memset_async(ptr, value, nbytes, None)
        self.driver_synchronize(self.stream0)

    def memset_async(self, ptr, value, nbytes, stream):
        """Set ``nbytes`` bytes to ``value`` (0 to 255) in stream order."""
        if not 0 <= value <= 255:
            refuse("value", value, "0 to 255")
        self.c_memset(as_ptr(ptr), value, _size("nbytes", nbytes), self.as_stream(stream))

    # copies: source first

    def copy_h2d(self, src, dst):
        """Copy the host buffer ``src`` (any contiguous buffer) to ``dst``; ordered after the default stream's
        work, done on return."""
        self.copy_h2d_async(src, dst, None)
        self.driver_synchronize(self.stream0)

    def copy_h2d_async(self, src, dst, stream):
        """Copy the host buffer ``src`` to ``dst`` in stream order. Pinned memory must stay alive and unchanged
        until the stream has passed; pageable memory has been read on return."""
        cdef Py_buffer view
        cdef uint64_t s = self.as_stream(stream)
        PyObject_GetBuffer(src, &view, PyBUF_SIMPLE)
        try:
            self.c_copy(COPY_H2D, as_ptr(dst), <uint64_t>view.buf, view.len, s)
        finally:
            PyBuffer_Release(&view)

    def copy_d2h(self, src, dst):
        """Copy from ``src`` to fill the writable host buffer ``dst``; ordered after the default stream's work,
        done on return."""
        self.copy_d2h_on_stream(src, dst, None)

    def copy_d2h_async(self, src, dst, stream):
        """Copy from ``src`` to fill the writable host buffer ``dst`` in stream order; ``dst`` must stay alive."""
        cdef Py_buffer view
        cdef uint64_t s = self.as_stream(stream)
        PyObject_GetBuffer(dst, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            self.c_copy(COPY_D2H, <uint64_t>view.buf, as_ptr(src), view.len, s)
        finally:
            PyBuffer_Release(&view)

    def copy_d2h_on_stream(self, src, dst, stream):
        """``copy_d2h_async``, then wait for the stream."""
        self.copy_d2h_async(src, dst, stream)
        self.driver_synchronize(self.as_stream(stream))

    def copy_d2d(self, src, dst, nbytes):
        """Copy ``nbytes`` bytes from ``src`` to ``dst``; done on return."""
        self.copy_d2d_async(src, dst, nbytes, None)
        self.driver_synchronize(self.stream0)

    def copy_d2d_async(self, src, dst, nbytes, stream):
        """Copy ``nbytes`` bytes from ``src`` to ``dst`` in stream order; overlapping ranges are refused."""
        cdef uint64_t s = as_ptr(src), d = as_ptr(dst)
        cdef size_t n = _size("nbytes", nbytes)
        if s < d + n and d < s + n:
            refuse("dst", f"{d:#x}", f"{n} bytes that do not overlap the source at {s:#x}")
        self.c_copy(COPY_D2D, d, s, n, self.as_stream(stream))

    # owners

    def buffer(self, nbytes, tag=None):
        """Allocate a ``DeviceBuffer``, which owns its memory and frees it."""
        return DeviceBuffer(self, nbytes, tag)

    def upload(self, src, tag=None):
        """A ``DeviceBuffer`` holding a copy of the host buffer ``src``."""
        src = memoryview(src)
        buffer = DeviceBuffer(self, src.nbytes, tag)
        try:
            self.copy_h2d(src, buffer)
        except BaseException:
            buffer.free()
            raise
        return buffer

    # streams and events

    def default_stream(self):
        """The backend's own non-blocking stream."""
        self.check_open()
        return self.stream0

    def create_stream(self):
        """Create a non-blocking stream."""
        self.check_open()
        cdef uint64_t stream = self.driver_create_stream()
        self.ledger.streams[stream] = call_site_text()
        return stream

    def destroy_stream(self, stream):
        """Destroy a stream of ``create_stream``; its queued work still completes."""
        self.check_open()
        if self.ledger.streams.pop(stream, None) is None:
            refuse("stream", stream, "a live stream of create_stream")
        self.driver_destroy_stream(stream)

    def synchronize(self, stream=None):
        """Wait until all work queued on ``stream`` is done."""
        self.driver_synchronize(self.as_stream(stream))

    def create_event(self, timing=False):
        """Create an event; with ``timing`` it can measure elapsed time."""
        self.check_open()
        cdef uint64_t event = self.driver_create_event(timing)
        self.ledger.events[event] = call_site_text()
        return event

    def destroy_event(self, event):
        """Destroy an event of ``create_event``."""
        self.check_open()
        if self.ledger.events.pop(event, None) is None:
            refuse("event", event, "a live event of create_event")
        self.driver_destroy_event(event)

    def record_event(self, event, stream=None):
        """Record ``event`` after the work queued on ``stream``."""
        self.driver_record_event(self._event(event), self.as_stream(stream))

    def stream_wait_event(self, stream, event):
        """Make later work on ``stream`` wait for ``event``."""
        self.driver_stream_wait_event(self.as_stream(stream), self._event(event))

    def event_synchronize(self, event):
        """Wait until ``event`` has happened."""
        self.driver_event_synchronize(self._event(event))

    def event_query(self, event):
        """Whether ``event`` has happened."""
        return bool(self.driver_event_query(self._event(event)))

    def event_elapsed_ms(self, start, end):
        """Milliseconds between two recorded events made with ``timing=True``."""
        return self.driver_event_elapsed_ms(self._event(start), self._event(end))

    # kernels

    def has_module(self, module):
        """Whether the package or ``add_module`` provides kernel module ``module``."""
        raise NotImplementedError

    def add_module(self, path):
        """Add the kernels of a ``.cu`` file, as a module of its stem's name. Returns the names of the modules added."""
        raise NotImplementedError

    def kernel(self, module, name):
        """The kernel ``name`` of ``module``, compiled when first asked for. ``KernelNotFound`` gives near names."""
        self.check_open()
        handle = self.kernels.get((module, name))
        if handle is None:
            with self.loading:      # two threads would load a module twice
                handle = self.kernels.get((module, name))
                if handle is None:
                    handle = self.kernels[module, name] = self.driver_kernel(module, name)
        return handle

    cdef KernelHandle new_kernel(self, str module, str name):
        cdef KernelHandle handle = KernelHandle.__new__(KernelHandle)
        handle.module, handle.name, handle.owner = module, name, <void*>self
        return handle

    # facts

    @property
    def total_memory(self):
        """Bytes of device memory, as the driver says."""
        return self._memory()[1]

    @property
    def free_memory(self):
        """Bytes of device memory that are free, as the driver says."""
        return self._memory()[0]

    def _memory(self):
        cdef size_t free, total
        self.check_open()
        self.driver_memory(&free, &total)
        return free, total

    # audit

    @property
    def live_bytes(self):
        """Bytes of live device and managed allocations."""
        return self.ledger.live_bytes

    @property
    def live_alloc_count(self):
        """Number of live allocations, pinned ones included."""
        return len(self.ledger)

    @property
    def peak_bytes(self):
        """The most that ``live_bytes`` has been."""
        return self.ledger.peak_bytes

    def snapshot(self):
        """The ledger as plain values: totals, and one entry a live allocation, stream and event."""
        return {
            "live_bytes": self.ledger.live_bytes, "pinned_bytes": self.ledger.pinned_bytes,
            "peak_bytes": self.ledger.peak_bytes, "live_allocs": len(self.ledger),
            "allocations": [a.as_dict() for a in self.ledger.live()],
            "streams": dict(self.ledger.streams), "events": dict(self.ledger.events),
        }

    def alloc_report(self):
        """A table of the live allocations, largest first: bytes, tag, call site."""
        rows = [f"{a.nbytes:>14,}  {a.tag or '-':<28}  {a.site}" for a in self.ledger.largest(len(self.ledger))]
        return "\n".join([f"{self.live_bytes:>14,}  bytes live in {len(self.ledger)} allocations, "
                          f"peak {self.peak_bytes:,}", *rows])

    # life

    def close(self):
        """Free everything that is left and let go of the device. Returns the allocations that were left over, and
        warns of them with a ResourceWarning; a second call does nothing and returns ``[]``."""
        if self.closed:
            return []
        if self.fork_count != fork_count:
            self.closed = True      # the parent's device state is not ours to touch
            return []
        left = self._release()
        if left:
            warnings.warn(f"{self!r}: {_left_over(left)}", ResourceWarning, stacklevel=2)
        return left

    def _release(self):
        left = self.ledger.live()
        self.closed = True
        _open.discard(self)
        errors = []
        for release in (self._destroy_streams, self._free_all, self._close_driver):
            try:
                release()
            except MetraleError as error:
                errors.append(error)
        self.kernels.clear()
        if errors:
            raise errors[0]
        return left

    def _destroy_streams(self):
        for stream in (self.stream0, *self.ledger.streams):
            if stream != 0:
                self.driver_destroy_stream(stream)
        for event in self.ledger.events:
            self.driver_destroy_event(event)
        self.ledger.streams.clear()
        self.ledger.events.clear()
        self.stream0 = 0

    def _free_all(self):
        cdef Allocation a
        for a in self.ledger.live():
            self.driver_free(a.ptr, a.kind)
            self.ledger.remove(a)

    def _close_driver(self):
        self.driver_close()

    def _opened(self):
        self.closed = False
        _open.add(self)

    def __enter__(self):
        self.check_open()
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        if not self.closed and not sys.is_finalizing():
            self.close()

    def __reduce__(self):
        raise TypeError("a GpuBackend belongs to its process and cannot be pickled")

    def __repr__(self):
        state = "closed" if self.closed else f"{self.ledger.live_bytes:,} bytes live"
        return f"<{type(self).__name__} {self.name}, {state}>"

    # the C level

    cdef bint usable(self) noexcept:
        """Whether the backend is open, and was opened by this process."""
        return not self.closed and self.fork_count == fork_count

    cdef int check_open(self) except -1:
        if self.closed:
            raise MetraleError(f"{self!r} is closed")
        if self.fork_count != fork_count:
            raise MetraleError(f"{self!r} was opened before fork(): a child process opens its own backend")
        return 0

    cdef uint64_t as_stream(self, object stream) except? 0xFFFFFFFFFFFFFFFF:
        cdef uint64_t s = 0
        if stream is None:
            self.check_open()
            return self.stream0
        if not isinstance(stream, int):
            protocol = getattr(stream, "__cuda_stream__", None)
            if protocol is None:
                refuse("stream", stream, "an int, an object with __cuda_stream__, or None")
            stream = protocol()[1]
        self.check_open()
        try:
            s = stream
        except OverflowError:
            refuse("stream", stream, "a stream handle")
        return s

    def _event(self, event):
        self.check_open()
        if event not in self.ledger.events:
            refuse("event", event, "a live event of create_event")
        return event

    cdef int check_range(self, str what, uint64_t ptr, size_t nbytes) except -1:
        """Refuse ``[ptr, ptr + nbytes)`` unless it lies in one live allocation, here or as the driver knows it."""
        cdef Allocation a = self.ledger.containing(ptr)
        cdef uint64_t base = 0
        cdef size_t size = 0
        if a is not None:
            if nbytes > a.nbytes - (ptr - a.ptr):
                raise ArgumentError(f"{what}: got {nbytes} bytes at offset {ptr - a.ptr}, allowed: inside {a!r}")
            return 0
        if ptr != 0 and self.driver_range(ptr, &base, &size):
            if nbytes > size - (ptr - base):
                raise ArgumentError(f"{what}: got {nbytes} bytes at {ptr:#x}, allowed: inside a foreign allocation "
                                    f"of {size} bytes at {base:#x}")
            return 0
        raise ArgumentError(f"{what}: got {_unknown(self.ledger, ptr)}, allowed: memory of this backend or "
                            "device memory that the driver knows")

    cdef uint64_t c_alloc(self, size_t nbytes, str kind, object tag) except 0:
        """Allocate ``kind`` ("device", "managed" or "pinned") memory and put it on the ledger."""
        self.check_open()
        if nbytes == 0:
            refuse("nbytes", nbytes, "1 or more")
        cdef uint64_t ptr = self.driver_alloc(nbytes, kind)
        if ptr == 0:
            free, total = self._memory()
            raise OutOfMemoryError(kind, nbytes, free, total, self.ledger.largest(5))
        try:
            self.ledger.add(ptr, nbytes, kind, tag)
        except BaseException:
            self.driver_free(ptr, kind)
            raise
        return ptr

    cdef int c_free(self, uint64_t ptr, str kind) except -1:
        """Free the allocation whose base is ``ptr``; ``kind`` is "pinned" or "device" (managed included)."""
        self.check_open()
        cdef Allocation a = self.ledger.at(ptr)
        cdef bint pinned = kind == "pinned", held_pinned = a is not None and a.kind == "pinned"
        if a is None or pinned != held_pinned:
            raise ArgumentError(f"ptr: got {_unknown(self.ledger, ptr)}, allowed: the base of a live {kind} "
                                "allocation of this backend")
        self.ledger.remove(a)      # first, so that a second thread cannot free it too
        try:
            self.driver_free(ptr, a.kind)
        except BaseException:
            self.ledger.restore(a)
            raise
        return 0

    cdef int c_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        """Set bytes in stream order; the range is checked."""
        self.check_open()
        self.check_range("ptr", ptr, nbytes)
        return self.driver_memset(ptr, value, nbytes, stream)

    cdef int c_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes, uint64_t stream) except -1:
        """Copy in stream order; device ranges are checked, host ranges are the caller's word."""
        self.check_open()
        if kind != COPY_D2H:
            self.check_range("dst", dst, nbytes)
        if kind != COPY_H2D:
            self.check_range("src", src, nbytes)
        if nbytes == 0:
            return 0
        return self.driver_copy(kind, dst, src, nbytes, stream)


cdef size_t _size(str name, value) except? 0xFFFFFFFFFFFFFFFF:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        refuse(name, value, "an integer number of bytes, 0 to 2**62")
    return value


cdef str _unknown(Ledger ledger, uint64_t ptr):
    """What the ledger knows of an address that is not (the base of) a live allocation."""
    if ptr == 0:
        return "a null pointer"
    cdef Allocation a = ledger.containing(ptr)
    if a is not None:
        return f"{ptr:#x}, {ptr - a.ptr} bytes into {a!r}"
    a = ledger.last_freed(ptr)
    if a is not None:
        return f"{ptr:#x}, inside {a!r} freed at {a.freed_at}"
    return f"{ptr:#x}, an address the ledger does not know"


def _left_over(left):
    total = sum(a.nbytes for a in left)
    names = ", ".join(f"{a.tag or a.nbytes} ({a.site})" for a in left[:5])
    return f"{len(left)} allocations, {total:,} bytes, were never freed: {names}{', ...' if len(left) > 5 else ''}"


@atexit.register
def _close_all():
    for gpu in list(_open):
        if gpu.closed:
            continue
        left = gpu._release() if (<GpuBackend>gpu).fork_count == fork_count else []
        if left:
            print(f"metrale: {gpu.name}: {_left_over(left)}", file=sys.stderr)
