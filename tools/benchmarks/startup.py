# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times what a process waits for: ``import metrale``, beside other packages, and the first kernel.

Each time is of a fresh interpreter; those for the imports take turns, in an order that is shuffled each round. The
first kernel's time runs from when ``metrale.open()`` has returned until the kernel is done: its buffers, the kernel's
lookup, its launch and the wait for it. The kernel is one of the package, compiled before and in the cache.
"""

import json
import random
import statistics
import subprocess
import sys
from typing import Any

__all__ = ["run", "table"]

PACKAGES = ("metrale", "numpy", "cuda.core")
NOT_NEEDED = ("numpy", "cuda.bindings", "cuda.core")  # by import metrale
ROUNDS = 21
PROCESSES = 9  # for the first kernel
TARGET_MS = 150

# What is imported before the clock starts is cheaper after it: only what the interpreter has anyway.
IMPORT = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
__import__(sys.argv[1])
ms = 1e3 * (time.perf_counter() - start)
modules = sorted(set(sys.modules) - before)
import json
print(json.dumps({"ms": ms, "modules": modules}))
"""

FIRST_KERNEL = """
import json, sys, time
import metrale
from metrale import ops
start = time.perf_counter()
gpu = metrale.open(sys.argv[1])
opened = time.perf_counter()
acc, out = gpu.buffer(32), gpu.buffer(16)
ops.moe_v41_finish(gpu, gpu.kernel("moe_v41", "moe_v41_finish"), acc, out, 8, None)
gpu.synchronize()
done = time.perf_counter()
print(json.dumps({"gpu": gpu.name, "open_ms": 1e3 * (opened - start), "first_kernel_ms": 1e3 * (done - opened)}))
gpu.close()
"""


def run() -> dict[str, Any]:
    """The results: the imports' times, the modules that ``import metrale`` leaves, and the first kernel's time."""
    modules = child(IMPORT, "metrale")["modules"]
    return {
        "imports": imports(),
        "modules": modules,
        "not_needed": [name for name in NOT_NEEDED if name in modules],
        "first_kernel": first_kernel("cuda"),
    }


def imports(rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """Milliseconds to import each package, or why there are none."""
    order, found = random.Random(0), {}
    times: dict[str, list[float]] = {}
    for package in PACKAGES:
        try:
            child(IMPORT, package)  # its files are in memory from here on
            times[package] = []
        except RuntimeError as error:
            found[package] = {"not_measured": str(error)}
    for _ in range(rounds):
        for package in order.sample(list(times), len(times)):
            times[package].append(child(IMPORT, package)["ms"])
    return {package: summary(measured) for package, measured in times.items()} | found


def first_kernel(kind: str, processes: int = PROCESSES) -> dict[str, Any]:
    """Milliseconds to open a backend of ``kind``, and from then to the end of the first kernel, or why there are none.

    The slowest process has to meet the target.
    """
    try:
        child(FIRST_KERNEL, kind)  # fills the cache
    except RuntimeError as error:
        return {"not_measured": str(error)}
    runs = [child(FIRST_KERNEL, kind) for _ in range(processes)]
    opened, first = (summary([run[what] for run in runs]) for what in ("open_ms", "first_kernel_ms"))
    return {"open": opened, "first_kernel": first, "target_ms": TARGET_MS, "met": first["max_ms"] <= TARGET_MS}


def child(code: str, argument: str) -> Any:
    """What ``code`` prints in a fresh interpreter, as JSON; RuntimeError with its last line if it fails."""
    done = subprocess.run([sys.executable, "-P", "-c", code, argument], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout)


def summary(measured: list[float]) -> dict[str, Any]:
    return {
        "processes": len(measured),
        "median_ms": statistics.median(measured),
        "min_ms": min(measured),
        "max_ms": max(measured),
    }


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown."""
    first = facts["first_kernel"]
    lines = [
        "Each time is of a fresh interpreter.",
        "",
        "| what | processes | median ms | min ms | max ms | target |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(f"`import {package}`", times) for package, times in facts["imports"].items()]
    if "not_measured" in first:
        lines.append(_line("first kernel", first))
    else:
        target = f"{first['target_ms']}: {'met' if first['met'] else 'not met'}"
        lines += [_line("`metrale.open()`", first["open"]), _line("first kernel", first["first_kernel"], target)]
    names = {module.partition(".")[0] for module in facts["modules"]}
    others = sorted(names - sys.stdlib_module_names - {"metrale"})
    lines += [
        "",
        "The first kernel's time starts when `metrale.open()` has returned; its machine code is in the cache. The "
        "target is for the slowest process.",
        "",
        f"`import metrale` leaves {len(facts['modules'])} modules. Outside metrale and the standard library: "
        f"{', '.join(others) or 'none'}. Of {', '.join(NOT_NEEDED)}: {', '.join(facts['not_needed']) or 'none'}.",
    ]
    return "\n".join(lines)


def _line(what: str, times: dict[str, Any], target: str = "") -> str:
    if "not_measured" in times:
        return f"| {what} | not measured: {times['not_measured']} | | | | |"
    numbers = " | ".join(f"{times[number]:.1f}" for number in ("median_ms", "min_ms", "max_ms"))
    return f"| {what} | {times['processes']} | {numbers} | {target} |"
