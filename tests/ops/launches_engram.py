# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernels of modules engram_v41 and dequant_gguf_bf16 as functions of NumPy arrays, as in launches.py."""

import numpy as np
from launches import BF16, Arrays

from metrale import ops


def dequant_q2_k(gpu, raw, n_blocks=None):
    """bf16 `[n_blocks, 256]` of rows uint8 `[n, row bytes]`."""
    n_blocks = len(raw) * (raw.shape[1] // 84) if n_blocks is None else n_blocks
    with Arrays(gpu) as a:
        out = a.output((n_blocks, 256), BF16)
        kernel = gpu.kernel("dequant_gguf_bf16", "dequant_q2_k_to_bf16")
        ops.dequant_q2_k_to_bf16(gpu, kernel, a.input(raw), out, n_blocks, raw.shape[1], None)
        return out.read()


def wkv_gemv(gpu, x, weight, shift=0):
    """bf16 `[N]` of bf16 `[K]` and raw Q2_K rows `[N, row bytes]`; x lies `shift` bytes off, weight twice that."""
    n, k = len(weight), len(x)
    with Arrays(gpu) as a:
        out = a.output(n, BF16)
        kernel = gpu.kernel("engram_v41", "engram_v41_wkv_q2k_gemv")
        ops.engram_v41_wkv_q2k_gemv(gpu, kernel, a.input(x, shift), a.input(weight, 2 * shift), out, n, k, None)
        return out.read()


def wkv_gemv_gather(gpu, ids, table, weight):
    """`(out bf16 [N], flag)` of ids i64 `[K / 256]`, a table uint8 `[rows, 84]` and raw Q2_K rows `[N, row bytes]`."""
    n, k = len(weight), 256 * len(ids)
    with Arrays(gpu) as a:
        out, word = a.output(n, BF16), a.updated(np.zeros(1, np.uint32))
        kernel = gpu.kernel("engram_v41", "engram_v41_wkv_q2k_gemv_gather")
        inputs = (a.input(ids), a.input(table), a.input(weight))
        ops.engram_v41_wkv_q2k_gemv_gather(gpu, kernel, *inputs, out, n, k, len(table), word, None)
        return out.read(), int(word.read()[0])


def gate(gpu, streams, kv, qk, eps, shift=0):
    """f32 `[T, hc, dim]`; streams and qk lie `shift` bytes off, kv half that."""
    tokens, hc, dim = streams.shape
    with Arrays(gpu) as a:
        h = a.updated(streams, shift)
        kernel = gpu.kernel("engram_v41", "engram_v41_gate")
        ops.engram_v41_gate(
            gpu, kernel, h, a.input(kv, shift // 2), a.input(qk, shift), dim, hc, eps, tokens, None
        )  # fmt: skip
        return h.read()


def rows_gather(gpu, ids, table, table_rows=None, flag=0):
    """`(rows bf16 [n, 256], flag)` of ids i64 `[n]` and a table uint8 `[rows, 84]`."""
    with Arrays(gpu) as a:
        out, word = a.output((len(ids), 256), BF16), a.updated(np.array([flag], np.uint32))
        kernel = gpu.kernel("engram_v41", "engram_v41_rows_gather")
        rows = len(table) if table_rows is None else table_rows
        ops.engram_v41_rows_gather(gpu, kernel, a.input(ids), a.input(table), out, len(ids), rows, word, None)
        return out.read(), int(word.read()[0])


def hash_ids(gpu, compressed, tables, start=0):
    """i64 `[sites, tokens, cols]` of positions from `start` on."""
    tokens = len(compressed) - start
    with Arrays(gpu) as a:
        out = a.output((tables.sites, tokens, tables.cols), np.int64)
        constants = (a.input(values) for values in (tables.multipliers, tables.primes, tables.offsets))
        ops.engram_v41_hash(
            gpu, gpu.kernel("engram_v41", "engram_v41_hash"), a.input(compressed), out, tokens, start, *constants,
            tables.sites, tables.max_ngram, tables.heads, tables.pad, None,
        )  # fmt: skip
        return out.read()
