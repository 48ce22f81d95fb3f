# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: language_level=3
# What a launcher of another package does, in a loop: geometry, arguments, launch. Compiled by native.py.
from libc.stdint cimport uint64_t

from metrale.gpu cimport (
    GpuBackend, KernelHandle, Launch, launch, launch_geometry, push_f32, push_ptr, push_u32,
)


def loop(GpuBackend gpu not None, KernelHandle kernel not None, int arguments, uint64_t p, uint64_t stream, int n):
    """Launch a no-op kernel of 0, 5 or 17 arguments ``n`` times with the GIL."""
    cdef int _
    for _ in range(n):
        launch_noop(gpu, kernel, arguments, p, stream)


def loop_nogil(
    GpuBackend gpu not None, KernelHandle kernel not None, int arguments, uint64_t p, uint64_t stream, int n
):
    """``loop`` without the GIL."""
    cdef int _
    with nogil:
        for _ in range(n):
            launch_noop(gpu, kernel, arguments, p, stream)


cdef inline int launch_noop(
    GpuBackend gpu, KernelHandle kernel, int arguments, uint64_t p, uint64_t stream
) except -1 nogil:
    if arguments == 0:
        return launch0(gpu, kernel, stream)
    return launch5(gpu, kernel, p, stream) if arguments == 5 else launch17(gpu, kernel, p, stream)


cdef int launch0(GpuBackend gpu, KernelHandle kernel, uint64_t stream) except -1 nogil:
    cdef Launch l
    launch_geometry(&l, 1, 1, 1, 32, 1, 1, 0)
    return launch(gpu, kernel, &l, stream)


cdef int launch5(GpuBackend gpu, KernelHandle kernel, uint64_t p, uint64_t stream) except -1 nogil:
    cdef Launch l
    launch_geometry(&l, 1, 1, 1, 32, 1, 1, 0)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_u32(&l, 3)
    push_u32(&l, 3)
    push_f32(&l, 0.5)
    return launch(gpu, kernel, &l, stream)


cdef int launch17(GpuBackend gpu, KernelHandle kernel, uint64_t p, uint64_t stream) except -1 nogil:
    cdef Launch l
    launch_geometry(&l, 1, 1, 1, 32, 1, 1, 0)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_ptr(&l, p)
    push_u32(&l, 3)
    push_u32(&l, 3)
    push_u32(&l, 3)
    push_u32(&l, 3)
    push_u32(&l, 3)
    push_u32(&l, 3)
    push_f32(&l, 0.5)
    return launch(gpu, kernel, &l, stream)
