# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times the kernels on the GPU against the bytes they must move.

Each case is launched on rotating inputs larger than the L2 cache, captured into a graph, and replayed; a time is
the median over replays of CUDA events around one, divided by its launches. The floor is the case's bytes, each input
read once and each output written once, over the rate of a large device copy measured in the same run.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

import metrale
from benchmarks.driver_calls import check
from metrale import ops
from metrale.formats.kquant import Q2_K, Q3_K, Q6_K, kquant_q8_1_rows_bytes, kquant_weight_bytes
from metrale.formats.load import upload_moe_layer
from metrale.formats.synthetic import ArrayTensor, random_blocks, random_moe_layer
from metrale.moe_v41 import MoeV41

# DeepSeek-V4.1-Flash.
DIM, INTER, ROUTED, TOPK = 5120, 2304, 384, 6
WKV_N, WKV_K = 25600, 6144
CONV_CHANNELS, CONV_BATCH = 8192, 32
PAST_L2 = 256 << 20  # bytes of inputs to rotate through
MAX_SETS = 64
REPLAYS = 25
WARM_UP = 3
COPY_BYTES = 4 << 30


class Case(NamedTuple):
    """What to time: the bytes of a launch, and how to make and launch an input set."""

    name: str
    shape: str
    nbytes: int
    launches: list[Callable[[], None]]


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: the copy rate, and a row a case."""
    bench = Bench(gpu)
    copy_rate = bench.copy_rate()
    rows = []
    for case in bench.cases():
        us = bench.time(case.launches)
        floor = case.nbytes / copy_rate * 1e6
        row = {"case": case.name, "shape": case.shape, "bytes": case.nbytes, "floor_us": floor, "us": us}
        rows.append(row | {"times_floor": us / floor, "gb_per_s": case.nbytes / us / 1e3})
        bench.release()
    return {"copy_gb_per_s": copy_rate / 1e9, "rows": rows}


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"Device copy: {facts['copy_gb_per_s']:,.0f} GB/s.",
        "",
        "| case | shape | MB | floor us | us | times floor | GB/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in facts["rows"]:
        lines.append(
            f"| `{r['case']}` | {r['shape']} | {r['bytes'] / 1e6:.3f} | {r['floor_us']:.2f} | {r['us']:.2f} "
            f"| {r['times_floor']:.1f} | {r['gb_per_s']:,.0f} |"
        )
    return "\n".join(lines)


class Bench:
    """The cases, and the timing of one."""

    def __init__(self, gpu: metrale.GpuBackend) -> None:
        self.gpu = gpu
        self.stream = gpu.default_stream()
        self.rng = np.random.default_rng(0)
        self.held: list[Any] = []

    def time(self, launches: list[Callable[[], None]]) -> float:
        """Median microseconds of a launch."""
        for launch in launches:
            launch()
        self.gpu.synchronize()
        with self._graph(launches) as replay:
            return self.median_us(replay) / len(launches)

    def median_us(self, work: Callable[[], None]) -> float:
        """Median microseconds, between events, of what ``work`` queues."""
        start, end = self.gpu.create_event(timing=True), self.gpu.create_event(timing=True)
        times = []
        for _ in range(WARM_UP + REPLAYS):
            self.gpu.record_event(start)
            work()
            self.gpu.record_event(end)
            self.gpu.event_synchronize(end)
            times.append(self.gpu.event_elapsed_ms(start, end) * 1e3)
        self.gpu.destroy_event(start)
        self.gpu.destroy_event(end)
        return statistics.median(times[WARM_UP:])

    @contextmanager
    def _graph(self, launches: list[Callable[[], None]]) -> Iterator[Callable[[], None]]:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(self.stream, mode))
        for launch in launches:
            launch()
        graph = check(driver.cuStreamEndCapture(self.stream))
        executable = check(driver.cuGraphInstantiate(graph, 0))
        try:
            yield lambda: check(driver.cuGraphLaunch(executable, self.stream))
        finally:
            check(driver.cuGraphExecDestroy(executable))
            check(driver.cuGraphDestroy(graph))

    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a large device copy."""
        with self.gpu.buffer(COPY_BYTES) as a, self.gpu.buffer(COPY_BYTES) as b:
            self.gpu.memset(a, 1, COPY_BYTES)
            # Not in a graph, where the driver may give a copy to the slower copy engines.
            us = self.median_us(lambda: self.gpu.copy_d2d_async(a, b, COPY_BYTES, None))
        return 2 * COPY_BYTES / us * 1e6

    def release(self) -> None:
        """Free what the last case held."""
        while self.held:
            self.held.pop().free()

    def upload(self, array: np.ndarray) -> Any:
        self.held.append(self.gpu.upload(np.ascontiguousarray(array)))
        return self.held[-1]

    def buffer(self, nbytes: int) -> Any:
        self.held.append(self.gpu.buffer(nbytes))
        return self.held[-1]

    def bf16(self, *shape: int) -> Any:
        values = self.rng.standard_normal(shape, np.float32)
        return self.upload((values.view(np.uint32) >> 16).astype(np.uint16))

    def q8(self, rows: int, k: int) -> Any:
        y = self.buffer(kquant_q8_1_rows_bytes(rows, k))
        kernel = self.gpu.kernel("kquant_moe", "kquant_q8_1_rows_bf16")
        ops.kquant_q8_1_rows_bf16(self.gpu, kernel, self.bf16(rows, k), y, k, rows, None)
        return y

    def sets(self, nbytes: int, make: Callable[[], Callable[[], None]]) -> list[Callable[[], None]]:
        """As many input sets as go past the L2, each a launch."""
        return [make() for _ in range(min(MAX_SETS, -(-PAST_L2 // nbytes)))]

    def cases(self) -> Iterator[Case]:
        yield from self.dense_cases()
        yield from self.kquant_cases()
        yield from self.moe_cases()
        yield self.conv_case()
        yield self.layer_case()

    def dense_cases(self) -> Iterator[Case]:
        kernel = self.gpu.kernel("gemv", "dense_gemv_bf16")
        for n, k in ((WKV_N, WKV_K), (INTER, DIM)):
            nbytes = 2 * (n * k + n + k)

            def make(n: int = n, k: int = k) -> Callable[[], None]:
                a, b, c = self.bf16(k), self.bf16(n, k), self.buffer(2 * n)
                return lambda: ops.dense_gemv(self.gpu, kernel, a, b, c, n, k, None)

            yield Case("dense_gemv_bf16", f"{n} x {k}", nbytes, self.sets(nbytes, make))

    def kquant_cases(self) -> Iterator[Case]:
        gpu = self.gpu
        quantise_kernel = gpu.kernel("kquant_moe", "kquant_q8_1_rows_bf16")
        nbytes = DIM * 2 + kquant_q8_1_rows_bytes(1, DIM)

        def quantise() -> Callable[[], None]:
            x, y = self.bf16(1, DIM), self.buffer(kquant_q8_1_rows_bytes(1, DIM))
            return lambda: ops.kquant_q8_1_rows_bf16(gpu, quantise_kernel, x, y, DIM, 1, None)

        yield Case("kquant_q8_1_rows_bf16", f"1 x {DIM}", nbytes, self.sets(nbytes, quantise))

        swiglu_q8 = gpu.kernel("kquant_moe", "kquant_swiglu_q8_1_rows_bf16")
        nbytes = TOPK * (3 * 2 * INTER + 4) + kquant_q8_1_rows_bytes(TOPK, INTER)

        def swiglu() -> Callable[[], None]:
            gate, up, h = self.bf16(TOPK, INTER), self.bf16(TOPK, INTER), self.buffer(2 * TOPK * INTER)
            w, y = self.upload(np.ones(TOPK, np.float32)), self.buffer(kquant_q8_1_rows_bytes(TOPK, INTER))
            return lambda: ops.kquant_swiglu_q8_1_rows_bf16(gpu, swiglu_q8, gate, up, w, h, y, TOPK, INTER, 10.0, None)

        yield Case("kquant_swiglu_q8_1_rows_bf16", f"{TOPK} x {INTER}", nbytes, self.sets(nbytes, swiglu))

        for kind, suffix, n, k in (
            (Q2_K, "q2_k", INTER, DIM),
            (Q3_K, "q3_k", DIM, INTER),
            (Q6_K, "q6_k", INTER, DIM),
        ):
            kernel = gpu.kernel("kquant_moe", f"kquant_mmvq_{suffix}_w")
            for m in (1, 8):
                nbytes = kquant_weight_bytes(n, k, kind.block_bytes) + m * 2 * n + kquant_q8_1_rows_bytes(m, k)

                def one(kernel: Any = kernel, kind: Any = kind, n: int = n, k: int = k, m: int = m) -> Any:
                    w, y, out = self.upload(self.blocks(kind, n, k)), self.q8(m, k), self.buffer(2 * m * n)
                    return lambda: ops.kquant_mmvq_w(gpu, kernel, w, y, out, k, n, m, None)

                yield Case(f"kquant_mmvq_{suffix}_w", f"{n} x {k}, M = {m}", nbytes, self.sets(nbytes, one))

        for kind, suffix, experts, n, k in (
            (Q2_K, "q2_k", 2 * TOPK, INTER, DIM),
            (Q3_K, "q3_k", TOPK, DIM, INTER),
        ):
            matrix = kquant_weight_bytes(n, k, kind.block_bytes)
            shared = kind is Q2_K  # gate and up read one token's row, down a row an expert
            row = kquant_q8_1_rows_bytes(1, k)
            nbytes = experts * (matrix + 2 * n) + (1 if shared else experts) * row
            for warps, tail in ((2, "2"), (4, ""), (8, "8")):
                kernel = gpu.kernel("kquant_moe", f"kquant_mmvq_{suffix}_experts_w{tail}")

                def batch(
                    kernel: Any = kernel, kind: Any = kind, experts: int = experts, n: int = n, k: int = k,
                    matrix: int = matrix, shared: bool = shared, row: int = row, warps: int = warps,
                ) -> Callable[[], None]:  # fmt: skip
                    w = self.upload(np.concatenate([self.blocks(kind, n, k)] * experts))
                    bases = np.array([int(w.ptr) + e * matrix for e in range(experts)], np.uint64)
                    tables, y, out = self.upload(bases), self.q8(experts, k), self.buffer(2 * experts * n)
                    return lambda: ops.kquant_mmvq_experts_w(
                        gpu, kernel, tables, y, out, k, n, 1, 0 if shared else row, experts, warps, None
                    )

                name = f"kquant_mmvq_{suffix}_experts_w{tail}"
                yield Case(name, f"{experts} of {n} x {k}", nbytes, self.sets(nbytes, batch))

    def blocks(self, kind: Any, n: int, k: int) -> np.ndarray:
        """Random rows; Q6_K as random bytes with a small scale."""
        if kind is not Q6_K:
            return random_blocks(self.rng, kind, (n, k)).array
        raw = self.rng.integers(0, 256, (n, k // 256, kind.block_bytes), np.uint8)
        raw[..., 208:] = np.array([1e-4], np.float16).view(np.uint8)
        return raw.reshape(n, -1)

    def moe_cases(self) -> Iterator[Case]:
        gpu = self.gpu

        def kernel(name: str) -> Any:
            return gpu.kernel("moe_v41", name)

        for name, launcher in (
            ("moe_v41_router_gemv_f32out", ops.moe_v41_router_gemv_f32out),
            ("moe_v41_router_gemv_f32out_products", ops.moe_v41_router_gemv_f32out_products),
        ):
            for m in (1, 8):
                nbytes = 2 * (ROUTED + m) * DIM + 4 * m * ROUTED

                def router(name: str = name, launcher: Any = launcher, m: int = m) -> Callable[[], None]:
                    a, b, c = self.bf16(m, DIM), self.bf16(ROUTED, DIM), self.buffer(4 * m * ROUTED)
                    return lambda: launcher(gpu, kernel(name), a, b, c, m, ROUTED, DIM, None)

                yield Case(name, f"{ROUTED} x {DIM}, M = {m}", nbytes, self.sets(nbytes, router))

        header = 4 * (1 + 3 * TOPK)
        nbytes = ROUTED * 12 + header + TOPK * (4 + 4 + 24)

        def select() -> Callable[[], None]:
            logits, bias = (self.upload(self.rng.standard_normal(ROUTED, np.float32)) for _ in range(2))
            slots, hdr = self.upload(np.arange(ROUTED, dtype=np.int32)), self.buffer(header)
            plan_w, rows, ptrs = self.buffer(4 * TOPK), self.buffer(4 * TOPK), self.buffer(24 * TOPK)
            return lambda: ops.moe_v41_route_select(
                gpu, kernel("moe_v41_route_select"), logits, bias, ROUTED, TOPK, 1.0, 1.5, True, slots, 1 << 40,
                12810240, 0, 3870720, 7741440, hdr, plan_w, rows, ptrs, None,
            )  # fmt: skip

        yield Case("moe_v41_route_select", f"{ROUTED} experts, top-{TOPK}", nbytes, self.sets(nbytes, select))

        def elementwise(name: str, nbytes: int, launch: Callable[..., None], *sizes: int) -> Case:
            def make() -> Callable[[], None]:
                acc = self.upload(self.rng.standard_normal(DIM, np.float32))
                rows = self.bf16(TOPK, DIM)
                return lambda: launch(gpu, kernel(name), acc, rows, *sizes, None)

            shape = " x ".join(map(str, sizes))
            return Case(name, shape, nbytes, self.sets(nbytes, make))

        yield elementwise("moe_v41_sum_rows", DIM * (8 + 2 * TOPK), ops.moe_v41_sum_rows, TOPK, DIM)
        yield elementwise("moe_v41_accumulate", DIM * 10, ops.moe_v41_accumulate, DIM)
        yield elementwise("moe_v41_finish", DIM * 6, ops.moe_v41_finish, DIM)
        nbytes = TOPK * (3 * 2 * INTER + 4)

        def swiglu() -> Callable[[], None]:
            gate, up, h = self.bf16(TOPK, INTER), self.bf16(TOPK, INTER), self.buffer(2 * TOPK * INTER)
            w = self.upload(np.ones(TOPK, np.float32))
            return lambda: ops.moe_v41_swiglu(gpu, kernel("moe_v41_swiglu"), gate, up, w, h, TOPK, INTER, 10.0, None)

        yield Case("moe_v41_swiglu", f"{TOPK} x {INTER}", nbytes, self.sets(nbytes, swiglu))

        def table_set() -> Callable[[], None]:
            table = self.buffer(4 * 64 * ROUTED)
            triples = np.stack([np.zeros(ROUTED), np.arange(ROUTED), np.arange(ROUTED)], 1).astype(np.int32)
            staged = self.upload(triples)
            return lambda: ops.moe_v41_slot_table_set(
                gpu, kernel("moe_v41_slot_table_set"), table, ROUTED, staged, ROUTED, None
            )

        nbytes = ROUTED * 16
        yield Case("moe_v41_slot_table_set", f"{ROUTED} triples", nbytes, self.sets(nbytes, table_set))

    def conv_case(self) -> Case:
        kernel = self.gpu.kernel("causal_conv1d", "causal_conv1d_update_chunk2")
        channels = CONV_BATCH * CONV_CHANNELS
        nbytes = channels * (3 * 16 + 2 * 2 * 2) + CONV_CHANNELS * 8

        def make() -> Callable[[], None]:
            state = self.upload(self.rng.standard_normal((channels, 4), np.float32))
            mid, x, out = self.buffer(channels * 16), self.bf16(2 * channels), self.buffer(channels * 4)
            weight = self.bf16(CONV_CHANNELS, 4)
            return lambda: ops.conv1d_update_chunk2(
                self.gpu, kernel, state, x, weight, out, mid, CONV_CHANNELS, 4, CONV_BATCH, None
            )

        shape = f"{CONV_CHANNELS} channels, batch {CONV_BATCH}"
        return Case("causal_conv1d_update_chunk2", shape, nbytes, self.sets(nbytes, make))

    def layer_case(self) -> Case:
        """A token a launch."""
        moe, expert = self.layer(1)
        nbytes = (TOPK + 1) * expert + 2 * ROUTED * DIM

        def make() -> Callable[[], None]:
            x = self.bf16(DIM)
            return lambda: moe.forward(0, x)

        shape = f"{ROUTED} experts, top-{TOPK}, shared expert"
        return Case("MoeV41.forward", shape, nbytes, [make() for _ in range(16)])

    def layer(self, max_tokens: int) -> tuple[MoeV41, int]:
        """A layer of 384 experts, which repeat 16 sets of random blocks, and the bytes of an expert."""
        spec = random_moe_layer(0, dim=DIM, inter=INTER, n_routed=16, topk=TOPK)
        router = ArrayTensor(spec.router.type, (ROUTED, DIM), self._router())
        bias = ArrayTensor(spec.bias.type, (ROUTED,), np.zeros(ROUTED, np.float32))
        spec = dataclasses.replace(
            spec, n_routed=ROUTED, router=router, bias=bias,
            gate=Repeated(spec.gate), up=Repeated(spec.up), down=Repeated(spec.down),
        )  # fmt: skip
        loaded = upload_moe_layer(self.gpu, spec)
        self.held.append(loaded)
        moe = MoeV41(self.gpu, dataclasses.replace(loaded.cfg, max_tokens=max_tokens))
        self.held.append(moe)
        moe.add_layer(0, loaded.weights, loaded.experts)
        return moe, loaded.experts.layout.slot_bytes

    def _router(self) -> np.ndarray:
        values = self.rng.standard_normal((ROUTED, DIM), np.float32) / np.float32(np.sqrt(DIM))
        return (values.view(np.uint32) >> 16).astype(np.uint16)


class Repeated:
    """A stored tensor whose outermost dim repeats another's."""

    def __init__(self, tensor: Any) -> None:
        self.type, self.shape, self._tensor = tensor.type, (ROUTED, *tensor.shape[1:]), tensor

    def slice(self, index: int) -> memoryview:
        return self._tensor.slice(index % self._tensor.shape[0])
