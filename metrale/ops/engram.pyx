# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""Launchers of modules ``engram_v41`` and ``dequant_gguf_bf16``."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport launch, launch_geometry, push_f32, push_ptr, push_u32, push_u64
from metrale.ops.check cimport at_most, ceil_div, device_ptr, f32, kernel_in, multiple, positive, u32, u64

cdef enum:
    SUPER_BLOCK = 256
    Q2_K_BYTES = 84
    BLOCK = 256
    BLOCKS_A_BLOCK = 16       # Q2_K blocks a thread block decodes
    GEMV_ROWS = 16
    GEMV_BLOCKS_A_SM = 3
    GEMV_SHARED = 4 * 16 * 8 * 84 + 8 * 16 * 4  # bytes: stages of a chunk of 16 rows, the sums of 8 warps; x behind
    MAX_STREAMS = 4
    MAX_NGRAM = 64
    MAX_GRID_Y = 65535


def dequant_q2_k_to_bf16(GpuBackend gpu not None, KernelHandle kernel not None, raw, out, n_blocks, row_bytes, stream):
    """Q2_K blocks to bf16 ``[n_blocks, 256]``: the bf16 nearest to ggml's f32 values.

    raw: rows of ``row_bytes`` bytes, each of ``row_bytes // 84`` blocks; what is left of a row is not read. raw is
    4-byte aligned, out 8-byte. Refuses ``n_blocks`` of 0, ``row_bytes`` under 84 or not a multiple of 4, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t raw_ = as_ptr(raw, "raw", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint32_t n_blocks_ = u32("n_blocks", n_blocks), row_bytes_ = u32("row_bytes", row_bytes)
    with nogil:
        c_dequant_q2_k_to_bf16(gpu, kernel, raw_, out_, n_blocks_, row_bytes_, s)


cdef int c_dequant_q2_k_to_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t raw, uint64_t out, uint32_t n_blocks,
                                uint32_t row_bytes, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"dequant_q2_k_to_bf16")
    device_ptr(b"raw", raw, 4)
    device_ptr(b"out", out, 8)
    positive(b"n_blocks", n_blocks)
    if row_bytes < Q2_K_BYTES or row_bytes % 4 != 0:
        with gil:
            refuse("row_bytes", row_bytes, f"{Q2_K_BYTES} or more, a multiple of 4")
    launch_geometry(&l, ceil_div(n_blocks, BLOCKS_A_BLOCK), 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, raw)
    push_ptr(&l, out)
    push_u32(&l, n_blocks)
    push_u32(&l, row_bytes)
    return launch(gpu, kernel, &l, stream)


def engram_v41_wkv_q2k_gemv(GpuBackend gpu not None, KernelHandle kernel not None, A, B, C, N, K, stream):
    """``C[n] = bf16(sum over k of A[k] * bf16(B[n, k]))`` off Q2_K blocks: the bits of ``dense_gemv`` over B as bf16.

    A bf16 ``[K]``, B Q2_K ``[N, K]``, C bf16 ``[N]``. A block keeps A in shared memory: what does not
    fit is a ``LaunchError``. Refuses ``N`` of 0, ``K`` not a positive multiple of 256, null pointers, a B that is not
    4-byte aligned.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t A_ = as_ptr(A, "A", gpu, s), B_ = as_ptr(B, "B", gpu, s), C_ = as_ptr(C, "C", gpu, s)
    cdef uint32_t N_ = u32("N", N), K_ = u32("K", K)
    with nogil:
        c_engram_v41_wkv_q2k_gemv(gpu, kernel, A_, B_, C_, N_, K_, s)


cdef int c_engram_v41_wkv_q2k_gemv(GpuBackend gpu, KernelHandle kernel, uint64_t A, uint64_t B, uint64_t C, uint32_t N,
                                   uint32_t K, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"engram_v41_wkv_q2k_gemv")
    device_ptr(b"A", A, 2)
    device_ptr(b"B", B, 4)
    device_ptr(b"C", C, 2)
    positive(b"N", N)
    multiple(b"K", K, SUPER_BLOCK)
    gemv_geometry(&l, gpu, N, K)
    push_ptr(&l, A)
    push_ptr(&l, B)
    push_ptr(&l, C)
    push_u32(&l, N)
    push_u32(&l, K)
    return launch(gpu, kernel, &l, stream)


def engram_v41_wkv_q2k_gemv_gather(GpuBackend gpu not None, KernelHandle kernel not None, ids, table, B, C, N, K,
                                   table_rows, flag, stream):
    """``engram_v41_rows_gather`` of ``K / 256`` rows and ``engram_v41_wkv_q2k_gemv`` of them in one launch: the same
    bits, and no rows in between.

    ids i64 ``[K / 256]``, table Q2_K ``[table_rows, 256]``, B Q2_K ``[N, K]``, C bf16 ``[N]``; flag u32 ``[1]``, whose
    bit 0 an id outside the table sets. Refuses what either of the two refuses.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t ids_ = as_ptr(ids, "ids", gpu, s), table_ = as_ptr(table, "table", gpu, s)
    cdef uint64_t B_ = as_ptr(B, "B", gpu, s), C_ = as_ptr(C, "C", gpu, s), flag_ = as_ptr(flag, "flag", gpu, s)
    cdef uint32_t N_ = u32("N", N), K_ = u32("K", K)
    cdef uint64_t table_rows_ = u64("table_rows", table_rows)
    with nogil:
        c_engram_v41_wkv_q2k_gemv_gather(gpu, kernel, ids_, table_, B_, C_, N_, K_, table_rows_, flag_, s)


cdef int c_engram_v41_wkv_q2k_gemv_gather(GpuBackend gpu, KernelHandle kernel, uint64_t ids, uint64_t table,
                                          uint64_t B, uint64_t C, uint32_t N, uint32_t K, uint64_t table_rows,
                                          uint64_t flag, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"engram_v41_wkv_q2k_gemv_gather")
    device_ptr(b"ids", ids, 8)
    device_ptr(b"table", table, 4)
    device_ptr(b"B", B, 4)
    device_ptr(b"C", C, 2)
    device_ptr(b"flag", flag, 4)
    positive(b"N", N)
    multiple(b"K", K, SUPER_BLOCK)
    if table_rows == 0:
        positive(b"table_rows", 0)
    gemv_geometry(&l, gpu, N, K)
    push_ptr(&l, ids)
    push_ptr(&l, table)
    push_ptr(&l, B)
    push_ptr(&l, C)
    push_u32(&l, N)
    push_u32(&l, K)
    push_u64(&l, table_rows)
    push_ptr(&l, flag)
    return launch(gpu, kernel, &l, stream)


cdef void gemv_geometry(Launch* l, GpuBackend gpu, uint32_t N, uint32_t K) noexcept nogil:
    """Of the Q2_K GEMVs: as many blocks as run at once."""
    cdef uint32_t at_once = <uint32_t>(GEMV_BLOCKS_A_SM * gpu.sm_count)
    launch_geometry(l, min(ceil_div(N, GEMV_ROWS), at_once), 1, 1, BLOCK, 1, 1,
                    GEMV_SHARED + 2 * <size_t>K)


def engram_v41_gate(GpuBackend gpu not None, KernelHandle kernel not None, streams, kv, qk, dim, hc, eps, tokens,
                    stream):
    """Add the gated value to each stream, in place: ``h += sigmoid(g) * value``.

    With ``h = streams[t, c]``, ``key = kv[t, c]``, ``value = kv[t, hc]``: ``dot = sum(h * qk[c] * key) * dim^-0.5 *
    rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps)`` and ``g = copysign(sqrt(max(|dot|, 1e-6)), dot)``. streams f32
    ``[tokens, hc, dim]``, kv bf16 ``[tokens, hc + 1, dim]``, qk f32 ``[hc, dim]``. Refuses ``hc`` outside 1..4, sizes
    of 0, an ``eps`` that is negative or NaN, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t streams_ = as_ptr(streams, "streams", gpu, s), kv_ = as_ptr(kv, "kv", gpu, s)
    cdef uint64_t qk_ = as_ptr(qk, "qk", gpu, s)
    cdef uint32_t dim_ = u32("dim", dim), hc_ = u32("hc", hc), tokens_ = u32("tokens", tokens)
    cdef float eps_ = f32("eps", eps)
    with nogil:
        c_engram_v41_gate(gpu, kernel, streams_, kv_, qk_, dim_, hc_, eps_, tokens_, s)


cdef int c_engram_v41_gate(GpuBackend gpu, KernelHandle kernel, uint64_t streams, uint64_t kv, uint64_t qk,
                           uint32_t dim, uint32_t hc, float eps, uint32_t tokens, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"engram_v41_gate")
    device_ptr(b"streams", streams, 4)
    device_ptr(b"kv", kv, 2)
    device_ptr(b"qk", qk, 4)
    positive(b"dim", dim)
    at_most(b"hc", hc, MAX_STREAMS)
    if not eps >= 0:
        with gil:
            refuse("eps", eps, "0 or more")
    positive(b"tokens", tokens)
    launch_geometry(&l, tokens, hc, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, streams)
    push_ptr(&l, kv)
    push_ptr(&l, qk)
    push_u32(&l, dim)
    push_u32(&l, hc)
    push_f32(&l, eps)
    return launch(gpu, kernel, &l, stream)


def engram_v41_rows_gather(GpuBackend gpu not None, KernelHandle kernel not None, ids, table, out, n_rows, table_rows,
                           flag, stream):
    """``out[i] = bf16(table[ids[i]])``: ids i64 ``[n_rows]``, table Q2_K ``[table_rows, 256]``, out bf16 ``[n_rows,
    256]``, all on the device; flag u32 ``[1]``.

    An id outside the table gives zeros and sets bit 0 of the flag, which is the caller's to clear. table is 4-byte
    aligned, out and ids 8-byte. Refuses ``n_rows`` and ``table_rows`` of 0, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t ids_ = as_ptr(ids, "ids", gpu, s), table_ = as_ptr(table, "table", gpu, s)
    cdef uint64_t out_ = as_ptr(out, "out", gpu, s), flag_ = as_ptr(flag, "flag", gpu, s)
    cdef uint32_t n_rows_ = u32("n_rows", n_rows)
    cdef uint64_t table_rows_ = u64("table_rows", table_rows)
    with nogil:
        c_engram_v41_rows_gather(gpu, kernel, ids_, table_, out_, n_rows_, table_rows_, flag_, s)


cdef int c_engram_v41_rows_gather(GpuBackend gpu, KernelHandle kernel, uint64_t ids, uint64_t table, uint64_t out,
                                  uint32_t n_rows, uint64_t table_rows, uint64_t flag,
                                  uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"engram_v41_rows_gather")
    device_ptr(b"ids", ids, 8)
    device_ptr(b"table", table, 4)
    device_ptr(b"out", out, 8)
    device_ptr(b"flag", flag, 4)
    positive(b"n_rows", n_rows)
    if table_rows == 0:
        positive(b"table_rows", 0)
    launch_geometry(&l, ceil_div(n_rows, BLOCKS_A_BLOCK), 1, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, ids)
    push_ptr(&l, table)
    push_ptr(&l, out)
    push_u32(&l, n_rows)
    push_u64(&l, table_rows)
    push_ptr(&l, flag)
    return launch(gpu, kernel, &l, stream)


def engram_v41_hash(GpuBackend gpu not None, KernelHandle kernel not None, compressed, out, tokens, start, multipliers,
                    primes, offsets, sites, ngram, heads, pad, stream):
    """Row ids of positions ``start`` to ``start + tokens``, i64 ``[sites, tokens, (ngram - 1) * heads]``: the ids of
    ``EngramHasher``.

    compressed i32 ``[start + tokens]``, the sequence's compressed ids from its start; multipliers u64 ``[sites,
    ngram]``; primes (1 or more) and offsets i64 ``[sites, (ngram - 1) * heads]``; pad the pad's compressed id. Refuses
    sizes of 0, ``ngram`` outside 2..64, null pointers.
    """
    cdef uint64_t s = gpu.as_stream(stream)
    cdef uint64_t compressed_ = as_ptr(compressed, "compressed", gpu, s), out_ = as_ptr(out, "out", gpu, s)
    cdef uint64_t multipliers_ = as_ptr(multipliers, "multipliers", gpu, s)
    cdef uint64_t primes_ = as_ptr(primes, "primes", gpu, s), offsets_ = as_ptr(offsets, "offsets", gpu, s)
    cdef uint32_t tokens_ = u32("tokens", tokens), start_ = u32("start", start), sites_ = u32("sites", sites)
    cdef uint32_t ngram_ = u32("ngram", ngram), heads_ = u32("heads", heads), pad_ = u32("pad", pad)
    with nogil:
        c_engram_v41_hash(gpu, kernel, compressed_, out_, tokens_, start_, multipliers_, primes_, offsets_, sites_,
                          ngram_, heads_, pad_, s)


cdef int c_engram_v41_hash(GpuBackend gpu, KernelHandle kernel, uint64_t compressed, uint64_t out, uint32_t tokens,
                           uint32_t start, uint64_t multipliers, uint64_t primes, uint64_t offsets, uint32_t sites,
                           uint32_t ngram, uint32_t heads, uint32_t pad, uint64_t stream) except -1 nogil:
    cdef Launch l
    kernel_in(kernel, b"engram_v41_hash")
    device_ptr(b"compressed", compressed, 4)
    device_ptr(b"out", out, 8)
    device_ptr(b"multipliers", multipliers, 8)
    device_ptr(b"primes", primes, 8)
    device_ptr(b"offsets", offsets, 8)
    positive(b"tokens", tokens)
    at_most(b"sites", sites, MAX_GRID_Y)
    if ngram < 2 or ngram > MAX_NGRAM:
        with gil:
            refuse("ngram", ngram, f"2 to {MAX_NGRAM}")
    positive(b"heads", heads)
    launch_geometry(&l, ceil_div(<uint64_t>tokens * (ngram - 1) * heads, BLOCK), sites, 1, BLOCK, 1, 1, 0)
    push_ptr(&l, compressed)
    push_ptr(&l, out)
    push_u32(&l, tokens)
    push_u32(&l, start)
    push_ptr(&l, multipliers)
    push_ptr(&l, primes)
    push_ptr(&l, offsets)
    push_u32(&l, sites)
    push_u32(&l, ngram)
    push_u32(&l, heads)
    push_u32(&l, pad)
    return launch(gpu, kernel, &l, stream)
