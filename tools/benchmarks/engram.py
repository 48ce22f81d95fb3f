# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times the engram: its kernels and a layer's step against the bytes they must move, and the hash on the host.

Timed as in ``kernels``. Rows are gathered from a table that is far larger than the L2, by random ids.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import metrale
from benchmarks.kernels import DIM, WKV_K, WKV_N, Bench, Case
from benchmarks.kernels import table as kernel_table
from metrale import ops
from metrale.engram_v41 import EngramHasher, EngramTables, EngramV41
from metrale.formats.kquant import Q2_K, kquant_weight_bytes
from metrale.formats.load import upload_engram_layer
from metrale.formats.synthetic import random_engram_layer

__all__ = ["run", "table"]

# DeepSeek-V4.1-Flash, but for the table, which has 96 times as many rows there.
HC, COLS, HEADS, NGRAM, EPS = 4, 24, 8, 4, 1e-6
TABLE_ROWS = 4_000_000
PROMPT = 512
LAYERS = 8
HASHED = 100_000
HASH_RUNS = 5


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: the copy rate, a row a case, and the hasher's times."""
    bench = Bench(gpu)
    copy_rate = bench.copy_rate()
    rows = []
    for case in cases(bench):
        us = bench.time(case.launches)
        floor = case.nbytes / copy_rate * 1e6
        row = {"case": case.name, "shape": case.shape, "bytes": case.nbytes, "floor_us": floor, "us": us}
        rows.append(row | {"times_floor": us / floor, "gb_per_s": case.nbytes / us / 1e3})
        bench.release()
    return {"copy_gb_per_s": copy_rate / 1e9, "rows": rows, "hasher": hasher_times()}


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown."""
    hasher = facts["hasher"]
    return (
        f"{kernel_table(facts)}\n\nEngramHasher, on the host: {HASHED:,} tokens at once in "
        f"{hasher['prompt_ms']:.1f} ms, one more in {hasher['token_us']:.1f} us, for {hasher['sites']} sites of {COLS} "
        f"columns."
    )


def cases(bench: Bench) -> Iterator[Case]:
    yield projection(bench)
    yield expansion(bench)
    for tokens in (1, PROMPT):
        yield gate(bench, tokens)
        yield gather(bench, tokens)
        yield device_hash(bench, tokens)
    yield step(bench, 1)
    yield step(bench, 1, at_once=True)
    yield step(bench, PROMPT)


def projection(bench: Bench) -> Case:
    kernel = bench.gpu.kernel("engram_v41", "engram_v41_wkv_q2k_gemv")
    nbytes = kquant_weight_bytes(WKV_N, WKV_K, Q2_K.block_bytes) + 2 * (WKV_N + WKV_K)

    def make() -> Callable[[], None]:
        a, c = bench.bf16(WKV_K), bench.buffer(2 * WKV_N)
        b = bench.upload(bench.blocks(Q2_K, WKV_N, WKV_K))
        return lambda: ops.engram_v41_wkv_q2k_gemv(bench.gpu, kernel, a, b, c, WKV_N, WKV_K, None)

    return Case("engram_v41_wkv_q2k_gemv", f"{WKV_N} x {WKV_K}", nbytes, bench.sets(nbytes, make))


def expansion(bench: Bench) -> Case:
    kernel = bench.gpu.kernel("dequant_gguf_bf16", "dequant_q2_k_to_bf16")
    blocks, row_bytes = WKV_N * WKV_K // 256, Q2_K.row_bytes(WKV_K)
    nbytes = blocks * (Q2_K.block_bytes + 512)

    def make() -> Callable[[], None]:
        raw, out = bench.upload(bench.blocks(Q2_K, WKV_N, WKV_K)), bench.buffer(512 * blocks)
        return lambda: ops.dequant_q2_k_to_bf16(bench.gpu, kernel, raw, out, blocks, row_bytes, None)

    return Case("dequant_q2_k_to_bf16", f"{WKV_N} x {WKV_K}", nbytes, bench.sets(nbytes, make))


def gate(bench: Bench, tokens: int) -> Case:
    kernel = bench.gpu.kernel("engram_v41", "engram_v41_gate")
    nbytes = tokens * (2 * 4 * HC * DIM + 2 * (HC + 1) * DIM) + 4 * HC * DIM

    def make() -> Callable[[], None]:
        streams = bench.upload(bench.rng.standard_normal((tokens, HC, DIM), np.float32))
        kv, qk = bench.bf16(tokens, HC + 1, DIM), bench.upload(bench.rng.standard_normal((HC, DIM), np.float32))
        return lambda: ops.engram_v41_gate(bench.gpu, kernel, streams, kv, qk, DIM, HC, EPS, tokens, None)

    return Case("engram_v41_gate", f"{tokens} tokens, {HC} x {DIM}", nbytes, bench.sets(nbytes, make))


def gather(bench: Bench, tokens: int) -> Case:
    kernel = bench.gpu.kernel("engram_v41", "engram_v41_rows_gather")
    rows = tokens * COLS
    nbytes = rows * (8 + Q2_K.block_bytes + 512)
    blocks = bench.upload(bench.blocks(Q2_K, TABLE_ROWS, 256))

    def make() -> Callable[[], None]:
        ids, out = bench.upload(bench.rng.integers(0, TABLE_ROWS, rows)), bench.buffer(512 * rows)
        flag = bench.upload(np.zeros(1, np.uint32))
        return lambda: ops.engram_v41_rows_gather(bench.gpu, kernel, ids, blocks, out, rows, TABLE_ROWS, flag, None)

    return Case("engram_v41_rows_gather", f"{rows} rows of {TABLE_ROWS:,}", nbytes, bench.sets(nbytes, make))


def device_hash(bench: Bench, tokens: int) -> Case:
    kernel = bench.gpu.kernel("engram_v41", "engram_v41_hash")
    t = hash_tables(bench.rng)
    nbytes = 4 * (tokens + NGRAM - 1) + 8 * t.sites * (tokens * COLS + NGRAM + 2 * COLS)
    start = 1000

    def make() -> Callable[[], None]:
        compressed = bench.upload(bench.rng.integers(0, 100_000, start + tokens).astype(np.int32))
        out = bench.buffer(8 * t.sites * tokens * COLS)
        constants = [bench.upload(values) for values in (t.multipliers, t.primes, t.offsets)]
        return lambda: ops.engram_v41_hash(
            bench.gpu, kernel, compressed, out, tokens, start, *constants, t.sites, NGRAM, HEADS, t.pad, None
        )

    return Case("engram_v41_hash", f"{tokens} tokens, {t.sites} sites", nbytes, bench.sets(nbytes, make))


def step(bench: Bench, tokens: int, at_once: bool = False) -> Case:
    """A token, or several, through layer after layer: their weights are larger than the L2."""
    weights = kquant_weight_bytes(WKV_N, WKV_K, Q2_K.block_bytes) if tokens == 1 else 2 * WKV_N * WKV_K
    nbytes = weights + tokens * (COLS * Q2_K.block_bytes + 2 * 4 * HC * DIM) + 4 * HC * DIM
    engram = EngramV41(bench.gpu, DIM, HC, 256, COLS, EPS, tokens)
    bench.held.append(engram)

    def make(layer: int) -> Callable[[], None]:
        spec = random_engram_layer(
            layer, layer=layer, dim=DIM, hc=HC, heads=HEADS, max_ngram=NGRAM, table_rows=TABLE_ROWS // LAYERS
        )
        loaded = upload_engram_layer(bench.gpu, spec, several_tokens=tokens > 1)
        bench.held.append(loaded)
        engram.add_layer(loaded.weights)
        ids = bench.upload(bench.rng.integers(0, spec.table.shape[0], tokens * COLS))
        streams = bench.upload(bench.rng.standard_normal((tokens, HC, DIM), np.float32))

        def launch() -> None:
            if at_once:
                engram.apply_ids(layer, ids, streams)
                return
            engram.rows_from_ids(layer, ids, tokens)
            engram.apply(layer, streams, tokens)

        return launch

    name = "EngramV41.apply_ids" if at_once else "EngramV41.rows_from_ids, apply"
    return Case(name, f"{tokens} tokens", nbytes, [make(layer) for layer in range(LAYERS)])


def hash_tables(rng: np.random.Generator) -> EngramTables:
    """Of two sites, of the real model's size."""
    primes = 16_000_057 + 2 * np.arange(2 * COLS).reshape(2, COLS)
    return EngramTables(
        token_map=rng.permutation(129_280).astype(np.int32),
        pad_id=2,
        multipliers=rng.integers(0, 2**45, (2, NGRAM), np.uint64) * np.uint64(2) + np.uint64(1),
        primes=primes,
        offsets=np.cumsum(primes, axis=1) - primes,
        table_rows=primes.sum(axis=1),
    )


def hasher_times() -> dict[str, float]:
    """Medians of a prompt, and of a token after it."""
    rng = np.random.default_rng(0)
    tables = hash_tables(rng)
    tokens = rng.integers(0, len(tables.token_map), HASHED)
    prompts, singles = [], []
    for _ in range(HASH_RUNS):
        hasher = EngramHasher(tables, HASHED + 100)
        start = time.perf_counter()
        hasher.append(tokens)
        prompts.append(time.perf_counter() - start)
        for token in tokens[:100]:
            start = time.perf_counter()
            hasher.append([token])
            singles.append(time.perf_counter() - start)
    return {
        "prompt_ms": statistics.median(prompts) * 1e3,
        "token_us": statistics.median(singles) * 1e6,
        "sites": tables.sites,
    }
