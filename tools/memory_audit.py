#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every buffer of every model part, its formula against the ledger, and that nothing is left.

    memory_audit.py                     each part at a small shape: built, compared, run, freed
    memory_audit.py --real              at a model's shape: DeepSeek-V4.1-Flash (5 GB), a layer of Qwen3-Next (1 GB)
    memory_audit.py --cycles 10000      also built, run once and freed so many times

A formula is evaluated here, from the words of the configuration, and not by the code that allocates.

A cycle takes the least shape, also with ``--real``, and makes all of a part but its weights on the host: it uploads
weights and experts, builds the part, runs a step, each time in the next of the ways to run one, and frees everything.
Afterwards the ledger must hold nothing of it, and at the end the driver must have as much free memory as after the
first hundred cycles, for which nothing else may use that GPU. Of 10,000 allocations, however small, the driver makes
more than one of the chunks that it counts in, so one that is left by every cycle shows. The host has no such figure.

Exit status: 0, 1 for a difference or something left, 2 for an error.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memory_parts import LEAST, PARTS, REAL, SMALL, Part, Shape, evaluate

import metrale
from metrale.audit.capture import MEMORY
from metrale.columns import aligned
from metrale.errors import MetraleError
from metrale.gpu import GpuBackend

SETTLED = 100
"""Cycles after which a driver has made the chunks that it keeps."""
SMALLEST = 16
"""Bytes: a buffer is no smaller, whatever its formula gives."""


# The audit


@dataclass(frozen=True)
class Row:
    """A buffer: its bytes by the formula and on the ledger, None for what is not there."""

    tag: str
    formula: str | None
    nbytes: int | None
    ledger_bytes: int | None

    @property
    def verdict(self) -> str:
        """ "ok", or what is wrong."""
        if self.formula is None:
            return "NO FORMULA"
        if self.ledger_bytes is None:
            return "NOT ON THE LEDGER"
        return "ok" if self.nbytes == self.ledger_bytes else "DIFFERS"


def compare(formulas: Mapping[str, str], shape: Shape, held: Sequence[Any]) -> list[Row]:
    """Each formula beside the ledger's allocations, which may have no formula, or one formula several."""
    sizes: dict[str, list[int]] = {}
    for record in held:
        sizes.setdefault(record.tag or record.site, []).append(record.nbytes)
    rows = []
    for tag, formula in formulas.items():
        nbytes = max(evaluate(formula, shape), SMALLEST)
        rows.append(Row(tag, formula, nbytes, sizes[tag].pop(0) if sizes.get(tag) else None))
    rows += [Row(tag, None, None, nbytes) for tag, left in sizes.items() for nbytes in left]
    return rows


def audit(gpu: GpuBackend, part: Part, shape: Shape) -> dict[str, Any]:
    """Build, compare, step, free: the rows, and what was wrong in words."""
    wrong: list[str] = []
    weights = part.weights(shape)
    with gpu.audit("memory_audit") as scope:
        built = part.build(gpu, weights, shape)
        try:
            held = scope.leaked
            memory = [record for record in held if record.kind in MEMORY]
            rows = compare(built.formulas(), shape, memory)
            wrong += [f"{row.tag}: {row.verdict}" for row in rows if row.verdict != "ok"]
            handles = {kind: sum(record.kind == kind for record in held) for kind in ("stream", "event", "graph")}
            for kind, count in handles.items():
                if count != part.handles.get(kind, 0):
                    wrong.append(f"{kind}s: {count}, needed: {part.handles.get(kind, 0)}")
            for way in range(len(built.ways)):
                built.step(way)
            known = {record.seq for record in held}
            wrong += [f"left by the step: {describe(r)}" for r in scope.leaked if r.seq not in known]
        finally:
            built.free()
        wrong += [f"left by free(): {describe(record)}" for record in scope.leaked]
    return {
        "buffers": [asdict(row) | {"verdict": row.verdict} for row in rows],
        "handles": handles,
        "formula_bytes": sum(row.nbytes or 0 for row in rows),
        "ledger_bytes": sum(row.ledger_bytes or 0 for row in rows),
        "wrong": wrong,
    }


def cycle(gpu: GpuBackend, part: Part, shape: Shape, count: int) -> dict[str, Any]:
    """Build, step and free ``count`` times; stops at the first cycle that leaves something."""
    wrong: list[str] = []
    weights = part.weights(shape)
    settled = min(SETTLED, (count + 1) // 2)
    free_then = free_now = 0
    start = time.perf_counter()
    done = 0
    while done < count and not wrong:
        with gpu.audit("memory_audit.cycle") as scope:
            built = part.build(gpu, weights, shape)
            try:
                built.step(done % len(built.ways))
            finally:
                built.free()
        done += 1
        wrong += [f"left by cycle {done}: {describe(record)}" for record in scope.leaked]
        if done == settled:
            gpu.synchronize()
            free_then = gpu.free_memory
    seconds = time.perf_counter() - start
    compared = gpu.kind == "cuda" and not wrong
    if compared:
        gpu.synchronize()
        free_now = gpu.free_memory
        if free_now != free_then:
            gone = f"{free_then - free_now:,} bytes fewer"
            wrong.append(f"the driver's free memory: {free_now:,} after {done:,} cycles, {gone} than after {settled:,}")
    return {
        "cycles": done,
        "seconds": seconds,
        "settled_after": settled,
        "driver_free_bytes": [free_then, free_now] if compared else None,
        "wrong": wrong,
    }


def describe(record: Any) -> str:
    """What it is, how large, and the line that asked for it."""
    size = f" of {record.nbytes:,} bytes" if record.nbytes else ""
    return f"{record.kind}{size} {record.tag or ''}".rstrip() + f" from {record.site}"


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--backend", choices=("host", "cuda"), help="default: the GPU if there is one")
    parser.add_argument("--real", action="store_true", help="at the real shape")
    parser.add_argument("--max-tokens", type=int, metavar="N", help=f"default {SMALL['max_tokens']}, real 1")
    parser.add_argument("--cycles", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"PART: got {name!r}, allowed: {', '.join(PARTS)}")
    if options.cycles < 0:
        parser.error(f"--cycles: got {options.cycles}, allowed: 0 or more")
    shape = dict(REAL if options.real else SMALL)
    if options.max_tokens is not None:
        shape["max_tokens"] = options.max_tokens
    try:
        with metrale.open(options.backend) as gpu:
            facts = _facts(gpu, options.parts or list(PARTS), shape, options.cycles)
    except (MetraleError, OSError, MemoryError) as error:
        print(f"memory_audit: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0 if facts["ok"] else 1


def _facts(gpu: GpuBackend, names: Sequence[str], shape: Shape, cycles: int) -> dict[str, Any]:
    parts = {}
    for name in names:
        parts[name] = {"audit": audit(gpu, PARTS[name], shape)}
        if cycles:
            parts[name]["cycles"] = cycle(gpu, PARTS[name], LEAST, cycles)
    good = all(not result["wrong"] for part in parts.values() for result in part.values())
    return {"backend": gpu.kind, "device": gpu.name, "shape": dict(shape), "parts": parts, "ok": good}


def _print(facts: dict[str, Any]) -> None:
    shape = ", ".join(f"{name} {value}" for name, value in facts["shape"].items())
    print(f"{facts['device']}: {shape}; me is max(max_tokens, topk), rows max_tokens * topk")
    for name, results in facts["parts"].items():
        checked = results["audit"]
        rows = [("buffer", "formula", "bytes", "on the ledger", "")]
        for row in checked["buffers"]:
            sizes = ("-" if row[key] is None else f"{row[key]:,}" for key in ("nbytes", "ledger_bytes"))
            rows.append((row["tag"], row["formula"] or "-", *sizes, row["verdict"]))
        rows.append(("in all", "", f"{checked['formula_bytes']:,}", f"{checked['ledger_bytes']:,}", ""))
        print(f"\n{name}: {', '.join(f'{n} {kind}s' for kind, n in checked['handles'].items())}\n")
        print("\n".join(aligned(rows, left=(0, 1, 4))))
        print()
        if "cycles" in results:
            ran = results["cycles"]
            each = 1e3 * ran["seconds"] / max(ran["cycles"], 1)
            print(f"{ran['cycles']:,} cycles in {ran['seconds']:.1f} s, {each:.2f} ms each")
            if ran["driver_free_bytes"]:
                then, now = ran["driver_free_bytes"]
                print(f"the driver's free memory: {then:,} bytes after {ran['settled_after']:,}, {now:,} at the end")
            else:
                print("compared with the ledger only")
        for wrong in [line for result in results.values() for line in result["wrong"]]:
            print(f"WRONG  {wrong}")
    print("nothing is left, and every formula holds" if facts["ok"] else "NOT AS IT SHOULD BE")


if __name__ == "__main__":
    sys.exit(main())
