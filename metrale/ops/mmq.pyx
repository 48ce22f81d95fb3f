# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of module ``kquant_moe`` for the int8 tensor cores: activations, and K-quant blocks times them."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_ptr, push_u32
from metrale.ops.check cimport (
    at_least, ceil_div, device_ptr, kernel_in, multiple, positive, u32,
)

cdef enum:
    WARP = 32
    SUPER_BLOCK = 256
    Q8_1_VALUES = 32
    QUANTISE_WARPS = 8            # a warp quantises one block of 128 values
    PADDED_ROWS = 128
    TILE_ROWS = 128               # of the weights
    TILE_COLS = 128               # of the activations
    TILE_THREADS = 256

cdef const char* QUANTISERS = b"metrale_q8_1_quantize_d4_bf16 metrale_q8_1_quantize_d2s6_bf16"
cdef const char* MMQ128 = (
    b"metrale_q2_k_mmq128_nc metrale_q2_k_mmq128_wc metrale_q3_k_mmq128_nc metrale_q3_k_mmq128_wc"
)


def metrale_q8_1_quantize_bf16(GpuBackend gpu not None, KernelHandle kernel not None, x, y, K, M, stream):
    """Quantise x bf16 ``[M, K]`` for the int8 tensor cores, with ``metrale_q8_1_quantize_{d4,d2s6}_bf16``.

    y: ``kquant_mmq_act_bytes(M, K)`` bytes, blocks of 144 for 128 values, ``[ceil256(K) / 128][ceil128(M)]``, zeros
    beyond K and M: D4 (for Q3_K) has a scale for each 32 values, D2S6 (for Q2_K) one for each 64, and sums. x lies on
    an 8-byte boundary, y on one of 16. Refuses ``K`` that is not a positive multiple of 32, ``M`` of 0, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t x_ = as_ptr(x, "x", gpu, s), y_ = as_ptr(y, "y", gpu, s)
    cdef uint32_t K_ = u32("K", K), M_ = u32("M", M)
    with nogil:
        c_metrale_q8_1_quantize_bf16(gpu, kernel, x_, y_, K_, M_, s)


cdef int c_metrale_q8_1_quantize_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t y, uint32_t K,
                                      uint32_t M, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, QUANTISERS)
    device_ptr(b"x", x, 8)
    device_ptr(b"y", y, 16)
    multiple(b"K", K, Q8_1_VALUES)
    positive(b"M", M)
    cdef uint64_t blocks = padded(M) * ceil_div(K, SUPER_BLOCK) * 2
    launch_geometry(&l, ceil_div(blocks, QUANTISE_WARPS), 1, 1, QUANTISE_WARPS * WARP, 1, 1, 0)
    push_ptr(&l, x)
    push_ptr(&l, y)
    push_u32(&l, K)
    push_u32(&l, M)
    return launch(gpu, kernel, &l, stream)


def kquant_mmq128(GpuBackend gpu not None, KernelHandle kernel not None, w, y, out, N, M, K, blocks_per_row, y_rows,
                  out_stride, stream):
    """``out[m, n] = bf16(sum over k of W[n, k] * y[m, k])`` with ``metrale_{q2_k,q3_k}_mmq128_{nc,wc}``, int8
    tensor cores.

    w: ``N`` rows of ``K/256`` blocks of the kernel's format, ``blocks_per_row`` apart; y: ``M`` rows quantised by
    ``metrale_q8_1_quantize_bf16`` of ``y_rows`` rows, D2S6 for Q2_K, D4 for Q3_K; out bf16 ``[M, out_stride]``, of
    which the first ``N`` columns are written. ``_nc`` takes ``N`` that is a multiple of 128. y lies on a 16-byte
    boundary, w of Q2_K on one of 4. Refuses ``K`` that is not a positive multiple of 256, ``N`` or ``M`` of 0,
    ``N`` of ``_nc`` that is not a multiple of 128, ``blocks_per_row`` under ``K/256``, ``y_rows`` under ``M``,
    ``out_stride`` under ``N``, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t w_ = as_ptr(w, "w", gpu, s), y_ = as_ptr(y, "y", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t N_ = u32("N", N), M_ = u32("M", M), K_ = u32("K", K)
    cdef uint32_t blocks_per_row_ = u32("blocks_per_row", blocks_per_row), y_rows_ = u32("y_rows", y_rows)
    cdef uint32_t out_stride_ = u32("out_stride", out_stride)
    with nogil:
        c_kquant_mmq128(gpu, kernel, w_, y_, out_, N_, M_, K_, blocks_per_row_, y_rows_, out_stride_, s)


cdef int c_kquant_mmq128(GpuBackend gpu, KernelHandle kernel, uint64_t w, uint64_t y, uint64_t out, uint32_t N,
                         uint32_t M, uint32_t K, uint32_t blocks_per_row, uint32_t y_rows, uint32_t out_stride,
                         uint64_t stream) except -1 nogil:
    cdef Launch l
    cdef int place = kernel_in(kernel, MMQ128)
    device_ptr(b"w", w, 4 if place < 2 else 2)
    device_ptr(b"y", y, 16)
    device_ptr(b"out", out, 2)
    multiple(b"K", K, SUPER_BLOCK)
    positive(b"M", M)
    if place % 2 == 0:
        multiple(b"N", N, TILE_ROWS)
    positive(b"N", N)
    at_least(b"blocks_per_row", blocks_per_row, K // SUPER_BLOCK)
    at_least(b"y_rows", y_rows, M)
    at_least(b"out_stride", out_stride, N)
    launch_geometry(&l, ceil_div(N, TILE_ROWS), ceil_div(M, TILE_COLS), 1, TILE_THREADS, 1, 1, 0)
    push_ptr(&l, w)
    push_ptr(&l, y)
    push_ptr(&l, out)
    push_u32(&l, N)
    push_u32(&l, M)
    push_u32(&l, K)
    push_u32(&l, blocks_per_row)
    push_u32(&l, y_rows)
    push_u32(&l, out_stride)
    return launch(gpu, kernel, &l, stream)


cdef inline uint64_t padded(uint32_t rows) noexcept nogil:
    return <uint64_t>ceil_div(rows, PADDED_ROWS) * PADDED_ROWS
