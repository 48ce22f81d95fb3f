# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of the dense products."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_ptr, push_u32
from metrale.ops.check cimport ceil_div, device_ptr, kernel_in, positive, u32

cdef enum:
    GEMV_ROWS = 16
    GEMV_BLOCK = 256


def dense_gemv(GpuBackend gpu not None, KernelHandle kernel not None, input, weight, output, n, k, stream):
    """``output[i] = bf16(sum over j of input[j] * weight[i, j])`` with ``gemv.dense_gemv_bf16``.

    input bf16 ``[k]``, weight bf16 ``[n, k]`` row-major, output bf16 ``[n]``; device pointers. Sums are f32.
    Refuses null pointers, ``n`` or ``k`` of 0. Argument order: the Rust launcher ``ops::dense_gemv``.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t input_ = as_ptr(input, "input", gpu, s), weight_ = as_ptr(weight, "weight", gpu, s)
    cdef uint64_t output_ = as_ptr(output, "output", gpu, s)
    cdef uint32_t n_ = u32("n", n), k_ = u32("k", k)
    with nogil:
        c_dense_gemv(gpu, kernel, input_, weight_, output_, n_, k_, s)


cdef int c_dense_gemv(GpuBackend gpu, KernelHandle kernel, uint64_t input, uint64_t weight, uint64_t output,
                      uint32_t n, uint32_t k, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"dense_gemv_bf16")
    device_ptr(b"input", input, 2)
    device_ptr(b"weight", weight, 2)
    device_ptr(b"output", output, 2)
    positive(b"n", n)
    positive(b"k", k)
    launch_geometry(&l, ceil_div(n, GEMV_ROWS), 1, 1, GEMV_BLOCK, 1, 1, 0)
    push_ptr(&l, input)
    push_ptr(&l, weight)
    push_ptr(&l, output)
    push_u32(&l, n)
    push_u32(&l, k)
    return launch(gpu, kernel, &l, stream)
