# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The launcher of saxpy.cu, loops around it that need no GIL, and a class that owns device memory."""

from cython.parallel cimport prange
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from metrale.errors import MetraleError

from metrale.gpu cimport (
    COPY_D2H, GpuBackend, KernelHandle, Launch, PreparedLaunch, address_of, as_ptr, launch, launch_geometry, push_f32,
    push_ptr, push_u32,
)
from metrale.ops.moe cimport c_moe_v41_finish

cdef enum:
    BLOCK = 256       # threads
    PLACE_OF_A = 2    # among the kernel's parameters


cdef int c_saxpy(GpuBackend gpu, KernelHandle kernel, uint64_t y, uint64_t x, float a, uint32_t n,
                 uint64_t stream) except -1 nogil:
    """y += a * x: f32 [n]."""
    cdef Launch l
    launch_geometry(&l, (<uint64_t>n + BLOCK - 1) // BLOCK, 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, y)
    push_ptr(&l, x)
    push_f32(&l, a)
    push_u32(&l, n)
    return launch(gpu, kernel, &l, stream)


def saxpy(GpuBackend gpu not None, KernelHandle kernel not None, y, x, float a, uint32_t n, stream=None):
    """``y += a * x``: f32 ``[n]``."""
    cdef uint64_t s = gpu.as_stream(stream)
    c_saxpy(gpu, kernel, as_ptr(y, "y", gpu, s), as_ptr(x, "x", gpu, s), a, n, s)


def saxpy_rows(GpuBackend gpu not None, KernelHandle kernel not None, y, x, float a, uint32_t n,
               const uint64_t[::1] streams not None):
    """``y += a * x``: f32 ``[len(streams), n]``. Threads that Python does not know queue each row on a stream."""
    cdef uint64_t y_row = address_of(y, "y", gpu), x_row = address_of(x, "x", gpu), row_bytes = <uint64_t>4 * n
    cdef Py_ssize_t row
    for row in prange(streams.shape[0], nogil=True, schedule="static", chunksize=1):
        c_saxpy(gpu, kernel, y_row + row_bytes * row, x_row + row_bytes * row, a, n, streams[row])


def repeat(PreparedLaunch prepared not None, float a, int times, stream=None):
    """Launch a prepared saxpy that many times, with another ``a``."""
    cdef uint64_t s = prepared.gpu.as_stream(stream)
    cdef int _
    prepared.set_raw(PLACE_OF_A, &a)
    with nogil:
        for _ in range(times):
            prepared.c_launch(s)


cdef class RunningSum:
    """A weighted sum of vectors f32 ``[n]``, on the device, and the owner of that memory: ``free()`` gives it back, as
    does the end of a ``with`` block.
    """

    cdef GpuBackend gpu
    cdef KernelHandle kernel
    cdef KernelHandle finish
    cdef uint64_t stream
    cdef uint64_t total         # f32 [n]; 0 once freed
    cdef uint64_t rounded       # bf16 [n]
    cdef readonly uint32_t n

    def __cinit__(self, GpuBackend gpu not None, KernelHandle kernel not None, uint32_t n, stream=None):
        self.gpu, self.kernel, self.n, self.stream = gpu, kernel, n, gpu.as_stream(stream)
        self.finish = gpu.kernel("moe_v41", "moe_v41_finish")
        try:
            self.total = gpu.c_alloc(<size_t>4 * n, "device", "saxpy_demo total")
            self.rounded = gpu.c_alloc(<size_t>2 * n, "device", "saxpy_demo rounded")
            gpu.c_memset(self.total, 0, <size_t>4 * n, self.stream)
        except BaseException:
            self.free()
            raise

    def add(self, x, const float[::1] weights not None):
        """Add ``weights[i] * x[i]`` for each i: x f32 ``[len(weights), n]``."""
        cdef uint64_t row = as_ptr(x, "x", self.gpu, self.stream), row_bytes = <uint64_t>4 * self.n
        cdef Py_ssize_t i
        self.check()
        with nogil:
            for i in range(weights.shape[0]):
                c_saxpy(self.gpu, self.kernel, self.total, row + row_bytes * i, weights[i], self.n, self.stream)

    def read(self, float[::1] out not None):
        """Wait for the sum, and copy it to ``out``."""
        self.check()
        if out.shape[0] != self.n:
            raise ValueError(f"out: got {out.shape[0]} elements, allowed: {self.n}")
        self.gpu.c_copy(COPY_D2H, <uint64_t>&out[0], self.total, <size_t>4 * self.n, self.stream)
        self.gpu.synchronize(self.stream)

    def read_bf16(self, uint16_t[::1] out not None):
        """Wait for the sum, round it to bf16 with a launcher of metrale, and copy it to ``out``."""
        self.check()
        if out.shape[0] != self.n:
            raise ValueError(f"out: got {out.shape[0]} elements, allowed: {self.n}")
        c_moe_v41_finish(self.gpu, self.finish, self.total, self.rounded, self.n, self.stream)
        self.gpu.c_copy(COPY_D2H, <uint64_t>&out[0], self.rounded, <size_t>2 * self.n, self.stream)
        self.gpu.synchronize(self.stream)

    cdef int check(self) except -1:
        if self.total == 0:
            raise MetraleError("the RunningSum has been freed")
        return 0

    def free(self):
        """Give the memory back. A second call does nothing; so does one after the backend's ``close()``, which has
        freed it, and one in a forked child, whose parent still has it."""
        cdef uint64_t total = self.total, rounded = self.rounded
        self.total = self.rounded = 0      # first, so that a second thread cannot free it too
        if not self.gpu.serving:
            return
        try:
            if total != 0:
                self.gpu.c_free(total, "device")
        finally:
            if rounded != 0:
                self.gpu.c_free(rounded, "device")

    def __enter__(self):
        self.check()
        return self

    def __exit__(self, *exc):
        self.free()
