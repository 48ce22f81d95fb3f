# SPDX-License-Identifier: MIT OR Apache-2.0
"""Explains what the driver says is in use, in a process where torch, CuPy and metrale allocate, and times the ledger.

First they only allocate, and no kernel of torch or CuPy runs: each byte is a library's or the driver's own figure. What
torch and CuPy then load with their first kernels is no allocation of theirs: it grows in a step of its own.
"""

import ctypes
import statistics
import time
from typing import Any

import metrale
from benchmarks import native
from metrale.audit.driver import DriverAccount
from metrale.gpu import sources

__all__ = ["run", "table"]

MIB = 1 << 20
UNEXPLAINED = 4 * MIB  # bytes: the target
LEDGER_US = 2  # microseconds over the driver's call: the target
TORCH_BYTES = (1, 5000, 700_000, 21_000_000, 333_333_333)
CUPY_BYTES = (1000, 8 * MIB, 200 * MIB)  # CuPy does not say how the driver rounds its pieces: whole chunks, but for one
NBYTES, CALLS, ROUNDS = 4096, 500, 40


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The explanations, one an occasion, and microseconds of an allocation and of its free."""
    import cupy
    import torch

    account, explained = DriverAccount(gpu), {}

    def note(occasion: str) -> None:
        torch.cuda.synchronize()
        explained[occasion] = account.explain().as_dict()

    note("opened")
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in TORCH_BYTES]
    arrays = [cupy.empty(size, cupy.uint8) for size in CUPY_BYTES]
    small = [gpu.buffer(1 + 37 * i, "small") for i in range(5000)]
    large = [gpu.buffer((1 << shift) + 12_345, "large") for shift in range(20, 33)]
    streams = [gpu.create_stream() for _ in range(8)]
    for module in ("kquant_moe", "moe_v41", "gemv"):
        for kernel in sources.signatures()[module]:
            gpu.kernel(module, kernel)
    note("allocated")
    del tensors[-2:], arrays[-1:], small[::2]
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
    note("some of it freed")
    with account.step("torch's first kernels"):
        matrix = torch.ones(256, 256, device="cuda")
        tensors += [torch.ones(3_000_000, device="cuda") + 1, matrix @ matrix]
        torch.cuda.synchronize()
    with account.step("CuPy's first kernels, and its rounding"):
        arrays.append(cupy.arange(1_000_000) + 1)
        cupy.cuda.runtime.deviceSynchronize()
    note("with their kernels")
    for stream in streams:
        gpu.destroy_stream(stream)
    small.clear()
    large.clear()
    return {"explained": explained, "allocation": _cost(gpu)}


def _cost(gpu: metrale.GpuBackend) -> dict[str, dict[str, float]]:
    """Medians of rounds that take turns: the C driver call, the backend's from Python, and what that is more."""
    library = ctypes.CDLL("libcuda.so.1")
    times: dict[str, list[tuple[float, float]]] = {"driver": [], "metrale": []}
    for _ in range(ROUNDS):
        times["driver"].append(native.alloc_loop(library.cuMemAlloc_v2, library.cuMemFree_v2, NBYTES, CALLS))
        start = time.perf_counter_ns()
        ptrs = [gpu.alloc(NBYTES, "cost") for _ in range(CALLS)]
        middle = time.perf_counter_ns()
        for ptr in ptrs:
            gpu.free(ptr)
        times["metrale"].append(((middle - start) / CALLS, (time.perf_counter_ns() - middle) / CALLS))
    found = {}
    for i, what in enumerate(("alloc", "free")):
        pairs = [(driver[i], ours[i]) for driver, ours in zip(times["driver"], times["metrale"], strict=True)]
        found[what] = {
            "driver_us": statistics.median(driver for driver, _ in pairs) / 1e3,
            "metrale_us": statistics.median(ours for _, ours in pairs) / 1e3,
            "over_us": statistics.median(ours - driver for driver, ours in pairs) / 1e3,
        }
    return found


def table(facts: dict[str, Any]) -> str:
    """Markdown of the results."""
    names: dict[str, str] = {}
    for explanation in facts["explained"].values():
        names |= {line["name"]: line["source"] for line in explanation["lines"]}
    names["unexplained"] = names.pop("unexplained")  # last
    occasions = list(facts["explained"])
    lines = [
        "What the driver says is in use, in bytes, of a process where torch, CuPy and metrale allocate.\n",
        f"| what | {' | '.join(occasions)} | known from |",
        f"|---|{'---:|' * len(occasions)}---|",
    ]
    for name, source in names.items():
        cells = []
        for explanation in facts["explained"].values():
            found = {line["name"]: line["nbytes"] for line in explanation["lines"]}
            cells.append(f"{found[name]:,}" if name in found else "-")
        lines.append(f"| {name} | {' | '.join(cells)} | {source} |")
    used = [f"{explanation['used']:,}" for explanation in facts["explained"].values()]
    lines.append(f"| **in use** | {' | '.join(used)} | the driver |")
    most = max(abs(explanation["unexplained"]) for explanation in facts["explained"].values())
    said = "met" if most <= UNEXPLAINED else "not met"
    lines.append(f"\nUnexplained: {most:,} bytes at most; target {UNEXPLAINED:,}: {said}.\n")
    lines += [
        f"An allocation of {NBYTES} bytes from Python, on the ledger with its call site, and its free: microseconds, "
        f"median of {ROUNDS} rounds of {CALLS} that take turns with the C driver call.\n",
        "| call | C driver call | metrale | over it | target |",
        "|---|---:|---:|---:|---:|",
    ]
    for what, cost in facts["allocation"].items():
        said = "met" if cost["over_us"] <= LEDGER_US else "not met"
        lines.append(f"| {what} | {cost['driver_us']:.2f} | {cost['metrale_us']:.2f} | {cost['over_us']:+.2f} | "
                     f"+{LEDGER_US}: {said} |")  # fmt: skip
    return "\n".join(lines)
