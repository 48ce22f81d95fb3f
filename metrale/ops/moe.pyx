# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of module ``moe_v41``: routing, SwiGLU, sums."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_f32, push_ptr, push_u32, push_u64
from metrale.ops.check cimport at_most, ceil_div, device_ptr, f32, kernel_in, nullable_ptr, positive, u32, u64

cdef extern from "common/route.cuh" namespace "metrale" nogil:
    const uint32_t ROUTE_MAX_EXPERTS
    const uint32_t ROUTE_MAX_PICKS

cdef enum:
    BLOCK = 256
    VALUES_A_BLOCK = 8 * BLOCK        # of the elementwise kernels
    MAX_GRID_Y = 65535
    ROUTER_BLOCK = 128                # 4 warps, an output each
    PRODUCTS_SHARED = 8192            # bytes a row of A
    MAX_M = 8


def moe_v41_swiglu(GpuBackend gpu not None, KernelHandle kernel not None, gate, up, w, h, rows, inter, limit, stream):
    """``h = bf16(silu(min(gate, limit)) * clamp(up, -limit, limit) * w[row])``; the clamps only for ``limit > 0``.

    gate, up, h bf16 ``[rows, inter]``; w f32 ``[rows]`` or null (1). Refuses sizes of 0, null pointers (but ``w``).
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t gate_ = as_ptr(gate, "gate", gpu, s), up_ = as_ptr(up, "up", gpu, s), w_ = as_ptr(w, "w", gpu, s)
    cdef uint64_t h_ = as_ptr(h, "h", gpu, s)
    cdef uint32_t rows_ = u32("rows", rows), inter_ = u32("inter", inter)
    cdef float limit_ = f32("limit", limit)
    with nogil:
        c_moe_v41_swiglu(gpu, kernel, gate_, up_, w_, h_, rows_, inter_, limit_, s)


cdef int c_moe_v41_swiglu(GpuBackend gpu, KernelHandle kernel, uint64_t gate, uint64_t up, uint64_t w, uint64_t h,
                          uint32_t rows, uint32_t inter, float limit, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_swiglu")
    device_ptr(b"gate", gate, 2)
    device_ptr(b"up", up, 2)
    device_ptr(b"h", h, 2)
    nullable_ptr(b"w", w, 4)
    positive(b"rows", rows)
    positive(b"inter", inter)
    launch_geometry(&l, ceil_div(inter, VALUES_A_BLOCK), min(rows, <uint32_t>MAX_GRID_Y), 1, BLOCK, 1, 1, 0)
    push_ptr(&l, gate)
    push_ptr(&l, up)
    push_ptr(&l, w)
    push_ptr(&l, h)
    push_u32(&l, rows)
    push_u32(&l, inter)
    push_f32(&l, limit)
    return launch(gpu, kernel, &l, stream)


def moe_v41_accumulate(GpuBackend gpu not None, KernelHandle kernel not None, acc, src, n, stream):
    """``acc += src``: acc f32 ``[n]``, src bf16 ``[n]``. Refuses ``n`` of 0, null pointers."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t acc_ = as_ptr(acc, "acc", gpu, s), src_ = as_ptr(src, "src", gpu, s)
    cdef uint32_t n_ = u32("n", n)
    with nogil:
        c_moe_v41_accumulate(gpu, kernel, acc_, src_, n_, s)


cdef int c_moe_v41_accumulate(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t src, uint32_t n,
                              uint64_t stream) except -1 nogil:
    kernel_in(kernel, b"moe_v41_accumulate")
    return elementwise(gpu, kernel, b"acc", acc, b"src", src, n, stream)


def moe_v41_finish(GpuBackend gpu not None, KernelHandle kernel not None, acc, out, n, stream):
    """``out = bf16(acc)``: acc f32 ``[n]``, out bf16 ``[n]``. Refuses ``n`` of 0, null pointers."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t acc_ = as_ptr(acc, "acc", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t n_ = u32("n", n)
    with nogil:
        c_moe_v41_finish(gpu, kernel, acc_, out_, n_, s)


cdef int c_moe_v41_finish(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t out, uint32_t n,
                          uint64_t stream) except -1 nogil:
    kernel_in(kernel, b"moe_v41_finish")
    return elementwise(gpu, kernel, b"acc", acc, b"out", out, n, stream)


cdef int elementwise(GpuBackend gpu, KernelHandle kernel, const char* a_name, uint64_t a, const char* b_name,
                     uint64_t b, uint32_t n, uint64_t stream) except -1 nogil:
    cdef Launch l
    device_ptr(a_name, a, 4)
    device_ptr(b_name, b, 2)
    positive(b"n", n)
    launch_geometry(&l, ceil_div(n, VALUES_A_BLOCK), 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, a)
    push_ptr(&l, b)
    push_u32(&l, n)
    return launch(gpu, kernel, &l, stream)


def moe_v41_sum_rows(GpuBackend gpu not None, KernelHandle kernel not None, acc, src, n_rows, dim, stream):
    """``acc += src[0]; acc += src[1]; ...``: acc f32 ``[dim]``, src bf16 ``[n_rows, dim]``, with the rounding of
    that many ``moe_v41_accumulate``. Refuses sizes of 0, null pointers."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t acc_ = as_ptr(acc, "acc", gpu, s), src_ = as_ptr(src, "src", gpu, s)
    cdef uint32_t n_rows_ = u32("n_rows", n_rows), dim_ = u32("dim", dim)
    with nogil:
        c_moe_v41_sum_rows(gpu, kernel, acc_, src_, n_rows_, dim_, s)


cdef int c_moe_v41_sum_rows(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t src, uint32_t n_rows,
                            uint32_t dim, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_sum_rows")
    device_ptr(b"acc", acc, 4)
    device_ptr(b"src", src, 2)
    positive(b"n_rows", n_rows)
    positive(b"dim", dim)
    launch_geometry(&l, ceil_div(dim, VALUES_A_BLOCK), 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, acc)
    push_ptr(&l, src)
    push_u32(&l, n_rows)
    push_u32(&l, dim)
    return launch(gpu, kernel, &l, stream)


def moe_v41_router_gemv_f32out(GpuBackend gpu not None, KernelHandle kernel not None, A, B, C, M, N, K, stream):
    """Router logits ``C[m, n] = sum over k of A[m, k] * B[n, k]``: A bf16 ``[M, K]``, B bf16 ``[N, K]``, C f32
    ``[M, N]``. A row's bits do not depend on M. Refuses ``M`` outside 1..8, sizes of 0, null pointers."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t A_ = as_ptr(A, "A", gpu, s), B_ = as_ptr(B, "B", gpu, s), C_ = as_ptr(C, "C", gpu, s)
    cdef uint32_t M_ = u32("M", M), N_ = u32("N", N), K_ = u32("K", K)
    with nogil:
        c_moe_v41_router_gemv_f32out(gpu, kernel, A_, B_, C_, M_, N_, K_, s)


cdef int c_moe_v41_router_gemv_f32out(GpuBackend gpu, KernelHandle kernel, uint64_t A, uint64_t B, uint64_t C,
                                      uint32_t M, uint32_t N, uint32_t K, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_router_gemv_f32out")
    launch_geometry(&l, ceil_div(N, ROUTER_BLOCK // 32), 1, 1, ROUTER_BLOCK, 1, 1, 0)
    return router(gpu, kernel, &l, A, B, C, M, N, K, stream)


def moe_v41_router_gemv_f32out_products(GpuBackend gpu not None, KernelHandle kernel not None, A, B, C, M, N, K,
                                        stream):
    """``moe_v41_router_gemv_f32out`` with more warps an output: the same arguments, refusals and bits."""
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t A_ = as_ptr(A, "A", gpu, s), B_ = as_ptr(B, "B", gpu, s), C_ = as_ptr(C, "C", gpu, s)
    cdef uint32_t M_ = u32("M", M), N_ = u32("N", N), K_ = u32("K", K)
    with nogil:
        c_moe_v41_router_gemv_f32out_products(gpu, kernel, A_, B_, C_, M_, N_, K_, s)


cdef int c_moe_v41_router_gemv_f32out_products(GpuBackend gpu, KernelHandle kernel, uint64_t A, uint64_t B,
                                               uint64_t C, uint32_t M, uint32_t N, uint32_t K,
                                               uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_router_gemv_f32out_products")
    launch_geometry(&l, N, 1, 1, BLOCK, 1, 1, <size_t>M * PRODUCTS_SHARED)
    return router(gpu, kernel, &l, A, B, C, M, N, K, stream)


cdef int router(GpuBackend gpu, KernelHandle kernel, Launch* l, uint64_t A, uint64_t B, uint64_t C, uint32_t M,
                uint32_t N, uint32_t K, uint64_t stream) except -1 nogil:
    device_ptr(b"A", A, 2)
    device_ptr(b"B", B, 2)
    device_ptr(b"C", C, 4)
    at_most(b"M", M, MAX_M)
    positive(b"N", N)
    positive(b"K", K)
    push_ptr(l, A)
    push_ptr(l, B)
    push_ptr(l, C)
    push_u32(l, M)
    push_u32(l, N)
    push_u32(l, K)
    return launch(gpu, kernel, l, stream)


def moe_v41_route_select(GpuBackend gpu not None, KernelHandle kernel not None, logits, bias, n_routed, topk,
                         gate_temp, route_scale, norm_topk, slot_of, arena_base, slot_bytes, gate_off, up_off,
                         down_off, hdr, plan_w, plan_rows, ptrs, stream):
    """One token's selection on the device.

    logits f32 ``[n_routed]``, bias f32 ``[n_routed]`` or null; slot_of i32 ``[n_routed]``, the layer's row of the slot
    table (-1: not resident); arena_base and the byte sizes and offsets of a slot. Writes hdr u32 ``[1 + 3 topk]``
    (flags, picks, weight bits, both in pick order, slots in plan order), and in plan order (ascending expert id)
    plan_w f32 ``[topk]``, plan_rows u32 ``[topk]`` (0), ptrs u64 ``[3, topk]`` (gate, up, down). Flag bit 0: a pick is
    not resident; bit 1: a logit is not finite, nothing was picked. Refuses ``n_routed`` over 1024, ``topk`` outside
    1..min(n_routed, 32), ``gate_temp`` not above 0, null pointers (but ``bias``).
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t logits_ = as_ptr(logits, "logits", gpu, s), bias_ = as_ptr(bias, "bias", gpu, s)
    cdef uint64_t slot_of_ = as_ptr(slot_of, "slot_of", gpu, s)
    cdef uint64_t arena_base_ = as_ptr(arena_base, "arena_base", gpu, s), slot_bytes_ = u64("slot_bytes", slot_bytes)
    cdef uint64_t gate_off_ = u64("gate_off", gate_off), up_off_ = u64("up_off", up_off)
    cdef uint64_t down_off_ = u64("down_off", down_off), hdr_ = as_ptr(hdr, "hdr", gpu, s)
    cdef uint64_t plan_w_ = as_ptr(plan_w, "plan_w", gpu, s), plan_rows_ = as_ptr(plan_rows, "plan_rows", gpu, s)
    cdef uint64_t ptrs_ = as_ptr(ptrs, "ptrs", gpu, s)
    cdef uint32_t n_routed_ = u32("n_routed", n_routed), topk_ = u32("topk", topk), norm_topk_ = 1 if norm_topk else 0
    cdef float gate_temp_ = f32("gate_temp", gate_temp), route_scale_ = f32("route_scale", route_scale)
    with nogil:
        c_moe_v41_route_select(gpu, kernel, logits_, bias_, n_routed_, topk_, gate_temp_, route_scale_, norm_topk_,
                               slot_of_, arena_base_, slot_bytes_, gate_off_, up_off_, down_off_, hdr_, plan_w_,
                               plan_rows_, ptrs_, s)


cdef int c_moe_v41_route_select(GpuBackend gpu, KernelHandle kernel, uint64_t logits, uint64_t bias,
                                uint32_t n_routed, uint32_t topk, float gate_temp, float route_scale,
                                uint32_t norm_topk, uint64_t slot_of, uint64_t arena_base, uint64_t slot_bytes,
                                uint64_t gate_off, uint64_t up_off, uint64_t down_off, uint64_t hdr, uint64_t plan_w,
                                uint64_t plan_rows, uint64_t ptrs, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_route_select")
    check_route(logits, bias, slot_of, hdr, n_routed, topk, gate_temp)
    device_ptr(b"arena_base", arena_base, 4)
    device_ptr(b"plan_w", plan_w, 4)
    device_ptr(b"plan_rows", plan_rows, 4)
    device_ptr(b"ptrs", ptrs, 8)
    launch_geometry(&l, 1, 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, logits)
    push_ptr(&l, bias)
    push_u32(&l, n_routed)
    push_u32(&l, topk)
    push_f32(&l, gate_temp)
    push_f32(&l, route_scale)
    push_u32(&l, norm_topk)
    push_ptr(&l, slot_of)
    push_u64(&l, arena_base)
    push_u64(&l, slot_bytes)
    push_u64(&l, gate_off)
    push_u64(&l, up_off)
    push_u64(&l, down_off)
    push_ptr(&l, hdr)
    push_ptr(&l, plan_w)
    push_ptr(&l, plan_rows)
    push_ptr(&l, ptrs)
    return launch(gpu, kernel, &l, stream)


def moe_v41_route_select_tokens(GpuBackend gpu not None, KernelHandle kernel not None, logits, bias, n_routed, topk,
                                gate_temp, route_scale, norm_topk, slot_of, hdr, tokens, stream):
    """``moe_v41_route_select`` for many tokens, of which only the headers are written.

    logits f32 ``[tokens, n_routed]``, hdr u32 ``[tokens, 1 + 3 topk]``; the others as there. Refuses what that does,
    and ``tokens`` of 0.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t logits_ = as_ptr(logits, "logits", gpu, s), bias_ = as_ptr(bias, "bias", gpu, s)
    cdef uint64_t slot_of_ = as_ptr(slot_of, "slot_of", gpu, s), hdr_ = as_ptr(hdr, "hdr", gpu, s)
    cdef uint32_t n_routed_ = u32("n_routed", n_routed), topk_ = u32("topk", topk), norm_topk_ = 1 if norm_topk else 0
    cdef uint32_t tokens_ = u32("tokens", tokens)
    cdef float gate_temp_ = f32("gate_temp", gate_temp), route_scale_ = f32("route_scale", route_scale)
    with nogil:
        c_moe_v41_route_select_tokens(gpu, kernel, logits_, bias_, n_routed_, topk_, gate_temp_, route_scale_,
                                      norm_topk_, slot_of_, hdr_, tokens_, s)


cdef int c_moe_v41_route_select_tokens(GpuBackend gpu, KernelHandle kernel, uint64_t logits, uint64_t bias,
                                       uint32_t n_routed, uint32_t topk, float gate_temp, float route_scale,
                                       uint32_t norm_topk, uint64_t slot_of, uint64_t hdr, uint32_t tokens,
                                       uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_route_select_tokens")
    check_route(logits, bias, slot_of, hdr, n_routed, topk, gate_temp)
    positive(b"tokens", tokens)
    launch_geometry(&l, tokens, 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, logits)
    push_ptr(&l, bias)
    push_u32(&l, n_routed)
    push_u32(&l, topk)
    push_f32(&l, gate_temp)
    push_f32(&l, route_scale)
    push_u32(&l, norm_topk)
    push_ptr(&l, slot_of)
    push_ptr(&l, hdr)
    return launch(gpu, kernel, &l, stream)


cdef int check_route(uint64_t logits, uint64_t bias, uint64_t slot_of, uint64_t hdr, uint32_t n_routed, uint32_t topk,
                     float gate_temp) except -1 nogil:
    device_ptr(b"logits", logits, 4)
    nullable_ptr(b"bias", bias, 4)
    device_ptr(b"slot_of", slot_of, 4)
    device_ptr(b"hdr", hdr, 4)
    at_most(b"n_routed", n_routed, ROUTE_MAX_EXPERTS)
    at_most(b"topk", topk, min(n_routed, ROUTE_MAX_PICKS))
    if not gate_temp > 0:
        with gil:
            refuse("gate_temp", gate_temp, "more than 0")
    return 0


def moe_v41_gather_rows(GpuBackend gpu not None, KernelHandle kernel not None, x, rows, out, n_rows, dim, stream):
    """``out[r] = x[rows[r]]``: x bf16 ``[., dim]``, rows u32 ``[n_rows]``, out bf16 ``[n_rows, dim]``.

    Refuses ``n_rows`` outside 1..65535, ``dim`` of 0, null pointers. The rows' range is the caller's word.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t x_ = as_ptr(x, "x", gpu, s), rows_ = as_ptr(rows, "rows", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t n_rows_ = u32("n_rows", n_rows), dim_ = u32("dim", dim)
    with nogil:
        c_moe_v41_gather_rows(gpu, kernel, x_, rows_, out_, n_rows_, dim_, s)


cdef int c_moe_v41_gather_rows(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t rows, uint64_t out,
                               uint32_t n_rows, uint32_t dim, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_gather_rows")
    device_ptr(b"x", x, 2)
    device_ptr(b"rows", rows, 4)
    device_ptr(b"out", out, 2)
    at_most(b"n_rows", n_rows, MAX_GRID_Y)
    positive(b"dim", dim)
    launch_geometry(&l, ceil_div(dim, VALUES_A_BLOCK), n_rows, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, x)
    push_ptr(&l, rows)
    push_ptr(&l, out)
    push_u32(&l, dim)
    return launch(gpu, kernel, &l, stream)


def moe_v41_scatter_add(GpuBackend gpu not None, KernelHandle kernel not None, acc, src, rows, n_rows, dim, stream):
    """``acc[rows[r]] += src[r]``, in f32: acc f32 ``[., dim]``, src bf16 ``[n_rows, dim]``, rows u32 ``[n_rows]``,
    distinct.

    Refuses what ``moe_v41_gather_rows`` does. That the rows are distinct, and their range, is the caller's word.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t acc_ = as_ptr(acc, "acc", gpu, s), src_ = as_ptr(src, "src", gpu, s)
    cdef uint64_t rows_ = as_ptr(rows, "rows", gpu, s)
    cdef uint32_t n_rows_ = u32("n_rows", n_rows), dim_ = u32("dim", dim)
    with nogil:
        c_moe_v41_scatter_add(gpu, kernel, acc_, src_, rows_, n_rows_, dim_, s)


cdef int c_moe_v41_scatter_add(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t src, uint64_t rows,
                               uint32_t n_rows, uint32_t dim, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_scatter_add")
    device_ptr(b"acc", acc, 4)
    device_ptr(b"src", src, 2)
    device_ptr(b"rows", rows, 4)
    at_most(b"n_rows", n_rows, MAX_GRID_Y)
    positive(b"dim", dim)
    launch_geometry(&l, ceil_div(dim, VALUES_A_BLOCK), n_rows, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, acc)
    push_ptr(&l, src)
    push_ptr(&l, rows)
    push_u32(&l, dim)
    return launch(gpu, kernel, &l, stream)


def moe_v41_slot_table_set(GpuBackend gpu not None, KernelHandle kernel not None, table, n_routed, triples, n, stream):
    """``table[layer, expert] = slot`` for triples i32 ``[n, 3]`` of (layer, expert, slot), no (layer, expert) twice.

    table i32 ``[layers, n_routed]``. Refuses ``n_routed`` over 1024, ``n`` of 0, null pointers. The triples' own
    ranges are the caller's word: they lie on the device.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t table_ = as_ptr(table, "table", gpu, s), triples_ = as_ptr(triples, "triples", gpu, s)
    cdef uint32_t n_routed_ = u32("n_routed", n_routed), n_ = u32("n", n)
    with nogil:
        c_moe_v41_slot_table_set(gpu, kernel, table_, n_routed_, triples_, n_, s)


cdef int c_moe_v41_slot_table_set(GpuBackend gpu, KernelHandle kernel, uint64_t table, uint32_t n_routed,
                                  uint64_t triples, uint32_t n, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_v41_slot_table_set")
    device_ptr(b"table", table, 4)
    device_ptr(b"triples", triples, 4)
    at_most(b"n_routed", n_routed, ROUTE_MAX_EXPERTS)
    positive(b"n", n)
    launch_geometry(&l, ceil_div(n, BLOCK), 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, table)
    push_u32(&l, n_routed)
    push_ptr(&l, triples)
    push_u32(&l, n)
    return launch(gpu, kernel, &l, stream)
