# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times a launch from Python against the C driver call, and other packages beside it.

All ways of a group launch the same kernel with the same arguments on the same stream: a kernel that does nothing, of 0,
5 or 17 arguments, or a small one of the package, called through its launcher. A group's floor is ``C driver call``, a
loop in C++ around cuLaunchKernel with no Python in it; it runs a second time among the ways, to show what the
measurement cannot tell apart.

Every way is a loop as a user would write it, so the price of Python's loop and of the call is part of it. The ways
take turns in one run, in an order that is shuffled each round. A turn is ``BATCH`` launches that are not timed, then
``BATCH`` that are, each time with the stream idle before, and fewer launches than the driver queues before it makes the
caller wait: a time is what the caller spends, never the GPU's.

A row has the median and the 10th and 90th percentile over rounds of nanoseconds a launch. ``over_c_ns`` is the median
of the differences from the floor of the same round, which a target is for; ``medians_over_c_ns`` is the difference of
the medians.
"""

import ctypes
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import metrale
from benchmarks import launch_peers, launch_ways, native
from benchmarks.launch_ops import OPS
from benchmarks.launch_report import AGAIN, FLOOR, OP, chart, table
from benchmarks.launch_ways import Noop, Way

__all__ = ["chart", "run", "table"]

HERE = Path(__file__).resolve().parent
ARGUMENTS = (0, 5, 17)
BLOCK = 32
ROUNDS = 200
WARM_UP = 5  # rounds
BATCH = launch_ways.GRAPH  # launches, and so one graph: far fewer than the 1024 that the driver queues

Maker = Callable[[Noop, ExitStack], Way]
METRALE: dict[str, Maker] = {
    "metrale from Cython": partial(launch_ways.embedded, "loop"),
    "metrale from Cython, nogil": partial(launch_ways.embedded, "loop_nogil"),
    "metrale PreparedLaunch": launch_ways.prepared,
    "metrale PreparedLaunch, one set": launch_ways.prepared_set,
    "metrale KernelLaunch": launch_ways.builder,
    "metrale graph of 100": launch_ways.graph,
}
PEERS: dict[str, Maker] = {
    "cuda.core": launch_peers.cuda_core,
    "CuPy RawKernel": launch_peers.cupy_raw_kernel,
    "cuda.bindings": launch_peers.cuda_bindings,
    "Triton": launch_peers.triton,
    "torch.cuda._compile_kernel": launch_peers.torch_compile_kernel,
}
# Nanoseconds that a way may add to the C driver call, and for which numbers of arguments.
TARGETS = {
    "metrale KernelLaunch": (800, (17,)),
    OP: (400, (4, 17)),
    "metrale PreparedLaunch": (150, ARGUMENTS),
    "metrale from Cython": (50, ARGUMENTS),
    "metrale from Cython, nogil": (50, ARGUMENTS),
}
PACKAGES = ("cuda-core", "cuda-bindings", "cupy-cuda13x", "triton", "torch", "cython")

Failures = dict[tuple[str, str], str]  # why there is no row, by way and kernel


class Group(NamedTuple):
    """Ways to launch one kernel with the same arguments."""

    kernel: str
    arguments: int
    ways: dict[str, Way]


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: a row for each kernel and way to launch it, and why a way has none."""
    failures: Failures = {}
    with ExitStack() as cleanup:
        rows = measure(list(_groups(gpu, cleanup, failures)), gpu.synchronize, failures)
        gpu.synchronize()
    return {
        "cpu": _cpu(),
        "packages": {name: _version(name) for name in PACKAGES},
        "rounds": ROUNDS,
        "batch": BATCH,
        "rows": rows,
        "not_measured": [{"way": way, "kernel": kernel, "reason": why} for (way, kernel), why in failures.items()],
    }


def measure(
    groups: list[Group], synchronize: Callable[[], None], failures: Failures, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """The rows, from ``rounds`` rounds. A way that raises is dropped and goes into ``failures``, but for the floor."""
    order = random.Random(0)
    times: dict[tuple[str, str], list[float]] = {(way, group.kernel): [] for group in groups for way in group.ways}
    for _ in range(WARM_UP + rounds):
        for group in order.sample(groups, len(groups)):
            for way in order.sample(list(group.ways), len(group.ways)):
                place = way, group.kernel
                if place in failures:
                    continue
                try:
                    synchronize()
                    group.ways[way](BATCH)
                    synchronize()
                    times[place].append(group.ways[way](BATCH))
                except Exception as error:
                    if way == FLOOR:
                        raise
                    failures[place] = _reason(error)
    return [
        row(group, way, times[way, group.kernel][WARM_UP:], times[FLOOR, group.kernel][WARM_UP:])
        for group in groups
        for way in group.ways
        if (way, group.kernel) not in failures
    ]


def row(group: Group, way: str, measured: list[float], floor: list[float]) -> dict[str, Any]:
    """A row, from a way's times and the floor's of the same rounds."""
    deciles = statistics.quantiles(measured, n=10, method="inclusive")
    ns = statistics.median(measured)
    over = statistics.median(t - c for t, c in zip(measured, floor, strict=True))
    result: dict[str, Any] = {
        "kernel": group.kernel,
        "arguments": group.arguments,
        "way": way,
        "ns": ns,
        "p10_ns": deciles[0],
        "p90_ns": deciles[-1],
        "over_c_ns": over,
        "medians_over_c_ns": ns - statistics.median(floor),
    }
    target, counts = TARGETS.get(way, (0, ()))
    if group.arguments in counts:
        result |= {"target_ns": target, "met": over <= target}
    return result


def _groups(gpu: metrale.GpuBackend, cleanup: ExitStack, failures: Failures) -> Iterator[Group]:
    gpu.add_module(HERE / "noop.cu")
    pointer = int(cleanup.enter_context(gpu.buffer(256)).ptr)
    driver, stream = ctypes.CDLL("libcuda.so.1").cuLaunchKernel, gpu.default_stream()
    for make in OPS:
        op = make(gpu, cleanup)
        floor = native.c_loop(driver, op.kernel.address, op.block, stream, op.values)
        yield Group(op.kernel.name, len(op.values), {FLOOR: floor, AGAIN: floor, OP: op.way})
    for n in ARGUMENTS:
        noop = Noop(gpu, gpu.kernel("noop", f"noop{n}"), n, pointer)
        floor = native.c_loop(driver, noop.kernel.address, BLOCK, stream, noop.c_values())
        yield Group(noop.kernel.name, n, {FLOOR: floor, AGAIN: floor, **made(noop, METRALE | PEERS, cleanup, failures)})


def made(noop: Noop, makers: dict[str, Maker], cleanup: ExitStack, failures: Failures) -> dict[str, Way]:
    """The ways that can be made and have made a batch of launches; the others go into ``failures``."""
    ways = {}
    for name, make in makers.items():
        try:
            way = make(noop, cleanup)
            way(BATCH)
            noop.gpu.synchronize()
        except Exception as error:
            failures[name, noop.kernel.name] = _reason(error)
        else:
            ways[name] = way
    return ways


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name: a launch is its work."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
