# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale demo``: tokens through a MoE layer and its engram, beside the float64 reference."""

import time
from itertools import islice
from typing import Any

import numpy as np

from metrale.cli.json_text import print_json
from metrale.cli.layer import (
    OUTPUT_BOUND,
    PATH_BOUND,
    WEIGHT_BOUND,
    LayerUnderTest,
    Step,
    Way,
    batches,
    largest_difference,
    open_layer,
    relative_l2,
    tokens,
)
from metrale.reference.bf16 import bf16_values
from metrale.reference.moe import moe_layer_quantised

__all__ = ["demo"]


def demo(model: str | None, layer: int, count: int, seed: int, way: Way, as_json: bool) -> int:
    """Run ``count`` tokens; 1 if a pick, weight or output is out of bounds or memory is left over, else 0."""
    with open_layer(model, layer, way) as run, run.step(way.batch, "auto", way.graph) as step:
        first, _ = next(batches(tokens(seed, run.spec.dim), way.batch))
        step(first)  # compiles, or reads the cache
        results: list[dict[str, Any]] = []
        for part, real in batches(islice(tokens(seed, run.spec.dim), count), way.batch):
            results += run_tokens(run, step, part)[:real]
        arena = None if way.slots is None else run.experts.stats._asdict()
        before = run.gpu.snapshot()
        report = run.gpu.alloc_report()
        facts = {"device": run.gpu.name, "backend": run.gpu.kind, "model": run.title, "layer": layer}
        facts |= {"batch": way.batch, "slots": way.slots, "graph": way.graph}
        shape = {name: getattr(run.spec, name) for name in ("dim", "inter", "n_routed", "topk")}
        gpu = run.gpu
    after = gpu.snapshot()
    good = all(r["ok"] for r in results) and after["live_allocs"] == 0
    if as_json:
        memory = {"live_bytes": before["live_bytes"], "peak_bytes": before["peak_bytes"]}
        memory |= {
            "live_bytes_after_free": after["live_bytes"],
            "live_allocs_after_free": after["live_allocs"],
        }
        print_json(facts | {"shape": shape, "tokens": results, "arena": arena, "memory": memory, "ok": good})
        return 0 if good else 1

    print(f"{facts['device']}: {facts['model']}, layer {layer}")
    print(", ".join(f"{name} {value}" for name, value in shape.items()))
    head = f" {'engram':>9}" if run.engram is not None else ""
    print(f"\n{'token':>5}  {'picks':<24} {'weights':<32} {'error':>9} {'ms':>8}{head}")
    for i, r in enumerate(results):
        weights = " ".join(f"{w:.3f}" for w in r["weights"])
        picks = " ".join(map(str, r["picks"]))
        engram = f" {r['engram_error']:>9.1e}" if "engram_error" in r else ""
        verdict = "" if r["ok"] else "  OUT OF BOUNDS"
        print(f"{i:>5}  {picks:<24} {weights:<32} {r['error']:>9.1e} {r['ms']:>8.3f}{engram}{verdict}")
    bound = (
        f"at most {OUTPUT_BOUND}" if way.batch == 1 else f"which quantise otherwise for several: at most {PATH_BOUND}"
    )
    print(f"\nerror: relative L2 against float64 arithmetic that rounds where the kernels for one token store, {bound}")
    if arena is not None:
        print("arena: " + ", ".join(f"{name} {value:,.6g}" for name, value in arena.items()))
    print(f"\nbefore free()\n{report}\n\nafter free()")
    print(f"{after['live_bytes']:>14,}  bytes live in {after['live_allocs']} allocations")
    return 0 if good else 1


def run_tokens(run: LayerUnderTest, step: Step, inputs: Any) -> list[dict[str, Any]]:
    """A step: of each token picks, weights, the output's error, and the milliseconds of all from launch to result; the
    error of the engram's streams."""
    start = time.perf_counter()
    outputs = step(inputs)
    ms = (time.perf_counter() - start) * 1e3
    picked = run.moe.routed(run.layer)
    bound = OUTPUT_BOUND if step.batch == 1 else PATH_BOUND
    rows = zip(inputs, outputs, np.atleast_2d(picked.picks), np.atleast_2d(picked.weights), strict=True)
    return [{**_compared(run, *row, bound), "ms": ms} for row in rows]


def _compared(run: LayerUnderTest, x: Any, out: Any, picks: Any, weights: Any, bound: float) -> dict[str, Any]:
    expected = moe_layer_quantised(run.oracle, x)
    error = relative_l2(bf16_values(out), expected.out)
    same_picks = np.array_equal(picks, expected.route.picks)
    weight_error = largest_difference(weights, expected.route.weights)
    good = same_picks and weight_error <= WEIGHT_BOUND and error <= bound
    engram = {}
    if run.engram is not None:
        result = run.engram.step(x)
        engram["engram_error"] = relative_l2(result.after[0], run.engram.exact_streams(result))
        good = good and engram["engram_error"] <= OUTPUT_BOUND
    return {**engram, "picks": picks.tolist(), "weights": weights.tolist(), "error": error, "ok": good}
