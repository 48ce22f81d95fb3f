# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of module ``moe_grouped``: the experts of many tokens, each projection one launch."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport (
    launch, launch_geometry, push_ptr, push_u32, push_u64,
)
from metrale.ops.check cimport (
    at_most, ceil_div, device_ptr, kernel_in, multiple, nullable_ptr, positive, refuse_number, u32, u64,
)

cdef enum:
    WARP = 32
    SUPER_BLOCK = 256
    MAX_ROUTED = 1024
    MAX_PICKS = 32
    SCHEDULE_BLOCK = MAX_ROUTED   # a thread an expert
    ROWS_BLOCK = 256
    ROW_VALUES = 8 * ROWS_BLOCK
    MMVQ_ROWS = 8                 # of the weights, a warp each
    TILE_ROWS = 128               # of the weights
    TILE_THREADS = 256

cdef const char* MMVQ_GROUPED = b"kquant_mmvq_q2_k_grouped kquant_mmvq_q3_k_grouped"
cdef const char* MMQ_GROUPED = (
    b"kquant_mmq_q2_k_grouped16 kquant_mmq_q2_k_grouped128 kquant_mmq_q3_k_grouped16 kquant_mmq_q3_k_grouped128"
)


def moe_grouped_tiles(GpuBackend gpu not None, KernelHandle kernel not None, hdr, tokens, topk, n_routed, first, last,
                      tile_rows, offsets, tiles, n_tiles, stream):
    """The experts' rows and their tiles, from many tokens' selections, with ``moe_grouped_tiles``.

    hdr u32 ``[tokens, 1 + 3 * topk]`` of ``moe_v41_route_select_tokens`` -> offsets u32 ``[n_routed + 1]``, the first
    row of each expert and the number of rows; tiles u32 ``[., 4]`` = expert, first row, rows, unused, of up to
    ``tile_rows`` rows each, of the experts ``first`` to ``last - 1``, ascending; n_tiles u32 ``[1]``, their number,
    at most ``min(n_routed, tokens * topk) + tokens * topk // tile_rows``. tiles lies on a 16-byte boundary. Refuses
    ``tokens`` or ``tile_rows`` of 0, ``n_routed`` outside 1..1024, ``topk`` outside 1..min(n_routed, 32), ``last``
    outside 1..n_routed, ``first`` that is not less, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t hdr_ = as_ptr(hdr, "hdr", gpu, s), offsets_ = as_ptr(offsets, "offsets", gpu, s)
    cdef uint64_t tiles_ = as_ptr(tiles, "tiles", gpu, s), n_tiles_ = as_ptr(n_tiles, "n_tiles", gpu, s)
    cdef uint32_t tokens_ = u32("tokens", tokens), topk_ = u32("topk", topk), n_routed_ = u32("n_routed", n_routed)
    cdef uint32_t first_ = u32("first", first), last_ = u32("last", last), tile_rows_ = u32("tile_rows", tile_rows)
    with nogil:
        c_moe_grouped_tiles(gpu, kernel, hdr_, tokens_, topk_, n_routed_, first_, last_, tile_rows_, offsets_, tiles_,
                            n_tiles_, s)


cdef int c_moe_grouped_tiles(GpuBackend gpu, KernelHandle kernel, uint64_t hdr, uint32_t tokens, uint32_t topk,
                             uint32_t n_routed, uint32_t first, uint32_t last, uint32_t tile_rows, uint64_t offsets,
                             uint64_t tiles, uint64_t n_tiles, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_grouped_tiles")
    device_ptr(b"hdr", hdr, 4)
    device_ptr(b"offsets", offsets, 4)
    device_ptr(b"tiles", tiles, 16)
    device_ptr(b"n_tiles", n_tiles, 4)
    check_selections(tokens, topk, n_routed)
    at_most(b"last", last, n_routed)
    if first >= last:
        refuse_number(b"first", first, b"less than ", last)
    positive(b"tile_rows", tile_rows)
    launch_geometry(&l, 1, 1, 1, SCHEDULE_BLOCK, 1, 1, 0)
    push_ptr(&l, hdr)
    push_u32(&l, tokens)
    push_u32(&l, topk)
    push_u32(&l, n_routed)
    push_u32(&l, first)
    push_u32(&l, last)
    push_u32(&l, tile_rows)
    push_ptr(&l, offsets)
    push_ptr(&l, tiles)
    push_ptr(&l, n_tiles)
    return launch(gpu, kernel, &l, stream)


def moe_grouped_rows(GpuBackend gpu not None, KernelHandle kernel not None, hdr, tokens, topk, n_routed, offsets,
                     slot_of, arena_base, slot_bytes, gate_off, up_off, down_off, row_token, row_weight, token_rows,
                     ptrs, stream):
    """Where the experts' rows come from and go to, with ``moe_grouped_rows``.

    hdr as for ``moe_grouped_tiles``, offsets of it; slot_of i32 ``[n_routed]`` -> row_token u32 and row_weight f32
    ``[tokens * topk]``, each row's token and routing weight; token_rows u32 ``[tokens, topk]``, each token's rows in
    ascending expert, 0xffffffff for a token without a selection; ptrs u64 ``[3, n_routed]``, the addresses of gate, up
    and down blocks in the arena at ``arena_base``, of slot 0 for an expert without a slot. Refuses what
    ``moe_grouped_tiles`` does.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t hdr_ = as_ptr(hdr, "hdr", gpu, s), offsets_ = as_ptr(offsets, "offsets", gpu, s)
    cdef uint64_t slot_of_ = as_ptr(slot_of, "slot_of", gpu, s)
    cdef uint64_t arena_base_ = as_ptr(arena_base, "arena_base", gpu, s)
    cdef uint64_t row_token_ = as_ptr(row_token, "row_token", gpu, s)
    cdef uint64_t row_weight_ = as_ptr(row_weight, "row_weight", gpu, s)
    cdef uint64_t token_rows_ = as_ptr(token_rows, "token_rows", gpu, s), ptrs_ = as_ptr(ptrs, "ptrs", gpu, s)
    cdef uint64_t slot_bytes_ = u64("slot_bytes", slot_bytes), gate_off_ = u64("gate_off", gate_off)
    cdef uint64_t up_off_ = u64("up_off", up_off), down_off_ = u64("down_off", down_off)
    cdef uint32_t tokens_ = u32("tokens", tokens), topk_ = u32("topk", topk), n_routed_ = u32("n_routed", n_routed)
    with nogil:
        c_moe_grouped_rows(gpu, kernel, hdr_, tokens_, topk_, n_routed_, offsets_, slot_of_, arena_base_, slot_bytes_,
                           gate_off_, up_off_, down_off_, row_token_, row_weight_, token_rows_, ptrs_, s)


cdef int c_moe_grouped_rows(GpuBackend gpu, KernelHandle kernel, uint64_t hdr, uint32_t tokens, uint32_t topk,
                            uint32_t n_routed, uint64_t offsets, uint64_t slot_of, uint64_t arena_base, uint64_t
                            slot_bytes, uint64_t gate_off, uint64_t up_off, uint64_t down_off, uint64_t row_token,
                            uint64_t row_weight, uint64_t token_rows, uint64_t ptrs, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_grouped_rows")
    device_ptr(b"hdr", hdr, 4)
    device_ptr(b"offsets", offsets, 4)
    device_ptr(b"slot_of", slot_of, 4)
    device_ptr(b"arena_base", arena_base, 4)
    device_ptr(b"row_token", row_token, 4)
    device_ptr(b"row_weight", row_weight, 4)
    device_ptr(b"token_rows", token_rows, 4)
    device_ptr(b"ptrs", ptrs, 8)
    check_selections(tokens, topk, n_routed)
    launch_geometry(&l, n_routed, 1, 1, ROWS_BLOCK, 1, 1, 0)
    push_ptr(&l, hdr)
    push_u32(&l, tokens)
    push_u32(&l, topk)
    push_u32(&l, n_routed)
    push_ptr(&l, offsets)
    push_ptr(&l, slot_of)
    push_u64(&l, arena_base)
    push_u64(&l, slot_bytes)
    push_u64(&l, gate_off)
    push_u64(&l, up_off)
    push_u64(&l, down_off)
    push_ptr(&l, row_token)
    push_ptr(&l, row_weight)
    push_ptr(&l, token_rows)
    push_ptr(&l, ptrs)
    return launch(gpu, kernel, &l, stream)


def moe_grouped_combine(GpuBackend gpu not None, KernelHandle kernel not None, src, token_rows, shared, acc, out,
                        tokens, topk, dim, stream):
    """Sum each token's rows and the shared expert's, with ``moe_grouped_combine``.

    src bf16 ``[rows, dim]``; token_rows of ``moe_grouped_rows``, or null for one token with the rows ``0 .. topk - 1``;
    shared bf16 ``[tokens, dim]`` -> acc f32 and out bf16 ``[tokens, dim]``: the bits of adding the rows onto zeros
    one by one in ascending expert, then ``shared``. Refuses ``tokens``, ``topk`` or ``dim`` of 0, null
    ``token_rows`` for several tokens, other null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t src_ = as_ptr(src, "src", gpu, s), token_rows_ = as_ptr(token_rows, "token_rows", gpu, s)
    cdef uint64_t shared_ = as_ptr(shared, "shared", gpu, s), acc_ = as_ptr(acc, "acc", gpu, s)
    cdef uint64_t out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t tokens_ = u32("tokens", tokens), topk_ = u32("topk", topk), dim_ = u32("dim", dim)
    with nogil:
        c_moe_grouped_combine(gpu, kernel, src_, token_rows_, shared_, acc_, out_, tokens_, topk_, dim_, s)


cdef int c_moe_grouped_combine(GpuBackend gpu, KernelHandle kernel, uint64_t src, uint64_t token_rows, uint64_t
                               shared, uint64_t acc, uint64_t out, uint32_t tokens, uint32_t topk, uint32_t dim,
                               uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"moe_grouped_combine")
    device_ptr(b"src", src, 2)
    device_ptr(b"shared", shared, 2)
    device_ptr(b"acc", acc, 4)
    device_ptr(b"out", out, 2)
    positive(b"tokens", tokens)
    positive(b"topk", topk)
    positive(b"dim", dim)
    if tokens > 1:
        device_ptr(b"token_rows", token_rows, 4)
    nullable_ptr(b"token_rows", token_rows, 4)
    launch_geometry(&l, ceil_div(dim, ROW_VALUES), tokens, 1, ROWS_BLOCK, 1, 1, 0)
    push_ptr(&l, src)
    push_ptr(&l, token_rows)
    push_ptr(&l, shared)
    push_ptr(&l, acc)
    push_ptr(&l, out)
    push_u32(&l, topk)
    push_u32(&l, dim)
    return launch(gpu, kernel, &l, stream)


def kquant_mmvq_grouped(GpuBackend gpu not None, KernelHandle kernel not None, tables, y, rows, out, tiles, n_tiles,
                        K, N, n_routed, out_rows, max_tiles, projections, stream):
    """All experts' products with their q8_1 rows in one launch, with ``kquant_mmvq_{q2_k,q3_k}_grouped``.

    tables u64 ``[projections, n_routed]``, addresses of each expert's blocks ``[N, K/256]``; y: q8_1 rows; rows u32:
    y's row of each row, or null for the same; tiles and n_tiles of ``moe_grouped_tiles`` with ``tile_rows`` up to
    8, of which at most ``max_tiles``; out bf16 ``[projections, out_rows, N]``. Each row's bits are those of
    ``kquant_mmvq_w``. Refuses ``K`` that is not a positive multiple of 256, ``N``, ``n_routed``, ``out_rows``,
    ``max_tiles`` or ``projections`` of 0, null pointers (but ``rows``).
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t tables_ = as_ptr(tables, "tables", gpu, s), y_ = as_ptr(y, "y", gpu, s)
    cdef uint64_t rows_ = as_ptr(rows, "rows", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint64_t tiles_ = as_ptr(tiles, "tiles", gpu, s), n_tiles_ = as_ptr(n_tiles, "n_tiles", gpu, s)
    cdef uint32_t K_ = u32("K", K), N_ = u32("N", N), n_routed_ = u32("n_routed", n_routed)
    cdef uint32_t out_rows_ = u32("out_rows", out_rows), max_tiles_ = u32("max_tiles", max_tiles)
    cdef uint32_t projections_ = u32("projections", projections)
    with nogil:
        c_kquant_mmvq_grouped(gpu, kernel, tables_, y_, rows_, out_, tiles_, n_tiles_, K_, N_, n_routed_, out_rows_,
                              max_tiles_, projections_, s)


cdef int c_kquant_mmvq_grouped(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t rows,
                               uint64_t out, uint64_t tiles, uint64_t n_tiles, uint32_t K, uint32_t N, uint32_t
                               n_routed, uint32_t out_rows, uint32_t max_tiles, uint32_t projections, uint64_t
                               stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, MMVQ_GROUPED)
    check_grouped(tables, y, 4, rows, out, tiles, n_tiles, K, N, n_routed, out_rows)
    positive(b"max_tiles", max_tiles)
    positive(b"projections", projections)
    launch_geometry(&l, ceil_div(N, MMVQ_ROWS), max_tiles, projections, MMVQ_ROWS * WARP, 1, 1, 0)
    push_ptr(&l, tables)
    push_ptr(&l, y)
    push_ptr(&l, rows)
    push_ptr(&l, out)
    push_ptr(&l, tiles)
    push_ptr(&l, n_tiles)
    push_u32(&l, K)
    push_u32(&l, N)
    push_u32(&l, n_routed)
    push_u32(&l, out_rows)
    return launch(gpu, kernel, &l, stream)


def kquant_mmq_grouped(GpuBackend gpu not None, KernelHandle kernel not None, tables, y, rows, out, tiles, n_tiles, K,
                       N, n_routed, out_rows, y_rows, max_tiles, projections, stream):
    """All experts' products on the int8 tensor cores in one launch, with
    ``kquant_mmq_{q2_k,q3_k}_grouped{16,128}``.

    tables u64 ``[projections, n_routed]``, addresses of each expert's blocks ``[N, K/256]``; y: ``y_rows`` rows of
    ``metrale_q8_1_quantize_bf16``, D2S6 for Q2_K, D4 for Q3_K; rows u32: y's row of each row, or null for the same;
    tiles and n_tiles of ``moe_grouped_tiles`` with ``tile_rows`` up to the kernel's suffix, of which at most
    ``max_tiles``; out bf16 ``[projections, out_rows, N]``. Each row's bits are those of ``kquant_mmq128``, whatever
    the tiles. Refuses ``K`` that is not a positive multiple of 256, ``N``, ``n_routed``, ``out_rows``,
    ``max_tiles`` or ``projections`` of 0, ``y_rows`` of 0, null pointers (but ``rows``).
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t tables_ = as_ptr(tables, "tables", gpu, s), y_ = as_ptr(y, "y", gpu, s)
    cdef uint64_t rows_ = as_ptr(rows, "rows", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint64_t tiles_ = as_ptr(tiles, "tiles", gpu, s), n_tiles_ = as_ptr(n_tiles, "n_tiles", gpu, s)
    cdef uint32_t K_ = u32("K", K), N_ = u32("N", N), n_routed_ = u32("n_routed", n_routed)
    cdef uint32_t out_rows_ = u32("out_rows", out_rows), y_rows_ = u32("y_rows", y_rows)
    cdef uint32_t max_tiles_ = u32("max_tiles", max_tiles), projections_ = u32("projections", projections)
    with nogil:
        c_kquant_mmq_grouped(gpu, kernel, tables_, y_, rows_, out_, tiles_, n_tiles_, K_, N_, n_routed_, out_rows_,
                             y_rows_, max_tiles_, projections_, s)


cdef int c_kquant_mmq_grouped(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t rows,
                              uint64_t out, uint64_t tiles, uint64_t n_tiles, uint32_t K, uint32_t N, uint32_t
                              n_routed, uint32_t out_rows, uint32_t y_rows, uint32_t max_tiles, uint32_t projections,
                              uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, MMQ_GROUPED)
    check_grouped(tables, y, 16, rows, out, tiles, n_tiles, K, N, n_routed, out_rows)
    positive(b"y_rows", y_rows)
    positive(b"max_tiles", max_tiles)
    positive(b"projections", projections)
    launch_geometry(&l, ceil_div(N, TILE_ROWS), max_tiles, projections, TILE_THREADS, 1, 1, 0)
    push_ptr(&l, tables)
    push_ptr(&l, y)
    push_ptr(&l, rows)
    push_ptr(&l, out)
    push_ptr(&l, tiles)
    push_ptr(&l, n_tiles)
    push_u32(&l, K)
    push_u32(&l, N)
    push_u32(&l, n_routed)
    push_u32(&l, out_rows)
    push_u32(&l, y_rows)
    return launch(gpu, kernel, &l, stream)


cdef int check_selections(uint32_t tokens, uint32_t topk, uint32_t n_routed) except -1 nogil:
    positive(b"tokens", tokens)
    at_most(b"n_routed", n_routed, MAX_ROUTED)
    return at_most(b"topk", topk, min(n_routed, <uint32_t>MAX_PICKS))


cdef int check_grouped(uint64_t tables, uint64_t y, uint64_t y_alignment, uint64_t rows, uint64_t out, uint64_t tiles,
                       uint64_t n_tiles, uint32_t K, uint32_t N, uint32_t n_routed, uint32_t out_rows) except -1 nogil:
    device_ptr(b"tables", tables, 8)
    device_ptr(b"y", y, y_alignment)
    nullable_ptr(b"rows", rows, 4)
    device_ptr(b"out", out, 2)
    device_ptr(b"tiles", tiles, 16)
    device_ptr(b"n_tiles", n_tiles, 4)
    multiple(b"K", K, SUPER_BLOCK)
    positive(b"N", N)
    at_most(b"n_routed", n_routed, MAX_ROUTED)
    return positive(b"out_rows", out_rows)
