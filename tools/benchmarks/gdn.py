# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times the gated delta rule's verify steps against the bytes they must move.

A step is all launches of a batch, 32 sequences each, captured into a graph with further steps on other states, so that
a replay goes past the L2 cache; a time is the median over replays of CUDA events around one, divided by its steps. The
floor is the step's bytes over the rate of a large device copy in the same run: snapshots read the states once and
write them K times, a deferred step with its commit reads them twice and writes them once.
"""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import metrale
from benchmarks.kernels import PAST_L2, Bench
from metrale import ops
from metrale.ops.gdn import VERIFY_WY_TABLE_SEQS

BATCHES, TOKENS, HEADS, TYPES = (1, 8, 32, 128), (2, 4, 8, 16, 17), (32, 48), ("f32", "f16")
K_HEADS, DIM = 16, 128
STATE_BYTES = {"f32": 4, "f16": 2}
SNAPSHOTS, VERIFY, STEP = "snapshots", "deferred verify", "deferred verify + commit"
FLA = "flash-linear-attention"
MAX_STEPS = 64

# Of 32 v-heads and f32 states, by (batch, K).
VLLM_US = {(1, 4): 8.8, (32, 4): 127.0, (32, 16): 441.0, (128, 16): 2011.0}
VLLM_WHEN = "vLLM's Triton kernel, which keeps every state, as measured on an H200 in 2026 and not in this run"
TARGET_US = {
    **{(SNAPSHOTS, 1, 4): 6.0, (SNAPSHOTS, 32, 4): 88.0, (SNAPSHOTS, 32, 16): 300.0, (SNAPSHOTS, 128, 16): 1200.0},
    (STEP, 128, 16): 280.0,
}


class Shape(NamedTuple):
    """A case."""

    heads: int
    dtype: str
    batch: int
    tokens: int

    @property
    def h_bytes(self) -> int:
        """Of the states of the batch."""
        return self.batch * self.heads * DIM * DIM * STATE_BYTES[self.dtype]

    @property
    def rows_bytes(self) -> int:
        """Of query, key, value, output, gate and beta."""
        return self.batch * self.tokens * (2 * DIM * (2 * K_HEADS + 2 * self.heads) + 2 * 4 * self.heads)

    def step_bytes(self, way: str) -> int:
        """What a step must move."""
        corrections = 4 * self.batch * self.tokens * self.heads * DIM
        if way == SNAPSHOTS:
            return (1 + self.tokens) * self.h_bytes + self.rows_bytes
        verify = self.h_bytes + self.rows_bytes + corrections
        key_and_gate = self.batch * self.tokens * (2 * K_HEADS * DIM + 4 * self.heads)
        return verify if way == VERIFY else verify + 2 * self.h_bytes + corrections + key_and_gate


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: the copy rate, a row a case and way, and why others are missing."""
    bench = Bench(gpu)
    copy_rate = bench.copy_rate()
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for shape in map(Shape._make, product(HEADS, TYPES, BATCHES, TOKENS)):
        for way, steps in ways(bench, shape).items():
            rows.append(row(shape, way, bench.time(steps), copy_rate))
        bench.release()
        if shape.dtype == "f32" and FLA not in missing:
            try:
                rows.append(row(shape, FLA, fla_us(shape), copy_rate))
            except Exception as error:  # whatever it lacks: ours are measured all the same
                missing[FLA] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return {"copy_gb_per_s": copy_rate / 1e9, "rows": rows, "not_measured": missing}


def row(shape: Shape, way: str, us: float, copy_rate: float) -> dict[str, Any]:
    """The result of a case, with its floor, and target and reference if there are any."""
    facts: dict[str, Any] = {**shape._asdict(), "way": way, "us": us}
    if way != FLA:  # that one writes the last state only, and no corrections: it has no floor among these
        nbytes = shape.step_bytes(way)
        floor = nbytes / copy_rate * 1e6
        facts |= {"bytes": nbytes, "floor_us": floor, "times_floor": us / floor, "gb_per_s": nbytes / us / 1e3}
    if shape.heads == 32 and shape.dtype == "f32":
        target = TARGET_US.get((way, shape.batch, shape.tokens))
        if target is not None:
            facts |= {"target_us": target, "met": us <= target}
    return facts


def ways(bench: Bench, shape: Shape) -> dict[str, list[Callable[[], None]]]:
    """Each way as the steps of a replay."""
    count = min(MAX_STEPS, -(-PAST_L2 // shape.h_bytes))
    steps = [Arrays(bench, shape) for _ in range(count)]
    return {
        SNAPSHOTS: [arrays.snapshots for arrays in steps],
        VERIFY: [arrays.verify for arrays in steps],
        STEP: [arrays.verify_and_commit for arrays in steps],
    }


class Arrays:
    """The device arrays of a step, random, and its launches."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.gpu, self.shape = bench.gpu, shape
        heads, dtype, batch, tokens = shape
        rng, rows = bench.rng, (batch, tokens)
        key = rng.standard_normal((*rows, K_HEADS, DIM), np.float32)
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        self.q = bench.bf16(*rows, K_HEADS, DIM)
        self.k = bench.upload((key.view(np.uint32) >> 16).astype(np.uint16))
        self.v = bench.bf16(*rows, heads, DIM)
        self.gate, self.beta = (bench.upload(rng.uniform(0.5, 1, (*rows, heads)).astype(np.float32)) for _ in range(2))
        self.out = bench.buffer(2 * batch * tokens * heads * DIM)
        self.corrections = bench.buffer(4 * batch * tokens * heads * DIM)
        self.accepted = bench.upload(np.full(batch, tokens, np.int32))
        self.h = self.random_states(bench)
        inter = bench.buffer((tokens - 1) * shape.h_bytes)
        one = shape.h_bytes // batch
        self.tables = []
        for first, some in self.launches():
            table = np.zeros((tokens, VERIFY_WY_TABLE_SEQS), np.uint64)
            sequence = np.arange(first, first + some, dtype=np.uint64)
            table[0, :some] = int(self.h.ptr) + sequence * np.uint64(one)
            for t in range(1, tokens):
                copy = sequence * np.uint64(tokens - 1) + np.uint64(t - 1)
                table[t, :some] = int(inter.ptr) + copy * np.uint64(one)
            self.tables.append(bench.upload(table))
        self.f16 = "" if dtype == "f32" else "_f16"

    def random_states(self, bench: Bench) -> Any:
        """One head's values on the host, turned round for each next head: as random, without the time to make them."""
        heads, dtype, batch, _ = self.shape
        values = bench.rng.standard_normal(DIM * DIM).astype({"f32": np.float32, "f16": np.float16}[dtype])
        whole = np.stack([np.roll(values, 7 * i) for i in range(heads)])
        return bench.upload(np.broadcast_to(whole, (batch, *whole.shape)))

    def launches(self) -> Iterator[tuple[int, int]]:
        """The first sequence and the number of sequences of each."""
        for first in range(0, self.shape.batch, VERIFY_WY_TABLE_SEQS):
            yield first, min(VERIFY_WY_TABLE_SEQS, self.shape.batch - first)

    def sizes(self, batch: int) -> tuple[int, int, int, int, int, int, int, int]:
        heads = self.shape.heads
        return batch, K_HEADS, heads, DIM, DIM, K_HEADS * DIM, heads * DIM, heads

    def snapshots(self) -> None:
        """A step that keeps every state."""
        n, heads = self.shape.tokens, self.shape.heads
        family = "wyn" if n < 5 else "wy"
        kernel = self.gpu.kernel("gated_delta_rule_wyn", f"gated_delta_rule_{family}{n}{self.f16}_table")
        for (first, some), table in zip(self.launches(), self.tables, strict=True):
            at = first * n
            qk, v, g = 2 * at * K_HEADS * DIM, 2 * at * heads * DIM, 4 * at * heads
            ops.gdn_decode_wyn_table(
                self.gpu, kernel, table, self.q.ptr.offset(qk), self.k.ptr.offset(qk), self.v.ptr.offset(v),
                self.gate.ptr.offset(g), self.beta.ptr.offset(g), self.out.ptr.offset(v),
                table.ptr.offset(8 * VERIFY_WY_TABLE_SEQS), VERIFY_WY_TABLE_SEQS, *self.sizes(some), None,
            )  # fmt: skip

    def verify(self) -> None:
        """A step that keeps none."""
        kernel = self.gpu.kernel("gated_delta_rule_verify", f"gated_delta_rule_verify{self.shape.tokens}{self.f16}")
        ops.gated_delta_rule_verify(
            self.gpu, kernel, self.h, self.q, self.k, self.v, self.gate, self.beta, self.out, self.corrections,
            *self.sizes(self.shape.batch), None,
        )  # fmt: skip

    def verify_and_commit(self) -> None:
        """The same, all tokens accepted."""
        self.verify()
        kernel = self.gpu.kernel("gated_delta_rule_verify", f"gated_delta_rule_commit{self.f16}")
        ops.gated_delta_rule_commit(
            self.gpu, kernel, self.h, self.k, self.gate, self.corrections, self.accepted, self.shape.tokens,
            *self.sizes(self.shape.batch), None,
        )  # fmt: skip


def fla_us(shape: Shape) -> float:
    """Median microseconds of flash-linear-attention's recurrent kernel, which keeps the last state only."""
    import statistics

    import torch  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-not-found]

    from benchmarks.kernels import REPLAYS, WARM_UP

    def random(*dims: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*dims, device="cuda", dtype=dtype)

    rows = (shape.batch, shape.tokens)
    steps = []
    for _ in range(min(MAX_STEPS, -(-PAST_L2 // shape.h_bytes))):
        q, k, v = random(*rows, K_HEADS, DIM), random(*rows, K_HEADS, DIM), random(*rows, shape.heads, DIM)
        beta, gate = (random(*rows, shape.heads, dtype=torch.float32).sigmoid() for _ in range(2))
        state = random(shape.batch, shape.heads, DIM, DIM, dtype=torch.float32)
        arguments = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v, "g": gate.log(), "beta": beta}
        steps.append(arguments | {"initial_state": state, "output_final_state": True})

    def once() -> None:
        for arguments in steps:
            fused_recurrent_gated_delta_rule(**arguments)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(WARM_UP + REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[WARM_UP:]) / len(steps)


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"Device copy: {facts['copy_gb_per_s']:,.0f} GB/s. {K_HEADS} k-heads of {DIM}, states {DIM} x {DIM}; "
        f"microseconds of a step. vLLM: {VLLM_WHEN}. {FLA} keeps the last state only.",
        "",
        "| way | v-heads | states | batch | K | MB | floor us | us | times floor | GB/s | vLLM us | target us |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in facts["rows"]:
        vllm = vllm_us(r)
        target = "" if "target_us" not in r else f"{r['target_us']:g}: {'met' if r['met'] else 'not met'}"
        known = "bytes" in r
        cells = [
            *(r["way"], r["heads"], r["dtype"], r["batch"], r["tokens"]),
            f"{r['bytes'] / 1e6:.1f}" if known else "",
            f"{r['floor_us']:.1f}" if known else "",
            f"{r['us']:.1f}",
            f"{r['times_floor']:.2f}" if known else "",
            f"{r['gb_per_s']:,.0f}" if known else "",
            "" if vllm is None else f"{vllm:g}",
            target,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [f"\nNot measured: {way}: {reason}" for way, reason in facts["not_measured"].items()]
    return "\n".join(lines)


def vllm_us(r: dict[str, Any]) -> float | None:
    """The dated reference of a row of snapshots."""
    if r["way"] != SNAPSHOTS or r["heads"] != 32 or r["dtype"] != "f32":
        return None
    return VLLM_US.get((r["batch"], r["tokens"]))


CHART_HEADS, CHART_TYPE, CHART_TOKENS = 32, "f32", 16


def lines(facts: dict[str, Any]) -> dict[str, dict[int, float]]:
    """The chart's lines: microseconds by batch, of the ways, the floors of the two complete ones, and vLLM."""
    found: dict[str, dict[int, float]] = {}
    for r in facts["rows"]:
        if (r["heads"], r["dtype"], r["tokens"]) != (CHART_HEADS, CHART_TYPE, CHART_TOKENS):
            continue
        found.setdefault(r["way"], {})[r["batch"]] = r["us"]
        if r["way"] in (SNAPSHOTS, STEP):
            found.setdefault(f"{r['way']}, floor", {})[r["batch"]] = r["floor_us"]
        vllm = vllm_us(r)
        if vllm is not None:
            found.setdefault("vLLM, 2026", {})[r["batch"]] = vllm
    return found


def chart(facts: dict[str, Any], path: Path) -> None:
    """Time against batch as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "metrale"}
    ):  # the same bytes for the same facts
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for name, points in lines(facts).items():
            axes.plot(list(points), list(points.values()), "--" if name.endswith("floor") else "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(BATCHES, list(map(str, BATCHES)))
        axes.set_xlabel("sequences")
        axes.set_ylabel("microseconds a step")
        axes.set_title(
            f"K = {CHART_TOKENS}, {CHART_HEADS} v-heads, {CHART_TYPE}: "
            + "{gpu}, driver {driver}, {date}, commit {commit}".format(**facts),
            fontsize=10,
        )
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
