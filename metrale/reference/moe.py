# SPDX-License-Identifier: MIT OR Apache-2.0
"""The DeepSeek-V4.1 mixture of experts: its kernels one by one, and a layer for one token.

    score  = sqrt(softplus(logit / gate_temp))
    picks  = the top-k by score + bias, ties to the lower expert id
    weight = route_scale * score of a pick / (sum over the picks + 1e-20); the division if norm_topk_prob
    h      = silu(min(gate x, limit)) * clamp(up x, -limit, limit) * weight
    out    = sum over the picks of down h, plus the shared expert's (no weight, its own limit)

The **plan** is the picks in ascending expert id, the order in which their rows are computed and added.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from metrale.errors import refuse
from metrale.formats.deepseek41 import MoeLayerSpec, StoredTensor
from metrale.formats.kquant import BF16, QuantType
from metrale.reference.bf16 import bf16_bits, bf16_round, bf16_values
from metrale.reference.dense import dense_gemm
from metrale.reference.kquant import Q8Rows, dequantize, quantize_q8_1_rows

__all__ = [
    "Matrix",
    "MoeLayer",
    "MoeStages",
    "Route",
    "RouteBuffers",
    "accumulate",
    "moe_layer_exact",
    "moe_layer_quantised",
    "route_buffers",
    "route_select",
    "router_logits",
    "routing_scores",
    "sum_rows",
    "swiglu",
]

Bits = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

FLAG_NOT_RESIDENT = 1
FLAG_NOT_FINITE = 2
SOFTPLUS_LINEAR_ABOVE = 20.0
NORM_EPSILON = 1e-20


def router_logits(x: Bits, router: Bits) -> F64:
    """Logits `[M, n_routed]` of bf16 bits `x` `[M, dim]` and `router` `[n_routed, dim]`."""
    return dense_gemm(x, router)


def routing_scores(logits: npt.ArrayLike, gate_temp: float = 1.0) -> F64:
    """`sqrt(softplus(logit / gate_temp))`, where softplus is the identity above 20."""
    z = np.asarray(logits, np.float64) / gate_temp
    bent = np.log1p(np.exp(np.minimum(z, SOFTPLUS_LINEAR_ABOVE)))
    return np.sqrt(np.where(z > SOFTPLUS_LINEAR_ABOVE, z, bent))


class Route(NamedTuple):
    """One token's selection: `picks` (best first) and their `weights`, and both again in plan order.

    With a NaN or an infinity among the logits or biases `finite` is False, picks and plan are -1, weights 0.
    """

    finite: bool
    picks: npt.NDArray[np.int64]
    weights: F64
    plan: npt.NDArray[np.int64]
    plan_weights: F64


def route_select(
    logits: npt.ArrayLike,
    bias: npt.ArrayLike,
    topk: int,
    *,
    gate_temp: float = 1.0,
    route_scale: float = 1.0,
    norm_topk_prob: bool = True,
) -> Route:
    """Select one token's experts from `[n_routed]` logits and biases. Refuses topk outside 1..n_routed."""
    values = np.asarray(logits, np.float64)
    if not 1 <= topk <= len(values):
        refuse("topk", topk, f"1..{len(values)}")
    offsets = np.asarray(bias, np.float64)
    if not (np.isfinite(values).all() and np.isfinite(offsets).all()):
        none, zero = np.full(topk, -1, np.int64), np.zeros(topk)
        return Route(False, none, zero, none, zero)

    scores = routing_scores(values, gate_temp)
    picks = np.argsort(-(scores + offsets), kind="stable")[:topk].astype(np.int64)
    weights = scores[picks]
    if norm_topk_prob:
        weights = weights / (weights.sum() + NORM_EPSILON)
    weights = weights * route_scale
    order = np.argsort(picks)
    return Route(True, picks, weights, picks[order], weights[order])


class RouteBuffers(NamedTuple):
    """What `moe_v41_route_select` writes for one token."""

    hdr: npt.NDArray[np.uint32]
    """`1 + 3k` words: flags, the picks and the bits of their f32 weights (pick order), the plan's slots"""
    plan_w: F32
    plan_rows: npt.NDArray[np.uint32]
    ptrs: npt.NDArray[np.uint64]
    """`[3, k]` addresses of gate, up and down blocks, in plan order"""


def route_buffers(
    route: Route,
    slot_of: npt.NDArray[np.int32],
    arena_base: int,
    slot_bytes: int,
    offsets: tuple[int, int, int],
) -> RouteBuffers:
    """Lay out a selection for the device.

    slot_of: i32 `[n_routed]`, -1 where an expert is not resident; offsets: of gate, up and down in a slot.
    A pick without a slot sets flag bit 0, keeps its -1 in the header, and points at slot 0. Logits that were
    not finite set bit 1; slots are then -1 too.
    """
    k = len(route.picks)
    slots = slot_of[route.plan].astype(np.int64) if route.finite else np.full(k, -1, np.int64)
    flags = 0
    if not route.finite:
        flags = FLAG_NOT_FINITE
    elif (slots < 0).any():
        flags = FLAG_NOT_RESIDENT
    header = np.concatenate([[flags], route.picks, np.zeros(k, np.int64), slots]).astype(np.int32).view(np.uint32)
    header[1 + k : 1 + 2 * k] = route.weights.astype(np.float32).view(np.uint32)

    addresses = [[arena_base + max(int(slot), 0) * slot_bytes + offset for slot in slots] for offset in offsets]
    return RouteBuffers(
        header, route.plan_weights.astype(np.float32), np.zeros(k, np.uint32), np.array(addresses, np.uint64)
    )


def swiglu(gate: F64, up: F64, weights: npt.ArrayLike | None, limit: float) -> F64:
    """`silu(min(g, limit)) * clamp(u, -limit, limit) * w[row]` for `[rows, inter]`.

    No clamps if `limit` is 0 or less, no factor if `weights` (`[rows]`) is None.
    """
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    factor = 1.0 if weights is None else np.asarray(weights, np.float64)[:, None]
    with np.errstate(over="ignore"):
        h: F64 = gate / (1 + np.exp(-gate)) * up * factor
    return h


def accumulate(acc: F32, src: Bits) -> F32:
    """`acc + src`, one f32 addition an element; f32 and bf16 bits of the same shape."""
    return acc + bf16_values(src).astype(np.float32)


def sum_rows(acc: F32, src: Bits) -> F32:
    """Add the rows of `src` `[n_rows, dim]` onto `acc` `[dim]` one after the other, each rounded to f32."""
    for row in src:
        acc = accumulate(acc, row)
    return acc


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Weights as they are stored: bf16 bits `[..., N, K]`, or the raw K-quant rows `[..., N, row bytes]`."""

    kind: QuantType
    raw: npt.NDArray[np.uint16] | npt.NDArray[np.uint8]

    @classmethod
    def of(cls, tensor: StoredTensor) -> Self:
        """Over a tensor's bytes, without a copy."""
        return cls(tensor.type, tensor.numpy())

    def __getitem__(self, expert: int) -> Self:
        return type(self)(self.kind, self.raw[expert])

    def values(self) -> F64:
        """Dequantised, float64 `[..., N, K]`."""
        if self.kind == BF16:
            return bf16_values(self.raw.view(np.uint16))
        return dequantize(self.kind, self.raw.view(np.uint8)).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer:
    """Weights and numbers of a layer. `gate`, `up`, `down` have the experts as their first dim."""

    router: Bits
    bias: F32
    gate: Matrix
    up: Matrix
    down: Matrix
    shared_gate: Matrix
    shared_up: Matrix
    shared_down: Matrix
    topk: int
    route_scale: float = 1.0
    norm_topk_prob: bool = True
    gate_temp: float = 1.0
    swiglu_limit: float = 0.0
    shared_swiglu_limit: float = 0.0

    @classmethod
    def of(cls, spec: MoeLayerSpec) -> Self:
        """Over the tensors of an open file; only the experts that a token picks are ever read."""
        return cls(
            router=spec.router.numpy(),
            bias=spec.bias.numpy(),
            gate=Matrix.of(spec.gate),
            up=Matrix.of(spec.up),
            down=Matrix.of(spec.down),
            shared_gate=Matrix.of(spec.shared_gate),
            shared_up=Matrix.of(spec.shared_up),
            shared_down=Matrix.of(spec.shared_down),
            topk=spec.topk,
            route_scale=spec.route_scale,
            norm_topk_prob=spec.norm_topk_prob,
            gate_temp=spec.gate_temp,
            swiglu_limit=spec.swiglu_limit,
            shared_swiglu_limit=spec.shared_swiglu_limit,
        )

    def route(self, logits: npt.ArrayLike) -> Route:
        """Select with this layer's bias and numbers."""
        return route_select(
            logits,
            self.bias,
            self.topk,
            gate_temp=self.gate_temp,
            route_scale=self.route_scale,
            norm_topk_prob=self.norm_topk_prob,
        )


def moe_layer_exact(layer: MoeLayer, x: Bits, route: Route | None = None) -> F64:
    """The layer's output `[dim]` for one token `x` (bf16 bits `[dim]`), in float64 throughout.

    `route` replaces the selection by the layer's own router. Without one, refuses logits that are not finite.
    """
    token = bf16_values(x)
    if route is None:
        route = layer.route(router_logits(x[None], layer.router)[0])
    _check_finite(route)
    shared = _swiglu_row(layer.shared_gate, layer.shared_up, token, None, layer.shared_swiglu_limit)
    out: F64 = layer.shared_down.values() @ shared
    for expert, weight in zip(route.plan, route.plan_weights, strict=True):
        h = _swiglu_row(layer.gate[expert], layer.up[expert], token, weight, layer.swiglu_limit)
        out += layer.down[expert].values() @ h
    return out


@dataclass(frozen=True, slots=True, eq=False)
class MoeStages:
    """Every value that the one-token path stores, in the order it does; rows are in plan order.

    Float64 arrays that hold bf16 values, but for `logits` (f32 values), `acc_routed` and `acc` (f32).
    """

    logits: F64
    route: Route
    x_q8: Q8Rows
    gate: F64
    up: F64
    h: F64
    h_q8: Q8Rows
    down: F64
    shared_gate: F64
    shared_up: F64
    shared_h: F64
    shared_down: F64
    acc_routed: F32
    acc: F32
    out: F64


def moe_layer_quantised(layer: MoeLayer, x: Bits, route: Route | None = None) -> MoeStages:
    """The layer for one token `x` (bf16 bits `[dim]`), rounded wherever the kernels store a value.

    Products are float64 and their results rounded to bf16; K-quant matrices multiply q8_1 activations, bf16
    ones the activations as they are. The rows of the picks are added in plan order, then the shared expert's,
    in f32. `route` replaces the selection (a kernel's own picks where a near tie goes the other way).
    """
    logits = router_logits(x[None], layer.router)[0].astype(np.float32).astype(np.float64)
    if route is None:
        route = layer.route(logits)
    _check_finite(route)
    weights = route.plan_weights.astype(np.float32)

    x_q8 = quantize_q8_1_rows(x[None])
    token = x_q8.values()[0]
    gate = bf16_round([layer.gate[expert].values() @ token for expert in route.plan])
    up = bf16_round([layer.up[expert].values() @ token for expert in route.plan])
    h = bf16_round(swiglu(gate, up, weights, layer.swiglu_limit))
    h_q8 = quantize_q8_1_rows(bf16_bits(h))
    rows = zip(route.plan, h_q8.values(), strict=True)
    down = bf16_round([layer.down[expert].values() @ row for expert, row in rows])

    shared_gate = _stored_product(layer.shared_gate, bf16_values(x))
    shared_up = _stored_product(layer.shared_up, bf16_values(x))
    shared_h = bf16_round(swiglu(shared_gate[None], shared_up[None], None, layer.shared_swiglu_limit)[0])
    shared_down = _stored_product(layer.shared_down, shared_h)

    acc_routed = sum_rows(np.zeros(len(x), np.float32), bf16_bits(down))
    acc = accumulate(acc_routed, bf16_bits(shared_down))
    return MoeStages(
        logits=logits,
        route=route,
        x_q8=x_q8,
        gate=gate,
        up=up,
        h=h,
        h_q8=h_q8,
        down=down,
        shared_gate=shared_gate,
        shared_up=shared_up,
        shared_h=shared_h,
        shared_down=shared_down,
        acc_routed=acc_routed,
        acc=acc,
        out=bf16_round(acc),
    )


def _swiglu_row(gate: Matrix, up: Matrix, token: F64, weight: float | None, limit: float) -> F64:
    weights = None if weight is None else [weight]
    row: F64 = swiglu((gate.values() @ token)[None], (up.values() @ token)[None], weights, limit)[0]
    return row


def _stored_product(matrix: Matrix, x: F64) -> F64:
    """`matrix @ x` as its kernel stores it, for bf16 values `x` `[K]`."""
    seen = x if matrix.kind == BF16 else quantize_q8_1_rows(bf16_bits(x)[None]).values()[0]
    return bf16_round(matrix.values() @ seen)


def _check_finite(route: Route) -> None:
    if not route.finite:
        refuse("logits", "NaN or infinity", "finite numbers")
