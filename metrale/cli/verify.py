# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale verify``: every stage of a MoE layer, and of its engram, against float64 of what the stage read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale.cli.engram import TOKENS_AT_ONCE, EngramUnderTest
from metrale.cli.json_text import print_json
from metrale.cli.layer import (
    OUTPUT_BOUND,
    PATH_BOUND,
    WEIGHT_BOUND,
    LayerUnderTest,
    Way,
    batches,
    largest_difference,
    open_layer,
    relative_l2,
    tokens,
)
from metrale.formats.kquant import BF16, Q8_1_BLOCK_VALUES, kquant_q8_1_rows_bytes
from metrale.reference import kquant, moe
from metrale.reference.bf16 import bf16_round, bf16_values

__all__ = ["verify"]

LOGIT_BOUND = 1e-5
"""Relative L2 error of the router's f32 logits."""
GATE_BOUND = 1e-5
"""Relative L2 error of the engram's f32 streams."""
Q8_1_BLOCK = np.dtype([("d", "<u2"), ("sum", "<u2"), ("q", np.int8, Q8_1_BLOCK_VALUES)])


class Check(NamedTuple):
    """A stage's error, in the unit that its bound has."""

    stage: str
    error: float
    bound: float
    unit: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound


def verify(model: str, layer: int, count: int, seed: int, way: Way, as_json: bool) -> int:
    """Check ``count`` tokens; 1 if a stage is out of bounds, else 0."""
    worst: dict[str, Check] = {}
    with open_layer(model, layer, way) as run:
        for x in islice(tokens(seed, run.spec.dim), count):
            with run.gpu.upload(x, "verify.x") as staged:
                checks = list(_stages(run, x, staged))
            if run.engram is not None:
                checks += _engram_stages(run.engram, x)
            for check in checks:
                if check.stage not in worst or check.error > worst[check.stage].error:
                    worst[check.stage] = check
        if way.batch > 1 or way.graph:
            checks = list(_ways(run, way, list(islice(tokens(seed, run.spec.dim), count))))
            worst |= {check.stage: check for check in checks}
        name = run.gpu.name
    good = all(check.ok for check in worst.values())
    if as_json:
        stages = [check._asdict() | {"ok": check.ok} for check in worst.values()]
        facts = {"device": name, "model": model, "layer": layer, "tokens": count, "seed": seed}
        facts |= {"batch": way.batch, "slots": way.slots, "graph": way.graph}
        print_json(facts | {"stages": stages, "ok": good})
        return 0 if good else 1
    print(f"{name}: {model}, layer {layer}, worst of {count} tokens\n")
    for check in worst.values():
        verdict = "ok" if check.ok else "OUT OF BOUNDS"
        print(f"{check.stage:<18} {check.error:>9.2e}  bound {check.bound:<8g} {check.unit:<24} {verdict}")
    return 0 if good else 1


def _ways(run: LayerUnderTest, way: Way, inputs: list[npt.NDArray[np.uint16]]) -> Iterator[Check]:
    """Each way to run a step beside one token at a time."""
    with run.step(1, "gemv", graph=False) as step:
        alone = np.concatenate([step(x[None]) for x in inputs])
    for path in ("gemv", "mmq") if way.batch > 1 else ("gemv",):
        with run.step(way.batch, path, way.graph) as step:
            got = np.concatenate([step(part)[:real] for part, real in batches(iter(inputs), way.batch)])
        stage = f"{way.batch} by {path}" + (", graph" if way.graph else "")
        if path == "gemv":
            yield Check(stage, float((got != alone).sum()), 0, "values that differ")
        else:
            each = zip(bf16_values(got), bf16_values(alone), strict=True)
            yield Check(stage, max(relative_l2(*pair) for pair in each), PATH_BOUND, "relative L2")


def _stages(run: LayerUnderTest, x: npt.NDArray[np.uint16], staged: Any) -> Iterator[Check]:
    """Run a token and compare every buffer of the workspace with float64 of the buffers it came from."""
    gpu, spec, oracle, k = run.gpu, run.spec, run.oracle, run.spec.topk
    dim, inter, shared = spec.dim, spec.inter, spec.shared_inter
    run.moe.forward(run.layer, staged, selection="host", side_stream=False)
    gpu.synchronize()
    by_host = run.read("out", "uint16", dim)
    run.moe.forward(run.layer, staged)
    picked = run.moe.routed(run.layer)
    out = run.read("out", "uint16", dim)

    logits = run.read("logits", "float32", spec.n_routed)
    yield Check(
        "logits",
        relative_l2(logits, moe.router_logits(x[None], oracle.router)[0]),
        LOGIT_BOUND,
        "relative L2",
    )
    route = oracle.route(logits)
    yield Check("picks", float((picked.picks != route.picks).sum()), 0, "picks that differ")
    weight_error = largest_difference(picked.weights, route.weights)
    yield Check("weights", weight_error, WEIGHT_BOUND, "largest difference")

    x_q8 = _q8_rows(run.read("a_q8", "uint8", kquant_q8_1_rows_bytes(1, dim)), 1)
    yield _q8_check("x as q8_1", x_q8, x[None])
    both = bf16_values(run.read("gate_out", "uint16", 2 * k, inter))
    plan = np.sort(picked.picks)
    for stage, got, matrix in (("gate", both[:k], oracle.gate), ("up", both[k:], oracle.up)):
        expected = np.array([matrix[e].values() @ x_q8.values()[0] for e in plan])
        yield _vector(stage, got, expected)
    plan_w = run.read("weight_dev", "float32", k)
    h_bits = run.read("h", "uint16", k, inter)
    yield _vector("swiglu", bf16_values(h_bits), moe.swiglu(both[:k], both[k:], plan_w, spec.swiglu_limit))
    h_q8 = _q8_rows(run.read("h_q8", "uint8", kquant_q8_1_rows_bytes(k, inter)), k)
    yield _q8_check("h as q8_1", h_q8, h_bits)
    down_bits = run.read("down_out", "uint16", k, dim)
    expected = np.array([oracle.down[e].values() @ row for e, row in zip(plan, h_q8.values(), strict=True)])
    yield _vector("down", bf16_values(down_bits), expected)

    sg, su, sh_bits = (run.read(name, "uint16", shared) for name in ("sg", "su", "sh"))
    sd_bits = run.read("sd", "uint16", dim)
    for stage, bits, matrix in (("shared gate", sg, oracle.shared_gate), ("shared up", su, oracle.shared_up)):
        seen = bf16_values(x) if matrix.kind is BF16 else x_q8.values()[0]
        yield _vector(stage, bf16_values(bits), matrix.values() @ seen)
    rows = moe.swiglu(bf16_values(sg)[None], bf16_values(su)[None], None, spec.shared_swiglu_limit)
    yield _vector("shared swiglu", bf16_values(sh_bits), rows[0])
    seen = bf16_values(sh_bits)
    if oracle.shared_down.kind is not BF16:
        seen = kquant.quantize_q8_1_rows(sh_bits[None]).values()[0]
    yield _vector("shared down", bf16_values(sd_bits), oracle.shared_down.values() @ seen)

    acc = moe.accumulate(moe.sum_rows(np.zeros(dim, np.float32), down_bits), sd_bits)
    yield Check("sum", float((bf16_values(out) != bf16_round(acc)).sum()), 0, "values that differ")
    yield Check("host selection", float((out != by_host).sum()), 0, "values that differ")
    yield _vector("layer", bf16_values(out), moe.moe_layer_quantised(oracle, x).out)


def _engram_stages(run: EngramUnderTest, x: npt.NDArray[np.uint16]) -> Iterator[Check]:
    """Run a token through the engram, then as several at once."""
    got = run.step(x)
    yield Check("engram ids", float((got.ids != run.expected_ids()).sum()), 0, "ids that differ")
    differ = (got.rows[0] != run.expected_rows(got.ids)).sum()
    yield Check("engram rows", float(differ), 0, "values that differ")
    yield _vector("engram kv", bf16_values(got.kv[0]), run.expected_kv(got.rows[0]))
    expected = run.expected_streams(got.before, got.kv[0])
    yield Check("engram streams", relative_l2(got.after[0], expected), GATE_BOUND, "relative L2")
    several = run.step(x, TOKENS_AT_ONCE)
    expected = run.expected_kv(several.rows[0])
    for kv in several.kv:
        yield _vector("engram kv, many", bf16_values(kv), expected)


def _vector(stage: str, got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Check:
    return Check(stage, relative_l2(got, expected), OUTPUT_BOUND, "relative L2")


def _q8_rows(stored: npt.NDArray[np.uint8], rows: int) -> kquant.Q8Rows:
    """q8_1 rows as the device stored them."""
    stored = stored.reshape(rows, -1)
    blocks = stored.view(Q8_1_BLOCK)
    scales = blocks["d"].view("<f2").astype(np.float32)
    return kquant.Q8Rows(scales, blocks["d"], blocks["sum"], blocks["q"], stored)


def _q8_check(stage: str, got: kquant.Q8Rows, x: npt.NDArray[np.uint16]) -> Check:
    """Scales and ints to the byte. The sums, which no GEMV reads, are left to the kernel's own tests."""
    expected = kquant.quantize_q8_1_rows(x)
    differ = (got.q != expected.q).sum() + (got.d_bits != expected.d_bits).sum()
    return Check(stage, float(differ), 0, "scales, ints that differ")
