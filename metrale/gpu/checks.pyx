# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check mode: each launch is looked at before, and waited for. Red zones: what it wrote behind a buffer is found."""

import _thread
import logging

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from metrale.errors import CudaError, LaunchError, MetraleError
from metrale.gpu import sources

from metrale.gpu.core cimport Core
from metrale.gpu.driver cimport CAPTURE_NONE, COPY_D2H, Launch
from metrale.gpu.graphs cimport CapturedWork, Graphs
from metrale.gpu.kernel cimport KIND_PTR, KernelHandle
from metrale.gpu.ledger cimport Allocation
from metrale.gpu.recording cimport LaunchStep, launch_step

cdef enum:
    PATTERN = 0xA7         # of a red zone: no letter, no small number, no NaN when repeated

_log = logging.getLogger("metrale")


cdef class Checks(Graphs):
    """The part of ``GpuBackend`` that ``open(check=True)`` and ``open(redzone=True)`` switch on."""

    def __cinit__(self, *args, **kwargs):
        self.guarding = _thread.RLock()
        self.reported = set()

    def scan_redzones(self):
        """Look behind every live allocation: ``[(allocation, first, count), ...]`` for each that was written past, by
        ``count`` bytes, the first of which lies ``first`` bytes behind its end. Each is told once.

        Work that is still queued may write later: synchronise first. ``MetraleError`` without red zones.
        """
        self.check_open()
        if self.band == 0:
            raise MetraleError("scan_redzones: the backend was opened without red zones: METRALE_REDZONE=1, or "
                               "open(redzone=True)")
        return self.overruns(self.ledger.live())

    cdef int checked_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1:
        """A launch in check mode."""
        cdef CapturedWork work = self.work_on(stream, NULL)
        self.check_pointers(kernel, l)
        self.driver_launch(kernel, l, stream)
        if work is not None:
            work.launches.append(launch_step(kernel, l))
        return self.launched(stream, f"{kernel.module}.{kernel.name} with grid {tuple(l.grid)}, block "
                                     f"{tuple(l.block)}, {l.shared_bytes} bytes of shared memory")

    cdef int launched(self, uint64_t stream, str what) except -1:
        if self.driver_capture_status(stream, NULL, NULL) != CAPTURE_NONE:
            return 0      # it runs with the graph
        try:
            self.driver_synchronize(stream)
        except CudaError as error:
            raise CudaError(error.code, error.name, f"running {what}") from error
        if self.band > 0 and self.captures == 0:
            found = self.overruns(self.ledger.live())
            if found:
                raise LaunchError(f"{what}: {overrun_text(found)}")
        return 0

    cdef int check_graph(self, CapturedWork work) except -1:
        cdef LaunchStep step
        for step in work.launches:
            self.check_pointers(step.kernel, &step.launch)
        return 0

    cdef int check_pointers(self, KernelHandle kernel, Launch* l) except -1:
        cdef uint64_t ptr
        cdef uint32_t i
        for i in range(kernel.n_params):
            if kernel.codes[i] >> 16 == KIND_PTR:
                memcpy(&ptr, l.args[i], sizeof(ptr))
                self.check_pointer(kernel, i, ptr)
        return 0

    cdef int check_pointer(self, KernelHandle kernel, int place, uint64_t ptr) except -1:
        """Refuse a pointer to no memory. One that is foreign, and known to the driver, is logged."""
        cdef uint64_t base = 0
        cdef size_t nbytes = 0
        name, kind = kernel.params[place]
        where = f"{kernel.module}.{kernel.name}: argument {place + 1} ({name})"
        if ptr == 0:
            if kind == "ptr?" or kernel.module not in sources.signatures():
                return 0
            raise LaunchError(f"{where}: got a null pointer, takes memory")
        if self.ledger.containing(ptr) is not None:
            return 0
        if not self.is_foreign(ptr, &base, &nbytes):
            raise LaunchError(f"{where}: got {self.ledger.describe(ptr)}, takes memory of this backend, or of another "
                              "library")
        seen = (kernel.module, kernel.name, name, base)
        if seen not in self.reported:
            self.reported.add(seen)
            _log.info("%s: %#x is foreign, in an allocation of %d bytes at %#x", where, ptr, nbytes, base)
        return 0

    cdef bint is_foreign(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        """Whether memory that is not on the ledger is another library's."""
        return self.driver_range(ptr, base, nbytes) and self.ledger.at(base[0]) is None

    # red zones

    cdef Allocation allocate(self, size_t nbytes, str kind, object tag, str owner):
        cdef Allocation a
        if self.band == 0:
            return Core.allocate(self, nbytes, kind, tag, owner)
        self.check_open()      # before the lock, which a forked child may find taken
        with self.guarding:
            a = Core.allocate(self, nbytes, kind, tag, owner)
            try:
                self.paint(a)
            except BaseException:
                Core.release(self, a)
                raise
        return a

    cdef int release(self, Allocation a) except -1:
        if self.band == 0:
            return Core.release(self, a)
        with self.guarding:
            try:
                found = self.overruns([a]) if self.captures == 0 else None
            finally:      # also where the band cannot be read
                Core.release(self, a)
        if found:
            raise MetraleError(f"freed, but {overrun_text(found)}")
        return 0

    cdef int paint(self, Allocation a) except -1:
        self.driver_memset(a.ptr + a.nbytes, PATTERN, self.band, self.scanning)
        return self.driver_synchronize(self.scanning)

    cdef list overruns(self, list allocations):
        """``scan_redzones`` of some allocations; what a finalizer or close() frees meanwhile is passed over."""
        cdef Allocation a
        cdef bytearray bands = bytearray(len(allocations) * self.band)
        cdef unsigned char* band = bands
        found = []
        intact = bytes([PATTERN]) * self.band
        with self.guarding:
            for a in allocations:
                if a.freed_at is None:
                    self.driver_copy(COPY_D2H, <uint64_t>band, a.ptr + a.nbytes, self.band, self.scanning)
                band += self.band
            self.driver_synchronize(self.scanning)
            for i, a in enumerate(allocations):
                seen = bands[i * self.band:(i + 1) * self.band]
                if a.freed_at is None and seen != intact:
                    changed = [at for at, byte in enumerate(seen) if byte != PATTERN]
                    found.append((a, changed[0], len(changed)))
                    self.paint(a)
        return found


cdef str overrun_text(list found):
    return "; ".join([f"{count} bytes were written past the end of {a!r}, from {first} bytes behind it on"
                      for a, first, count in found])
