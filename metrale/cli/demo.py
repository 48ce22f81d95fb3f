# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale demo``: tokens through a MoE layer and its engram, one by one, beside the float64 reference."""

import time
from itertools import islice
from typing import Any

import numpy as np

from metrale.cli.json_text import print_json
from metrale.cli.layer import (
    OUTPUT_BOUND,
    WEIGHT_BOUND,
    LayerUnderTest,
    largest_difference,
    open_layer,
    relative_l2,
    tokens,
)
from metrale.reference.bf16 import bf16_values
from metrale.reference.moe import moe_layer_quantised

__all__ = ["demo"]


def demo(model: str | None, layer: int, count: int, seed: int, as_json: bool) -> int:
    """Run ``count`` tokens; 1 if a pick, weight or output is out of bounds or memory is left over, else 0."""
    with open_layer(model, layer) as run:
        dim = run.spec.dim
        run_token(run, next(tokens(seed, dim)))  # compiles, or reads the cache
        results = [run_token(run, x) for x in islice(tokens(seed, dim), count)]
        before = run.gpu.snapshot()
        report = run.gpu.alloc_report()
        facts = {"device": run.gpu.name, "backend": run.gpu.kind, "model": run.title, "layer": layer}
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
        print_json(facts | {"shape": shape, "tokens": results, "memory": memory, "ok": good})
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
    print(
        f"\nerror: relative L2 against float64 arithmetic that rounds where the kernels store, at most {OUTPUT_BOUND}"
    )
    print(f"\nbefore free()\n{report}\n\nafter free()")
    print(f"{after['live_bytes']:>14,}  bytes live in {after['live_allocs']} allocations")
    return 0 if good else 1


def run_token(run: LayerUnderTest, x: Any) -> dict[str, Any]:
    """One token: picks, weights, the output's error, and the milliseconds from launch to result; the error of the
    engram's streams."""
    gpu, moe = run.gpu, run.moe
    with gpu.upload(x, "demo.x") as staged:
        gpu.synchronize()
        start = time.perf_counter()
        moe.forward(run.layer, staged)
        gpu.synchronize()
        ms = (time.perf_counter() - start) * 1e3
    picked = moe.routed(run.layer)
    expected = moe_layer_quantised(run.oracle, x)
    error = relative_l2(bf16_values(run.read("out", "uint16", run.spec.dim)), expected.out)
    same_picks = np.array_equal(picked.picks, expected.route.picks)
    weight_error = largest_difference(picked.weights, expected.route.weights)
    engram = {}
    if run.engram is not None:
        result = run.engram.step(x)
        engram["engram_error"] = relative_l2(result.after[0], run.engram.exact_streams(result))
    return {
        **engram,
        "picks": picked.picks.tolist(),
        "weights": picked.weights.tolist(),
        "error": error,
        "ms": ms,
        "ok": same_picks and weight_error <= WEIGHT_BOUND and max([error, *engram.values()]) <= OUTPUT_BOUND,
    }
