# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times the MoE's kernels and whole layers at DeepSeek-V4.1-Flash's shapes, against their targets.

Timed as in ``kernels``. References are of another day, on the same model of GPU: llama.cpp's kernels
are built into it, and are not called here.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import metrale
from benchmarks.kernels import DIM, INTER, ROUTED, TOPK, Bench
from metrale import ops
from metrale.formats.kquant import Q2_K, Q3_K, kquant_mmq_act_bytes, kquant_weight_bytes

__all__ = ["run", "table"]

LAYOUTS = {Q2_K: "d2s6", Q3_K: "d4"}
SQUARE = 5120


class Row(NamedTuple):
    """What to time: its bytes, its operations (0: bytes are what counts), its target, and a reference in words."""

    name: str
    nbytes: int
    operations: int
    target: str
    reference: str
    launches: Callable[[], list[Callable[[], None]]]


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: the copy rate, and a row a case."""
    bench = Bench(gpu)
    copy_rate = bench.copy_rate()
    rows = []
    for row in _rows(bench):
        us = bench.time(row.launches())
        bench.release()
        facts = {"case": row.name, "bytes": row.nbytes, "floor_us": row.nbytes / copy_rate * 1e6, "us": us}
        facts |= {"tops": row.operations / us / 1e6 or None, "target": row.target, "reference": row.reference}
        rows.append(facts)
    return {"copy_gb_per_s": copy_rate / 1e9, "rows": rows}


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"Device copy: {facts['copy_gb_per_s']:,.0f} GB/s.",
        "",
        "| case | MB | floor us | us | TOPS | target | reference, of another day |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for r in facts["rows"]:
        tops = "-" if r["tops"] is None else f"{r['tops']:.0f}"
        lines.append(
            f"| {r['case']} | {r['bytes'] / 1e6:.1f} | {r['floor_us']:.2f} | {r['us']:.2f} | {tops} "
            f"| {r['target'] or '-'} | {r['reference'] or '-'} |"
        )
    return "\n".join(lines)


def _rows(bench: Bench) -> Iterator[Row]:
    for case in bench.moe_cases():
        if case.name.startswith("moe_v41_router"):
            yield Row(
                f"`{case.name}`, {case.shape}", case.nbytes, 0, "4 us", "cuBLAS 8.2 / 7.4 us", _held(case.launches)
            )
        bench.release()
    targets = {"q2_k": ("15.5 us", "llama.cpp 49.2 us, in two launches"), "q3_k": ("11 us", "llama.cpp 49.4 us")}
    for case in bench.kquant_cases():
        if "_experts_" in case.name:
            target, reference = targets["q2_k" if "q2_k" in case.name else "q3_k"]
            yield Row(f"`{case.name}`, {case.shape}", case.nbytes, 0, target, reference, _held(case.launches))
        bench.release()
    for kind in (Q2_K, Q3_K):
        for m in (512, 2048):
            yield _mmq(bench, kind, m)
    yield _layer(bench, 1, "auto", "35 us", "llama.cpp's parts, over 115 us")
    yield _layer(bench, 8, "gemv", "", "")
    yield _layer(bench, 8, "mmq", "", "")
    yield _layer(bench, 64, "mmq", "", "")
    yield _layer(bench, 512, "mmq", "2,500 us, routed experts", "llama.cpp 28,900 us, routed experts")
    yield _layer(bench, 4096, "mmq", "6,000 us, routed experts", "llama.cpp 35,000 us, routed experts")


def _held(launches: list[Callable[[], None]]) -> Callable[[], list[Callable[[], None]]]:
    return lambda: launches


def _mmq(bench: Bench, kind: Any, m: int) -> Row:
    """A dense product at M = ``m``, without the quantiser."""
    gpu, name, n, k = bench.gpu, kind.name.lower(), SQUARE, SQUARE
    kernel = gpu.kernel("kquant_moe", f"metrale_{name}_mmq128_nc")
    quantise = gpu.kernel("kquant_moe", f"metrale_q8_1_quantize_{LAYOUTS[kind]}_bf16")
    nbytes = kquant_weight_bytes(n, k, kind.block_bytes) + kquant_mmq_act_bytes(m, k) + 2 * m * n

    def make() -> Callable[[], None]:
        y, out = bench.buffer(kquant_mmq_act_bytes(m, k)), bench.buffer(2 * m * n)
        ops.metrale_q8_1_quantize_bf16(gpu, quantise, bench.bf16(m, k), y, k, m, None)
        w = bench.upload(bench.blocks(kind, n, k))
        return lambda: ops.kquant_mmq128(gpu, kernel, w, y, out, n, m, k, k // 256, m, n, None)

    target = "350 TOPS" if m == 2048 else ""
    reference = {"Q2_K": {512: "66", 2048: "115"}, "Q3_K": {512: "124", 2048: "148"}}[kind.name][m]
    reference = f"llama.cpp {reference} TOPS"
    return Row(f"MMQ {kind.name}, {m} x {n} x {k}", nbytes, 2 * m * n * k, target, reference,
               lambda: bench.sets(nbytes, make))  # fmt: skip


def _layer(bench: Bench, tokens: int, path: str, target: str, reference: str) -> Row:
    """A whole layer: router, routed experts, shared expert. Of several tokens the bytes are those of all experts."""

    def launches() -> list[Callable[[], None]]:
        moe, _ = bench.layer(tokens)
        inputs = [bench.bf16(tokens, DIM) for _ in range(16 if tokens == 1 else 4)]
        return [lambda x=x: moe.forward(0, x, tokens=tokens, path=path) for x in inputs]  # type: ignore[misc]

    expert = 2 * kquant_weight_bytes(INTER, DIM, Q2_K.block_bytes) + kquant_weight_bytes(DIM, INTER, Q3_K.block_bytes)
    experts = min(ROUTED, tokens * TOPK) + 1
    operations = 0 if tokens == 1 else 2 * tokens * (TOPK + 1) * 3 * DIM * INTER
    name = f"layer, {tokens} tokens by {path}" if tokens > 1 else "layer, one token"
    return Row(name, experts * expert + 2 * ROUTED * DIM, operations, target, reference, launches)
