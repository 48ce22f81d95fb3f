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
    GEMV_BLOCKS_A_SM = 2
    GEMV_SHARED = 3 * 32768               # bytes: stages of half a span of 16 rows for each of 8 warps
    GEMM_TILE = 128
    GEMM_SHARED = 3 * 2 * 128 * 64 * 2    # bytes: stages of a tile of each operand, 64 k wide
    ROUTER_ROWS = 8                       # of input that share a pass over the weight
    ROUTER_BLOCK = 128                    # 4 warps, an output each
    BLOCK = 256
    MAX_GRID_Y = 65535
    IN_ROUTER_ORDER = 2                   # of the kernels of dense_gemm


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
    launch_geometry(&l, min(ceil_div(n, GEMV_ROWS), <uint32_t>(GEMV_BLOCKS_A_SM * gpu.sm_count)), 1, 1, BLOCK, 1, 1,
                    GEMV_SHARED)
    push_ptr(&l, input)
    push_ptr(&l, weight)
    push_ptr(&l, output)
    push_u32(&l, n)
    push_u32(&l, k)
    return launch(gpu, kernel, &l, stream)


def dense_gemm(GpuBackend gpu not None, KernelHandle kernel not None, input, weight, output, m, n, k, stream):
    """``output[i, j] = sum over l of input[i, l] * weight[j, l]`` with a kernel of module ``gemm``.

    input bf16 ``[m, k]``, weight bf16 ``[n, k]``, row-major; output ``[m, n]``: bf16 with ``dense_gemm_bf16``, f32 with
    ``dense_gemm_bf16_tc_f32out``, both on the tensor cores, and with ``dense_gemm_bf16_f32out``, which has the bits of
    ``moe_v41_router_gemv_f32out``. A row's bits do not depend on m. Refuses null pointers, sizes of 0. Argument order:
    the Rust launcher ``ops::dense_gemm``.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t input_ = as_ptr(input, "input", gpu, s), weight_ = as_ptr(weight, "weight", gpu, s)
    cdef uint64_t output_ = as_ptr(output, "output", gpu, s)
    cdef uint32_t m_ = u32("m", m), n_ = u32("n", n), k_ = u32("k", k)
    with nogil:
        c_dense_gemm(gpu, kernel, input_, weight_, output_, m_, n_, k_, s)


cdef int c_dense_gemm(GpuBackend gpu, KernelHandle kernel, uint64_t input, uint64_t weight, uint64_t output,
                      uint32_t m, uint32_t n, uint32_t k, uint64_t stream) except -1 nogil:
    cdef Launch l
    cdef int place = kernel_in(kernel, b"dense_gemm_bf16 dense_gemm_bf16_tc_f32out dense_gemm_bf16_f32out")
    device_ptr(b"input", input, 2)
    device_ptr(b"weight", weight, 2)
    device_ptr(b"output", output, 2 if place == 0 else 4)
    positive(b"m", m)
    positive(b"n", n)
    positive(b"k", k)
    if place == IN_ROUTER_ORDER:
        launch_geometry(&l, ceil_div(n, ROUTER_BLOCK // 32), min(ceil_div(m, ROUTER_ROWS), <uint32_t>MAX_GRID_Y), 1,
                        ROUTER_BLOCK, 1, 1, 0)
    else:
        launch_geometry(&l, ceil_div(m, GEMM_TILE), ceil_div(n, GEMM_TILE), 1, BLOCK, 1, 1, GEMM_SHARED)
    push_ptr(&l, input)
    push_ptr(&l, weight)
    push_ptr(&l, output)
    push_u32(&l, m)
    push_u32(&l, n)
    push_u32(&l, k)
    return launch(gpu, kernel, &l, stream)
