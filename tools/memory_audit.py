#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every buffer of every model part, its formula against the ledger, and that nothing is left.

    memory_audit.py                     each part at a small shape: built, compared, run, freed
    memory_audit.py --real              at the shape of DeepSeek-V4.1-Flash (5 GB of device memory)
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
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import metrale
from metrale.audit.capture import MEMORY
from metrale.columns import aligned
from metrale.engram_v41 import EngramV41
from metrale.errors import MetraleError
from metrale.formats.deepseek41 import EngramLayerSpec, MoeLayerSpec
from metrale.formats.kquant import BF16, F32
from metrale.formats.load import LoadedEngramLayer, LoadedMoeLayer, upload_engram_layer, upload_moe_layer
from metrale.formats.synthetic import ArrayTensor, random_engram_layer, random_moe_layer
from metrale.gpu import GpuBackend
from metrale.moe_v41 import ArrayExperts, ExpertArena, MoeV41, SlotLayout
from metrale.reference.bf16 import bf16_bits

Shape = Mapping[str, int]

SMALL = {
    **{"dim": 512, "inter": 256, "n_routed": 8, "topk": 3, "max_tokens": 4},
    **{"hc": 4, "cols": 4, "head_dim": 256, "table_rows": 1040},
}
REAL = {
    **{"dim": 5120, "inter": 2304, "n_routed": 384, "topk": 6, "max_tokens": 1},
    **{"hc": 4, "cols": 24, "head_dim": 256, "table_rows": 1_000_000},
}
"""An engram table has 384 times as many rows, and as many bytes a row."""
LEAST = {
    **{"dim": 256, "inter": 256, "n_routed": 2, "topk": 1, "max_tokens": 1},
    **{"hc": 1, "cols": 2, "head_dim": 256, "table_rows": 8},
}
"""Of a cycle, whose allocations count and not their sizes."""
STAGING = 2
"""Experts that the page-locked memory of an ``ExpertArena`` holds."""
SETTLED = 100
"""Cycles after which a driver has made the chunks that it keeps."""
SMALLEST = 16
"""Bytes: a buffer is no smaller, whatever its formula gives."""


def _padded(value: int, step: int) -> int:
    return -(-value // step) * step


FUNCTIONS: dict[str, Callable[..., int]] = {
    "max": max,
    "min": min,
    "q2_k_bytes": lambda n, k: n * k // 256 * 84,
    "q3_k_bytes": lambda n, k: n * k // 256 * 110,
    "q8_1_rows_bytes": lambda m, k: m * k // 32 * 36,
    "mmq_act_bytes": lambda m, k: _padded(m, 128) * _padded(k, 256) // 128 * 144,
}


# The parts


class Moe:
    """A ``MoeV41`` with a layer's weights and all its experts."""

    ways = tuple(itertools.product(("device", "host"), (True, False)))
    """To run a step: the selection, and whether on a side stream."""

    def __init__(self, gpu: GpuBackend, spec: MoeLayerSpec, shape: Shape) -> None:
        self.gpu = gpu
        self.spec = spec
        self.loaded: LoadedMoeLayer = upload_moe_layer(gpu, spec)
        try:
            self.moe = MoeV41(gpu, replace(self.loaded.cfg, max_tokens=shape["max_tokens"]))
        except BaseException:
            self.loaded.free()
            raise
        try:
            self.moe.add_layer(spec.layer, self.loaded.weights, self.loaded.experts)
        except BaseException:
            self.free()
            raise

    def step(self, way: int) -> None:
        """A token, in way number ``way``."""
        selection, side_stream = self.ways[way]
        x = bf16_bits(np.linspace(-1, 1, self.spec.dim))
        with self.gpu.upload(x, "memory_audit.x") as staged:
            self.moe.forward(self.spec.layer, staged, selection=selection, side_stream=side_stream)
            self.moe.routed(self.spec.layer)

    def free(self) -> None:
        """Give everything back."""
        try:
            self.moe.free()
        finally:
            self.loaded.free()

    def formulas(self) -> dict[str, str]:
        """Of each tag."""
        weights = {
            "router": "2 * n_routed * dim",
            "bias": "4 * n_routed",
            "shared_gate": "q2_k_bytes(inter, dim)",
            "shared_up": "q2_k_bytes(inter, dim)",
            "shared_down": "q3_k_bytes(dim, inter)",
        }
        found = {f"MoeV41LayerWeights.{name}": formula for name, formula in weights.items()}
        found["ExpertArena.slots"] = "n_routed * (2 * q2_k_bytes(inter, dim) + q3_k_bytes(dim, inter))"
        return found | {f"MoeV41.{spec.name}": spec.formula for spec in self.moe.cfg.buffer_table()}


def moe_weights(shape: Shape) -> MoeLayerSpec:
    """A layer whose experts are all the same one: as many bytes, without the time to make them."""
    n, dim, inter = shape["n_routed"], shape["dim"], shape["inter"]
    one = random_moe_layer(0, dim=dim, inter=inter, n_routed=1, topk=1)
    rng = np.random.default_rng(1)

    def repeated(tensor: Any) -> ArrayTensor:
        every = np.broadcast_to(tensor.array, (n, *tensor.array.shape[1:]))
        return ArrayTensor(tensor.type, (n, *tensor.shape[1:]), every)

    return replace(
        one,
        n_routed=n,
        topk=shape["topk"],
        router=ArrayTensor(BF16, (n, dim), bf16_bits(rng.standard_normal((n, dim)) / np.sqrt(dim))),
        bias=ArrayTensor(F32, (n,), np.zeros(n, np.float32)),
        gate=repeated(one.gate),
        up=repeated(one.up),
        down=repeated(one.down),
    )


class Arena:
    """An ``ExpertArena`` of one token's slots over a source of ``n_routed`` experts."""

    ways = ("some are resident", "none is", "some are prefetched")

    def __init__(self, gpu: GpuBackend, source: ArrayExperts, shape: Shape) -> None:
        self.picks, self.n_routed = shape["topk"], shape["n_routed"]
        self.arena = ExpertArena(gpu, SlotLayout(shape["dim"], shape["inter"]), self.picks, source, staging=STAGING)
        self.free = self.arena.free

    def step(self, way: int) -> None:
        """A token's experts, in way number ``way``."""
        keys = [(0, (way * self.picks // 2 + n) % self.n_routed) for n in range(self.picks)]
        if way == 2:
            self.arena.prefetch(keys)
        self.arena.fetch(keys)
        self.arena.release()
        self.arena.take_changes()

    def formulas(self) -> dict[str, str]:
        """Of each tag."""
        slot = "(2 * q2_k_bytes(inter, dim) + q3_k_bytes(dim, inter))"
        return {"ExpertArena.slots": f"topk * {slot}", "ExpertArena.staging": f"{STAGING} * {slot}"}


def arena_source(shape: Shape) -> ArrayExperts:
    """Experts of zeros, which take no memory until they are written."""
    layout = SlotLayout(shape["dim"], shape["inter"])
    sizes = (layout.up_offset, layout.up_offset, layout.slot_bytes - layout.down_offset)
    gate, up, down = (np.zeros((shape["n_routed"], nbytes), np.uint8) for nbytes in sizes)
    return ArrayExperts({0: (gate, up, down)})


class Engram:
    """An ``EngramV41`` with a layer, its table resident."""

    ways = ("ids on the host", "ids on the device", "raw rows", "bf16 rows", "none")
    """To fill the workspace; each step also runs as many tokens as there may be."""

    def __init__(self, gpu: GpuBackend, spec: EngramLayerSpec, shape: Shape) -> None:
        self.gpu = gpu
        self.spec = spec
        self.tokens = shape["max_tokens"]
        self.loaded: LoadedEngramLayer = upload_engram_layer(gpu, spec)
        try:
            self.engram = EngramV41(gpu, **self.loaded.shape, max_tokens=self.tokens)
        except BaseException:
            self.loaded.free()
            raise
        try:
            self.engram.add_layer(self.loaded.weights)
        except BaseException:
            self.free()
            raise

    def step(self, way: int) -> None:
        """One token, and all that the workspace holds, in way number ``way``."""
        gpu, engram, spec = self.gpu, self.engram, self.spec
        for tokens in {1, self.tokens}:
            ids = np.arange(tokens * spec.cols).reshape(tokens, spec.cols) % spec.table.shape[0]
            streams = np.ones((tokens, spec.hc, spec.dim), np.float32)
            with (
                gpu.upload(ids, "memory_audit.ids") as given,
                gpu.upload(streams, "memory_audit.streams") as staged,
            ):
                if self.ways[way] == "ids on the host":
                    engram.rows_from_ids(spec.layer, ids)
                elif self.ways[way] == "ids on the device":
                    engram.rows_from_ids(spec.layer, given, tokens)
                    engram.check_ids(spec.layer)
                elif self.ways[way] == "raw rows":
                    engram.rows_from_q2k(spec.layer, np.ascontiguousarray(spec.table.numpy()[ids.reshape(-1)]))
                elif self.ways[way] == "none":
                    engram.apply_ids(spec.layer, given, staged)
                else:
                    engram.rows_from_bf16(spec.layer, np.zeros((tokens, engram.in_features), np.uint16))
                engram.apply(spec.layer, staged, tokens)
                gpu.synchronize()

    def free(self) -> None:
        """Give everything back."""
        try:
            self.engram.free()
        finally:
            self.loaded.free()

    def formulas(self) -> dict[str, str]:
        """Of each tag."""
        weights = {
            "qk": "4 * hc * dim",
            "wkv_q2k": "q2_k_bytes((hc + 1) * dim, cols * head_dim)",
            "wkv": "2 * (hc + 1) * dim * cols * head_dim",
            "table": "q2_k_bytes(table_rows, head_dim)",
        }
        found = {f"EngramV41LayerWeights.{name}": formula for name, formula in weights.items()}
        return found | {f"EngramV41.{spec.name}": spec.formula for spec in self.engram.buffer_table()}


def engram_weights(shape: Shape) -> EngramLayerSpec:
    """A layer of 2-grams, with a table of exactly so many rows."""
    cols, rows = shape["cols"], shape["table_rows"]
    spec = random_engram_layer(0, dim=shape["dim"], hc=shape["hc"], heads=cols, max_ngram=2, table_rows=cols)
    table = np.resize(spec.table.numpy(), (rows, spec.table.numpy().shape[1]))
    return replace(spec, table=ArrayTensor(spec.table.type, (rows, shape["head_dim"]), table))


@dataclass(frozen=True)
class Part:
    """A model part: what makes its weights on the host, what builds it, and the streams and events that it takes."""

    weights: Callable[[Shape], Any]
    build: Callable[[GpuBackend, Any, Shape], Moe | Arena | Engram]
    handles: Mapping[str, int]


PARTS = {
    "MoeV41": Part(moe_weights, Moe, {"stream": 1, "event": 2}),
    "ExpertArena": Part(arena_source, Arena, {"stream": 1, "event": 1 + STAGING}),
    "EngramV41": Part(engram_weights, Engram, {}),
}


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


def evaluate(formula: str, shape: Shape) -> int:
    """Bytes of a formula in the words of a shape; ``me`` is ``max(max_tokens, topk)``."""
    words = {**shape, "me": max(shape["max_tokens"], shape["topk"]), "rows": shape["max_tokens"] * shape["topk"]}
    return int(eval(formula, {"__builtins__": {}, **FUNCTIONS}, words))


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
    print(f"{facts['device']}: {shape}; me is max(max_tokens, topk)")
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
