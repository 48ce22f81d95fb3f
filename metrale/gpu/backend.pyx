# SPDX-License-Identifier: MIT OR Apache-2.0
"""GpuBackend: memory, copies, streams, events and kernels of one device, with every allocation on the ledger."""

import warnings

from libc.stdint cimport uint64_t

from metrale.errors import CudaError, MetraleError, refuse
from metrale.gpu.pointer import DevicePtr

from metrale.gpu.buffer cimport DeviceBuffer, PinnedBuffer
from metrale.gpu.core cimport is_finalizing
from metrale.gpu.driver cimport COPY_D2D, COPY_D2H, COPY_H2D, Rows
from metrale.gpu.checks cimport Checks
from metrale.gpu.interop cimport HostView, address_of, as_integer, as_ptr, as_size, host_view
from metrale.gpu.ledger cimport Allocation, Scope


cdef class GpuBackend(Checks):
    """One device. ``metrale.open()`` makes it; ``CudaBackend`` and ``HostBackend`` are its two kinds.

    Pointers are ``DevicePtr`` (an ``int``); wherever one is taken, so is a ``DeviceBuffer`` and any array of this
    device with DLPack, ``__cuda_array_interface__`` or ``data_ptr()``, in stream order with its producer
    (docs/interop.md). Streams and events are integers; wherever a stream is taken, so is an object with
    ``__cuda_stream__``, and None means the backend's default stream. Sizes are bytes.

    A backend may be used from several threads. ``close()`` frees what is left; so does leaving a ``with`` block.
    """

    def __init__(self):
        raise TypeError("GpuBackend is abstract: use metrale.open()")

    # memory

    def alloc(self, nbytes, tag=None):
        """Allocate device memory and return its ``DevicePtr``, aligned to 256 bytes, contents undefined.

        ``tag`` names the buffer in reports. Zero bytes are refused; ``OutOfMemoryError`` says who holds what.
        """
        return DevicePtr(self.c_alloc(as_size(nbytes, "nbytes"), "device", tag))

    def alloc_managed(self, nbytes, tag=None):
        """Allocate managed (unified) memory, which host and device both address."""
        return DevicePtr(self.c_alloc(as_size(nbytes, "nbytes"), "managed", tag))

    def alloc_host_pinned(self, nbytes, tag=None):
        """Allocate page-locked host memory; returns its host address as an ``int``."""
        return int(self.c_alloc(as_size(nbytes, "nbytes"), "pinned", tag))

    def free(self, ptr):
        """Free device or managed memory. ``ptr`` is the base of a live allocation of this backend; null: no-op."""
        cdef uint64_t p = address_of(ptr, "ptr", self)
        if p != 0:
            self.c_free(p, "device")

    def free_host_pinned(self, ptr):
        """Free memory of ``alloc_host_pinned``; null: no-op."""
        cdef uint64_t p = address_of(ptr, "ptr", self)
        if p != 0:
            self.c_free(p, "pinned")

    def memset(self, ptr, value, nbytes):
        """Set ``nbytes`` bytes to ``value`` (0 to 255); done on return."""
        self.waiting_call("memset")
        self.memset_async(ptr, value, nbytes, None)
        self.driver_synchronize(self.stream0)

    def memset_async(self, ptr, value, nbytes, stream):
        """Set ``nbytes`` bytes to ``value`` (0 to 255) in stream order."""
        cdef uint64_t s = self.as_stream(stream)
        cdef int byte = as_integer(value, "value", 255, "0 to 255")
        self.c_memset(as_ptr(ptr, "ptr", self, s), byte, as_size(nbytes, "nbytes"), s)

    # copies: source first

    def copy_h2d(self, src, dst):
        """Copy the host buffer ``src`` (any contiguous buffer) to ``dst``; ordered after the default stream's
        work, done on return."""
        self.waiting_call("copy_h2d")
        self.copy_h2d_async(src, dst, None)
        self.wait_for(self.stream0)

    def copy_h2d_async(self, src, dst, stream):
        """Copy the host buffer ``src`` to ``dst`` in stream order.

        Pageable memory has been read on return. Page-locked memory is read later, and kept alive until then; it must
        not change. In a capture of ``begin_capture`` both are read whenever the graph runs, and kept alive as long as
        it.
        """
        cdef uint64_t s = self.as_stream(stream)
        cdef HostView host = host_view(src, "src", False)
        self.c_copy(COPY_H2D, as_ptr(dst, "dst", self, s), host.address(), host.view.len, s)
        self.hold_host(host, host.address(), s)

    def copy_d2h(self, src, dst):
        """Copy from ``src`` to fill the writable host buffer ``dst``; ordered after the default stream's work,
        done on return."""
        self.waiting_call("copy_d2h")
        self.copy_d2h_on_stream(src, dst, None)

    def copy_d2h_async(self, src, dst, stream):
        """Copy from ``src`` to fill the writable host buffer ``dst`` in stream order; ``dst`` is kept alive until it
        is filled, or as long as the graph that captured the copy."""
        cdef uint64_t s = self.as_stream(stream)
        cdef HostView host = host_view(dst, "dst", True)
        self.c_copy(COPY_D2H, host.address(), as_ptr(src, "src", self, s), host.view.len, s)
        self.hold_host(host, host.address(), s)

    def copy_d2h_on_stream(self, src, dst, stream):
        """``copy_d2h_async``, then wait for the stream."""
        cdef uint64_t s = self.as_stream(stream)
        self.check_waitable(s, "copy_d2h_on_stream")
        self.copy_d2h_async(src, dst, s)
        self.wait_for(s)

    def copy_d2d(self, src, dst, nbytes):
        """Copy ``nbytes`` bytes from ``src`` to ``dst``; done on return."""
        self.waiting_call("copy_d2d")
        self.copy_d2d_async(src, dst, nbytes, None)
        self.driver_synchronize(self.stream0)

    def copy_d2d_async(self, src, dst, nbytes, stream):
        """Copy ``nbytes`` bytes from ``src`` to ``dst`` in stream order; overlapping ranges are refused."""
        cdef uint64_t s = self.as_stream(stream)
        self.c_copy(COPY_D2D, as_ptr(dst, "dst", self, s), as_ptr(src, "src", self, s), as_size(nbytes, "nbytes"), s)

    def copy_d2d_2d_async(self, src, src_pitch, dst, dst_pitch, width, height, stream):
        """Copy ``height`` rows of ``width`` bytes in stream order; a row begins ``src_pitch`` (``dst_pitch``) bytes
        after the one before it. Refuses a pitch below the width, and rows that overlap: where the two ranges meet, only
        rows of one pitch are known not to."""
        cdef Rows rows
        cdef uint64_t s = self.as_stream(stream)
        rows.width, rows.height = as_size(width, "width"), as_size(height, "height")
        rows.src_pitch, rows.dst_pitch = as_size(src_pitch, "src_pitch"), as_size(dst_pitch, "dst_pitch")
        self.c_copy_rows(as_ptr(dst, "dst", self, s), as_ptr(src, "src", self, s), &rows, s)

    cdef int waiting_call(self, str call) except -1:
        """Before a call that waits for the default stream."""
        self.check_open()
        return self.check_waitable(self.stream0, call)

    cdef int wait_for(self, uint64_t stream) except -1:
        """Wait for a stream, and let go of what was held for copies that are done."""
        cdef list unmarked = [entry for entry in self.held if not entry[0] and entry[1] == stream]
        self.driver_synchronize(stream)
        if unmarked:      # no event tells of these
            self.held = [entry for entry in self.held if not any([entry is done for done in unmarked])]
        return self.let_go(False)

    # owners

    def buffer(self, nbytes, tag=None):
        """Allocate a ``DeviceBuffer``, which owns its memory and frees it."""
        return DeviceBuffer(self, nbytes, tag)

    def pinned_buffer(self, nbytes, tag=None):
        """Allocate a ``PinnedBuffer``: page-locked host memory that is a buffer to Python, for ``_async`` copies."""
        return PinnedBuffer(self, nbytes, tag)

    def upload(self, src, tag=None):
        """A ``DeviceBuffer`` holding a copy of the host buffer ``src``."""
        self.waiting_call("upload")
        cdef HostView host = host_view(src, "src", False)
        cdef DeviceBuffer buffer = DeviceBuffer(self, host.view.len, tag)
        self.c_copy(COPY_H2D, buffer.address(), host.address(), host.view.len, self.stream0)
        self.hold_host(host, host.address(), self.stream0)
        self.wait_for(self.stream0)
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
        self.ledger.add_handle(stream, "stream", None, 0)
        return stream

    def destroy_stream(self, stream):
        """Destroy a stream of ``create_stream``; its queued work still completes."""
        cdef uint64_t s = self.as_stream(stream)
        cdef Allocation a = self.ledger.remove_handle(s, "stream")     # first: a second thread cannot destroy it too
        if a is None:
            refuse("stream", stream, "a live stream of create_stream")
        try:
            try:
                self.check_waitable(s, "destroy_stream")
            except CudaError:      # a device that has nothing but errors to give is not asked
                pass
            self.driver_destroy_stream(s)
        except BaseException:
            self.ledger.restore(a)
            raise

    def synchronize(self, stream=None):
        """Wait until all work queued on ``stream`` is done. An interrupt (Ctrl-C) ends the wait, and not the work."""
        cdef uint64_t s = self.as_stream(stream)
        self.check_waitable(s, "synchronize")
        self.wait_for(s)

    def create_event(self, timing=False):
        """Create an event; with ``timing`` it can measure elapsed time."""
        self.check_open()
        cdef uint64_t event = self.driver_create_event(timing)
        self.ledger.add_handle(event, "event", None, 0)
        return event

    def destroy_event(self, event):
        """Destroy an event of ``create_event``."""
        cdef uint64_t e = self.as_event(event, "event")
        cdef Allocation a = self.ledger.remove_handle(e, "event")
        try:
            self.driver_destroy_event(e)
        except BaseException:
            self.ledger.restore(a)
            raise
        self.captured_events.pop(e, None)

    def record_event(self, event, stream=None):
        """Record ``event`` after the work queued on ``stream``."""
        cdef uint64_t e = self.as_event(event, "event"), s = self.as_stream(stream)
        if self.captures > 0 or self.captured_events:
            self.record_noted(e, s)
        else:
            self.driver_record_event(e, s)

    def stream_wait_event(self, stream, event):
        """Make later work on ``stream`` wait for ``event``."""
        cdef uint64_t s = self.as_stream(stream), e = self.as_event(event, "event")
        if self.captures > 0 or self.captured_events:
            self.check_order(e, s)
        self.driver_stream_wait_event(s, e)

    def event_synchronize(self, event):
        """Wait until ``event`` has happened."""
        cdef uint64_t e = self.as_event(event, "event")
        self.check_event(e, "event_synchronize")
        self.driver_event_synchronize(e)

    def event_query(self, event):
        """Whether ``event`` has happened."""
        cdef uint64_t e = self.as_event(event, "event")
        self.check_event(e, "event_query")
        return bool(self.driver_event_query(e))

    def event_elapsed_ms(self, start, end):
        """Milliseconds between two recorded events made with ``timing=True``."""
        cdef uint64_t first = self.as_event(start, "start"), last = self.as_event(end, "end")
        self.check_event(first, "event_elapsed_ms")
        self.check_event(last, "event_elapsed_ms")
        return self.driver_event_elapsed_ms(first, last)

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
        for what, value in (("module", module), ("name", name)):
            if not isinstance(value, str):
                refuse(what, value, "a str")
        handle = self.kernels.get((module, name))
        if handle is None:
            with self.loading:      # two threads would load a module twice
                handle = self.kernels.get((module, name))
                if handle is None:
                    handle = self.kernels[module, name] = self.driver_kernel(module, name)
        return handle

    # facts

    @property
    def total_memory(self):
        """Bytes of device memory, as the driver says."""
        cdef size_t free = 0, total = 0
        self.check_open()
        self.driver_memory(&free, &total)
        return total

    @property
    def free_memory(self):
        """Bytes of device memory that are free, as the driver says."""
        cdef size_t free = 0, total = 0
        self.check_open()
        self.driver_memory(&free, &total)
        return free

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
        return self.ledger.snapshot()

    def alloc_report(self):
        """A table of the live allocations, largest first: bytes, tag, call site."""
        return self.ledger.report()

    def audit(self, name="audit"):
        """A ``Scope``: ``with gpu.audit("step") as a:`` tells what was allocated, freed and leaked inside, and the
        peak."""
        self.check_open()
        return Scope(self.ledger, str(name))

    def sweep_unreleased(self):
        """Wait for the device's work, then free what is live and has no owner: memory of ``alloc`` and its kin,
        streams, events, graphs. Returns what that was, oldest first. Buffers and model parts are untouched: they
        give back their own. Refused while a stream is captured. If the driver fails, the first failure is raised once
        all has been tried.
        """
        cdef Allocation a
        cdef list left, errors = []
        self.check_open()
        left = [a for a in self.ledger.left() if a.owner is None]
        for stream in [self.stream0, *self.ledger.live_streams]:
            self.check_waitable(stream, "sweep_unreleased")
            self.driver_synchronize(stream)
        for a in left:
            if a.kind == "graph":
                try:
                    self.destroy_graph(a.ptr)
                    a.leaked = True
                except MetraleError as error:
                    errors.append(error)
        self.release_left([a for a in left if a.kind != "graph"], errors)
        if errors:
            raise errors[0]
        return left

    # life

    def close(self):
        """Wait for calls in other threads, free everything that is left and let go of the device.

        Returns the allocations that were left over, and warns of them, and of streams and events, with a
        ResourceWarning. A second call does nothing and returns ``[]``, as does one in a forked child: the device's
        state is its parent's. After an interrupt (Ctrl-C) the next call goes on. If the driver fails, the first failure
        is raised once all has been tried.
        """
        if not self.to_be_closed():
            return []
        if self.forked:
            self.closed = True
            return []
        left, said = self.ledger.live(), self.ledger.left_over()
        self.release_all()
        if said is not None:
            warnings.warn(f"{self!r}: {said}", ResourceWarning, stacklevel=1)
        return left

    @property
    def usable(self):
        """Whether the backend is open, and was opened by this process and not by one that it was forked from."""
        return self.serving

    def __enter__(self):
        self.check_open()
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        if self.to_be_closed() and not is_finalizing():
            self.close()

    def __repr__(self):
        state = "closed" if self.closed else f"{self.ledger.live_bytes:,} bytes live"
        return f"<{type(self).__name__} {self.name}, {state}>"
