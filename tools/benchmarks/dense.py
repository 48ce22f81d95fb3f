# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times the dense products, and off Q2_K blocks, beside cuBLAS (through torch) in the same process.

Timed as in ``kernels``. A GEMV's floor is its bytes over the rate of a device copy; a GEMM has none, and its figure is
TFLOP/s. The product off Q2_K blocks reads fewer bytes; its peer is the one over bf16.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import metrale
from benchmarks.kernels import DIM, ROUTED, WKV_K, WKV_N, Bench
from metrale import ops
from metrale.formats.kquant import Q2_K, kquant_weight_bytes

__all__ = ["run", "table"]

TOKENS = (2, 8, 64, 512, 2048)


class Case(NamedTuple):
    """What to time: the product's shape, the bytes it must move, and how to make and launch an input set."""

    name: str
    m: int
    n: int
    k: int
    nbytes: int
    make: Callable[[], Callable[[], None]]


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: the copy rate, and a row a case."""
    bench = Bench(gpu)
    copy_rate = bench.copy_rate()
    cublas = Cublas(bench)
    rows = []
    for case in cases(bench):
        us = bench.time(bench.sets(case.nbytes, case.make))
        bench.release()
        row = {"case": case.name, "m": case.m, "n": case.n, "k": case.k, "bytes": case.nbytes, "us": us}
        row |= {"floor_us": case.nbytes / copy_rate * 1e6, "tflops": 2e-6 * case.m * case.n * case.k / us}
        rows.append(row | {"cublas_us": cublas.time(case)})
    return {"copy_gb_per_s": copy_rate / 1e9, "cublas": cublas.version, "rows": rows}


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"Device copy: {facts['copy_gb_per_s']:,.0f} GB/s. cuBLAS: {facts['cublas'] or 'torch is not there'}.",
        "",
        "| case | M x N x K | MB | floor us | us | TFLOP/s | cuBLAS us | cuBLAS us / us |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in facts["rows"]:
        peer = r["cublas_us"]
        compared = "| - | - |" if peer is None else f"| {peer:.2f} | {peer / r['us']:.2f} |"
        lines.append(
            f"| `{r['case']}` | {r['m']} x {r['n']} x {r['k']} | {r['bytes'] / 1e6:.1f} | {r['floor_us']:.2f} "
            f"| {r['us']:.2f} | {r['tflops']:.1f} {compared}"
        )
    return "\n".join(lines)


def cases(bench: Bench) -> Iterator[Case]:
    gpu = bench.gpu
    gemv = gpu.kernel("gemv", "dense_gemv_bf16")
    off_blocks = gpu.kernel("engram_v41", "engram_v41_wkv_q2k_gemv")

    def make_gemv() -> Callable[[], None]:
        a, b, c = bench.bf16(WKV_K), bench.bf16(WKV_N, WKV_K), bench.buffer(2 * WKV_N)
        return lambda: ops.dense_gemv(gpu, gemv, a, b, c, WKV_N, WKV_K, None)

    def make_off_blocks() -> Callable[[], None]:
        a, c = bench.bf16(WKV_K), bench.buffer(2 * WKV_N)
        b = bench.upload(bench.blocks(Q2_K, WKV_N, WKV_K))
        return lambda: ops.engram_v41_wkv_q2k_gemv(gpu, off_blocks, a, b, c, WKV_N, WKV_K, None)

    vectors = 2 * (WKV_K + WKV_N)
    yield Case("dense_gemv_bf16", 1, WKV_N, WKV_K, 2 * WKV_N * WKV_K + vectors, make_gemv)
    nbytes = kquant_weight_bytes(WKV_N, WKV_K, Q2_K.block_bytes) + vectors
    yield Case("engram_v41_wkv_q2k_gemv", 1, WKV_N, WKV_K, nbytes, make_off_blocks)

    for name, out_bytes, n, k, tokens in (
        ("dense_gemm_bf16", 2, WKV_N, WKV_K, TOKENS),
        ("dense_gemm_bf16_tc_f32out", 4, WKV_N, WKV_K, (512,)),
        ("dense_gemm_bf16_f32out", 4, ROUTED, DIM, (1, 8, 512)),
    ):
        kernel = gpu.kernel("gemm", name)
        for m in tokens:

            def make(
                kernel: Any = kernel, m: int = m, n: int = n, k: int = k, out_bytes: int = out_bytes
            ) -> Callable[[], None]:
                a, b, c = bench.bf16(m, k), bench.bf16(n, k), bench.buffer(out_bytes * m * n)
                return lambda: ops.dense_gemm(gpu, kernel, a, b, c, m, n, k, None)

            yield Case(name, m, n, k, 2 * (m * k + n * k) + out_bytes * m * n, make)


class Cublas:
    """The peer: torch's product of the same shape, on data of its own, bf16 in and out."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        try:
            import torch
        except ImportError:
            self.version = None
            return
        self.torch = torch
        self.version = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        torch.cuda.set_device(bench.gpu.ordinal)
        torch.manual_seed(0)

    def time(self, case: Case) -> float | None:
        """Median microseconds; None without torch."""
        if self.version is None:
            return None
        torch = self.torch
        launches = self.bench.sets(2 * (case.m + case.n) * case.k, lambda: self._product(case))
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        with torch.cuda.stream(torch.cuda.ExternalStream(self.bench.stream)):
            us = self.bench.median_us(graph.replay) / len(launches)
        torch.cuda.synchronize()
        del graph, launches
        torch.cuda.empty_cache()
        return us

    def _product(self, case: Case) -> Callable[[], None]:
        torch = self.torch
        a, b = (torch.randn(rows, case.k, device="cuda", dtype=torch.bfloat16) for rows in (case.m, case.n))
        c = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
        return lambda: torch.mm(a, b.t(), out=c)
