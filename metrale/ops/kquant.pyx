# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of module ``kquant_moe``: q8_1 activations, and GEMVs over K-quant blocks."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_f32, push_ptr, push_u32
from metrale.ops.check cimport (
    at_most, ceil_div, device_ptr, f32, kernel_in, multiple, nullable_ptr, positive,
    refuse_number, u32,
)

cdef enum:
    WARP = 32
    SUPER_BLOCK = 256
    Q8_1_VALUES = 32
    QUANTISE_BLOCK = 256          # threads; a warp quantises one q8_1 block
    MMVQ_WARPS = 4                # rows a block
    MAX_M = 8

cdef const char* MMVQ = b"kquant_mmvq_q2_k_w kquant_mmvq_q3_k_w kquant_mmvq_q6_k_w"
cdef const char* MMVQ_EXPERTS = (
    b"kquant_mmvq_q2_k_experts_w2 kquant_mmvq_q2_k_experts_w kquant_mmvq_q2_k_experts_w8 "
    b"kquant_mmvq_q3_k_experts_w2 kquant_mmvq_q3_k_experts_w kquant_mmvq_q3_k_experts_w8"
)


def kquant_q8_1_rows_bf16(GpuBackend gpu not None, KernelHandle kernel not None, x, y, K, M, stream):
    """Quantise x bf16 ``[M, K]`` to y, q8_1 ``[M, K/32]`` of 36 bytes, with ``kquant_q8_1_rows_bf16``.

    Refuses ``K`` that is not a positive multiple of 32, ``M`` of 0, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t x_ = as_ptr(x, "x", gpu, s), y_ = as_ptr(y, "y", gpu, s)
    cdef uint32_t K_ = u32("K", K), M_ = u32("M", M)
    with nogil:
        c_kquant_q8_1_rows_bf16(gpu, kernel, x_, y_, K_, M_, s)


cdef int c_kquant_q8_1_rows_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t y, uint32_t K, uint32_t M,
                                 uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"kquant_q8_1_rows_bf16")
    device_ptr(b"x", x, 2)
    device_ptr(b"y", y, 4)
    multiple(b"K", K, Q8_1_VALUES)
    positive(b"M", M)
    launch_geometry(&l, quantise_grid(K, M), 1, 1, QUANTISE_BLOCK, 1, 1, 0)
    push_ptr(&l, x)
    push_ptr(&l, y)
    push_u32(&l, K)
    push_u32(&l, M)
    return launch(gpu, kernel, &l, stream)


def kquant_swiglu_q8_1_rows_bf16(GpuBackend gpu not None, KernelHandle kernel not None, gate, up, w, h, y, rows, inter,
                                 limit, stream):
    """``moe_v41_swiglu`` and ``kquant_q8_1_rows_bf16`` in one pass, with the bits of the two.

    gate, up, h bf16 ``[rows, inter]``, w f32 ``[rows]`` or null, y q8_1 ``[rows, inter/32]`` of 36 bytes; clamps
    only for ``limit > 0``. Refuses ``inter`` that is not a positive multiple of 32, ``rows`` of 0, null pointers
    (but ``w``).
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t gate_ = as_ptr(gate, "gate", gpu, s), up_ = as_ptr(up, "up", gpu, s), w_ = as_ptr(w, "w", gpu, s)
    cdef uint64_t h_ = as_ptr(h, "h", gpu, s), y_ = as_ptr(y, "y", gpu, s)
    cdef uint32_t rows_ = u32("rows", rows), inter_ = u32("inter", inter)
    cdef float limit_ = f32("limit", limit)
    with nogil:
        c_kquant_swiglu_q8_1_rows_bf16(gpu, kernel, gate_, up_, w_, h_, y_, rows_, inter_, limit_, s)


cdef int c_kquant_swiglu_q8_1_rows_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t gate, uint64_t up, uint64_t w,
                                        uint64_t h, uint64_t y, uint32_t rows, uint32_t inter, float limit,
                                        uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"kquant_swiglu_q8_1_rows_bf16")
    device_ptr(b"gate", gate, 2)
    device_ptr(b"up", up, 2)
    device_ptr(b"h", h, 2)
    device_ptr(b"y", y, 4)
    nullable_ptr(b"w", w, 4)
    positive(b"rows", rows)
    multiple(b"inter", inter, Q8_1_VALUES)
    launch_geometry(&l, quantise_grid(inter, rows), 1, 1, QUANTISE_BLOCK, 1, 1, 0)
    push_ptr(&l, gate)
    push_ptr(&l, up)
    push_ptr(&l, w)
    push_ptr(&l, h)
    push_ptr(&l, y)
    push_u32(&l, rows)
    push_u32(&l, inter)
    push_f32(&l, limit)
    return launch(gpu, kernel, &l, stream)


def kquant_mmvq_w(GpuBackend gpu not None, KernelHandle kernel not None, w, y, out, K, N, M, stream):
    """``out[m, n] = bf16(sum over k of W[n, k] * y[m, k])`` with ``kquant_mmvq_{q2_k,q3_k,q6_k}_w``.

    w: ``[N, K/256]`` blocks of the kernel's format; y: q8_1 ``[M, K/32]``; out bf16 ``[M, N]``. y, and w of Q2_K,
    lie on 4-byte boundaries. Refuses ``K`` that is not a positive multiple of 256, ``M`` outside 1..8, ``N`` of 0,
    null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t w_ = as_ptr(w, "w", gpu, s), y_ = as_ptr(y, "y", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t K_ = u32("K", K), N_ = u32("N", N), M_ = u32("M", M)
    with nogil:
        c_kquant_mmvq_w(gpu, kernel, w_, y_, out_, K_, N_, M_, s)


cdef int c_kquant_mmvq_w(GpuBackend gpu, KernelHandle kernel, uint64_t w, uint64_t y, uint64_t out, uint32_t K,
                         uint32_t N, uint32_t M, uint64_t stream) except -1 nogil:
    cdef Launch l
    # Q2_K blocks are read by words; Q3_K and Q6_K blocks have a size that leaves them on even addresses only.
    device_ptr(b"w", w, 4 if kernel_in(kernel, MMVQ) == 0 else 2)
    check_mmvq(y, out, K, N, M)
    launch_geometry(&l, ceil_div(N, MMVQ_WARPS), 1, 1, MMVQ_WARPS * WARP, 1, 1, 0)
    push_ptr(&l, w)
    push_ptr(&l, y)
    push_ptr(&l, out)
    push_u32(&l, K)
    push_u32(&l, N)
    push_u32(&l, M)
    return launch(gpu, kernel, &l, stream)


def kquant_mmvq_experts_w(GpuBackend gpu not None, KernelHandle kernel not None, tables, y, out, K, N, M,
                          y_stride_bytes, experts, warps, stream):
    """``kquant_mmvq_w`` for several matrices in one launch, ``kquant_mmvq_{q2_k,q3_k}_experts_w{2,,8}``.

    tables: u64 ``[experts]`` on the device, the address of each matrix's blocks; expert e reads q8_1 rows at
    ``y + e * y_stride_bytes`` (0: shared) and writes bf16 ``[M, N]`` at ``out + e * M * N``. ``warps`` a block is the
    kernel's suffix: 2, 4 (none) or 8. Each expert's bits are those of ``kquant_mmvq_w``. Refuses what that does,
    ``warps`` outside {2, 4, 8} or other than the kernel's, ``experts`` of 0, strides that are not a multiple of 4.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t tables_ = as_ptr(tables, "tables", gpu, s), y_ = as_ptr(y, "y", gpu, s)
    cdef uint64_t out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t K_ = u32("K", K), N_ = u32("N", N), M_ = u32("M", M)
    cdef uint32_t y_stride_bytes_ = u32("y_stride_bytes", y_stride_bytes), experts_ = u32("experts", experts)
    cdef uint32_t warps_ = u32("warps", warps)
    with nogil:
        c_kquant_mmvq_experts_w(gpu, kernel, tables_, y_, out_, K_, N_, M_, y_stride_bytes_, experts_, warps_, s)


cdef int c_kquant_mmvq_experts_w(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t out,
                                 uint32_t K, uint32_t N, uint32_t M, uint32_t y_stride_bytes, uint32_t experts,
                                 uint32_t warps, uint64_t stream) except -1 nogil:
    cdef Launch l
    cdef int place = kernel_in(kernel, MMVQ_EXPERTS)
    device_ptr(b"tables", tables, 8)
    check_mmvq(y, out, K, N, M)
    positive(b"experts", experts)
    if warps != 2 and warps != 4 and warps != 8:
        refuse_number(b"warps", warps, b"2, 4 or 8", 0)
    if warps != <uint32_t>2 << (place % 3):
        with gil:
            refuse("warps", warps, f"the warps of kernel {kernel.name}")
    if y_stride_bytes % 4 != 0:
        refuse_number(b"y_stride_bytes", y_stride_bytes, b"a multiple of ", 4)
    launch_geometry(&l, ceil_div(N, warps), experts, 1, warps * WARP, 1, 1, 0)
    push_ptr(&l, tables)
    push_ptr(&l, y)
    push_ptr(&l, out)
    push_u32(&l, K)
    push_u32(&l, N)
    push_u32(&l, M)
    push_u32(&l, y_stride_bytes)
    return launch(gpu, kernel, &l, stream)


cdef int check_mmvq(uint64_t y, uint64_t out, uint32_t K, uint32_t N, uint32_t M) except -1 nogil:
    device_ptr(b"y", y, 4)
    device_ptr(b"out", out, 2)
    multiple(b"K", K, SUPER_BLOCK)
    positive(b"N", N)
    return at_most(b"M", M, MAX_M)


cdef inline uint32_t quantise_grid(uint32_t K, uint32_t rows) noexcept nogil:
    return ceil_div(<uint64_t>(K // Q8_1_VALUES) * rows, QUANTISE_BLOCK // WARP)
