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
from metrale.ops.check cimport at_most, ceil_div, device_ptr, f32, kernel_in, multiple, nullable_ptr, positive, u32

cdef enum:
    WARP = 32
    SUPER_BLOCK = 256
    Q8_1_VALUES = 32
    QUANTISE_BLOCK = 256          # threads; a warp quantises one q8_1 block
    MMVQ_WARPS = 4                # rows a block
    MAX_M = 8

cdef tuple MMVQ = ("kquant_mmvq_q2_k_w", "kquant_mmvq_q3_k_w", "kquant_mmvq_q6_k_w")
cdef tuple MMVQ_EXPERTS = tuple([f"kquant_mmvq_{kind}_experts_w{warps}" for kind in ("q2_k", "q3_k")
                                 for warps in ("2", "", "8")])


def kquant_q8_1_rows_bf16(GpuBackend gpu not None, KernelHandle kernel not None, x, y, K, M, stream):
    """Quantise x bf16 ``[M, K]`` to y, q8_1 ``[M, K/32]`` of 36 bytes, with ``kquant_q8_1_rows_bf16``.

    Refuses ``K`` that is not a positive multiple of 32, ``M`` of 0, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    c_kquant_q8_1_rows_bf16(gpu, kernel, as_ptr(x, "x", gpu, s), as_ptr(y, "y", gpu, s), u32("K", K), u32("M", M), s)


cdef int c_kquant_q8_1_rows_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t y, uint32_t K, uint32_t M,
                                 uint64_t stream) except -1:
    cdef Launch l
    kernel_in(kernel, ("kquant_q8_1_rows_bf16",))
    device_ptr("x", x, 2)
    device_ptr("y", y, 4)
    multiple("K", K, Q8_1_VALUES)
    positive("M", M)
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
    c_kquant_swiglu_q8_1_rows_bf16(gpu, kernel, as_ptr(gate, "gate", gpu, s), as_ptr(up, "up", gpu, s),
                                   as_ptr(w, "w", gpu, s), as_ptr(h, "h", gpu, s), as_ptr(y, "y", gpu, s),
                                   u32("rows", rows), u32("inter", inter), f32("limit", limit), s)


cdef int c_kquant_swiglu_q8_1_rows_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t gate, uint64_t up, uint64_t w,
                                        uint64_t h, uint64_t y, uint32_t rows, uint32_t inter, float limit,
                                        uint64_t stream) except -1:
    cdef Launch l
    kernel_in(kernel, ("kquant_swiglu_q8_1_rows_bf16",))
    device_ptr("gate", gate, 2)
    device_ptr("up", up, 2)
    device_ptr("h", h, 2)
    device_ptr("y", y, 4)
    nullable_ptr("w", w, 4)
    positive("rows", rows)
    multiple("inter", inter, Q8_1_VALUES)
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
    c_kquant_mmvq_w(gpu, kernel, as_ptr(w, "w", gpu, s), as_ptr(y, "y", gpu, s), as_ptr(out, "out", gpu, s),
                    u32("K", K), u32("N", N), u32("M", M), s)


cdef int c_kquant_mmvq_w(GpuBackend gpu, KernelHandle kernel, uint64_t w, uint64_t y, uint64_t out, uint32_t K,
                         uint32_t N, uint32_t M, uint64_t stream) except -1:
    cdef Launch l
    kernel_in(kernel, MMVQ)
    device_ptr("w", w, block_alignment(kernel))
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
    c_kquant_mmvq_experts_w(gpu, kernel, as_ptr(tables, "tables", gpu, s), as_ptr(y, "y", gpu, s),
                            as_ptr(out, "out", gpu, s), u32("K", K), u32("N", N), u32("M", M),
                            u32("y_stride_bytes", y_stride_bytes), u32("experts", experts), u32("warps", warps), s)


cdef int c_kquant_mmvq_experts_w(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t out,
                                 uint32_t K, uint32_t N, uint32_t M, uint32_t y_stride_bytes, uint32_t experts,
                                 uint32_t warps, uint64_t stream) except -1:
    cdef Launch l
    kernel_in(kernel, MMVQ_EXPERTS)
    device_ptr("tables", tables, 8)
    check_mmvq(y, out, K, N, M)
    positive("experts", experts)
    if warps != 2 and warps != 4 and warps != 8:
        refuse("warps", warps, "2, 4 or 8")
    if not suffix_fits(kernel.name, warps):
        refuse("warps", warps, f"the warps of kernel {kernel.name}")
    if y_stride_bytes % 4 != 0:
        refuse("y_stride_bytes", y_stride_bytes, "a multiple of 4")
    launch_geometry(&l, ceil_div(N, warps), experts, 1, warps * WARP, 1, 1, 0)
    push_ptr(&l, tables)
    push_ptr(&l, y)
    push_ptr(&l, out)
    push_u32(&l, K)
    push_u32(&l, N)
    push_u32(&l, M)
    push_u32(&l, y_stride_bytes)
    return launch(gpu, kernel, &l, stream)


cdef int check_mmvq(uint64_t y, uint64_t out, uint32_t K, uint32_t N, uint32_t M) except -1:
    device_ptr("y", y, 4)
    device_ptr("out", out, 2)
    multiple("K", K, SUPER_BLOCK)
    positive("N", N)
    return at_most("M", M, MAX_M)


cdef inline uint32_t quantise_grid(uint32_t K, uint32_t rows) noexcept nogil:
    return ceil_div(<uint64_t>(K // Q8_1_VALUES) * rows, QUANTISE_BLOCK // WARP)


cdef inline bint suffix_fits(str name, uint32_t warps):
    """Whether a kernel ``..._w2``, ``..._w`` or ``..._w8`` runs ``warps`` warps a block."""
    cdef Py_UCS4 last = name[len(name) - 1]
    return last == (u'w' if warps == 4 else u'2' if warps == 2 else u'8')


cdef inline int block_alignment(KernelHandle kernel):
    """Q2_K blocks are read by words; Q3_K and Q6_K blocks have a size that leaves them on even addresses only."""
    return 4 if "_q2_k_" in kernel.name else 2
