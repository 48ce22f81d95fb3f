#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Registers, shared memory, stack and spills of every kernel on every supported architecture.

    kernel_report.py                    prints them
    kernel_report.py --check TABLE      fails on a spill or stack frame that the table does not have
    kernel_report.py --update TABLE     writes the table

It compiles with NVRTC and needs no GPU. Register counts differ between NVRTC versions: they are compared only with a
table of the same version, spills and stack always.
"""

import argparse
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from metrale.gpu import cubin, sources

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
FIELDS = ("registers", "shared", "stack", "spill")

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")

Resources = dict[str, int]
Table = dict[str, dict[str, Resources]]  # {"module.kernel": {architecture: resources}}


def parse_log(log: str) -> dict[str, Resources]:
    """ptxas's verbose output as `{kernel: resources}`, sizes in bytes. ValueError if a kernel's figures are missing.

    Functions that are not inlined have a frame of their own, without a register line: it counts for the kernel
    above it.
    """
    found: dict[str, Resources] = {}
    kernel = ""
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel = entry[1]
            found[kernel] = dict.fromkeys(FIELDS, 0)
            found[kernel]["registers"] = -1
        elif kernel and (frame := _FRAME.search(line)):
            stack, stores, loads = map(int, frame.groups())
            found[kernel]["stack"] += stack
            found[kernel]["spill"] += stores + loads
        elif kernel and (used := _USED.search(line)):
            found[kernel]["registers"] = int(used[1])
            shared = _SHARED.search(line)
            found[kernel]["shared"] = int(shared[1]) if shared else 0
    incomplete = [name for name, resources in found.items() if resources["registers"] < 0]
    if not found or incomplete:
        raise ValueError(f"ptxas's report is not understood (kernels {incomplete or 'none'}):\n{log}")
    return found


def compile_module(module: str, arch: str) -> dict[str, Resources]:
    """Compile one module and return its kernels' resources."""
    _, log = cubin.compile_cubin(sources.source_path(module), arch, resource_report=True)
    found = parse_log(log)
    declared = sources.signatures()[module]
    if found.keys() != declared.keys():
        raise ValueError(f"{module} for {arch}: compiled {sorted(found)}, declared {sorted(declared)}")
    return found


def report() -> Table:
    """Every module for every architecture, on all cores."""
    jobs = [(module, arch) for module in sources.modules() for arch in ARCHITECTURES]
    table: Table = {}
    with ProcessPoolExecutor() as pool:
        results = pool.map(compile_module, *zip(*jobs, strict=True))
        for (module, arch), kernels in zip(jobs, results, strict=True):
            for name, resources in kernels.items():
                table.setdefault(f"{module}.{name}", {})[arch] = resources
    return table


def differences(table: Table, known: Table, same_compiler: bool) -> tuple[list[str], list[str]]:
    """What is worse than in the known table, and what is merely different."""
    errors = [f"{name}: in the table, but not compiled" for name in known.keys() - table.keys()]
    notes = []
    for name, architectures in table.items():
        for arch, got in architectures.items():
            before = known.get(name, {}).get(arch)
            if before is None:
                errors.append(f"{name} {arch}: not in the table")
                continue
            for field in FIELDS:
                line = f"{name} {arch}: {field} {got[field]}, was {before[field]}"
                if field in ("stack", "spill") and got[field] > before[field]:
                    errors.append(line)
                elif same_compiler and got[field] != before[field]:
                    notes.append(line)
    return sorted(errors), notes


def nvrtc_version() -> str:
    """The version of the NVRTC library in use."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def print_table(table: Table) -> None:
    """One line a kernel; a cell is registers[/static shared bytes], then stack and spill bytes where there are any."""
    width = max(map(len, table))
    print(f"{'registers[/shared]':<{width}}" + "".join(f"{arch:>10}" for arch in ARCHITECTURES))
    for name, architectures in table.items():
        line = f"{name:<{width}}"
        for arch in ARCHITECTURES:
            r = architectures[arch]
            line += f"{r['registers']}/{r['shared']}".removesuffix("/0").rjust(10)
            line += "".join(f" {field} {r[field]}" for field in ("stack", "spill") if r[field])
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", type=Path, metavar="TABLE")
    action.add_argument("--update", type=Path, metavar="TABLE")
    options = parser.parse_args()

    version, table = nvrtc_version(), report()
    print_table(table)
    if options.update:
        content = {"nvrtc": version, "architectures": list(ARCHITECTURES), "kernels": dict(sorted(table.items()))}
        options.update.write_text(_dump(content))
    if options.check:
        known = json.loads(options.check.read_text())
        errors, notes = differences(table, known["kernels"], known["nvrtc"] == version)
        print(f"\nNVRTC {version}; the table is from NVRTC {known['nvrtc']}")
        for line in notes:
            print(f"note: {line}")
        for line in errors:
            print(f"error: {line}", file=sys.stderr)
        if errors:
            print(f"If this is meant: kernel_report.py --update {options.check}", file=sys.stderr)
        return 1 if errors else 0
    return 0


def _dump(content: dict[str, object]) -> str:
    """JSON with one line a kernel and architecture, so that a change reads as one."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\{\s+(\"registers[^}]*?)\s+\}", lambda m: "{" + re.sub(r"\s+", " ", m[1]) + "}", text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
