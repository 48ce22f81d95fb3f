# SPDX-License-Identifier: MIT OR Apache-2.0
"""The model parts that memory_audit.py audits: their shapes, how each is built and run, and its buffers' formulas."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from metrale.engram_v41 import EngramV41
from metrale.formats.deepseek41 import EngramLayerSpec, MoeLayerSpec
from metrale.formats.kquant import BF16, F32
from metrale.formats.load import LoadedEngramLayer, LoadedMoeLayer, upload_engram_layer, upload_moe_layer
from metrale.formats.synthetic import ArrayTensor, random_engram_layer, random_moe_layer
from metrale.gdn import GdnVerifyPool
from metrale.gpu import GpuBackend
from metrale.moe_v41 import ArrayExperts, ExpertArena, MoeV41, SlotLayout
from metrale.reference.bf16 import bf16_bits

__all__ = ["LEAST", "PARTS", "REAL", "SMALL", "Part", "Shape", "evaluate"]

Shape = Mapping[str, int]

SMALL = {
    **{"dim": 512, "inter": 256, "n_routed": 8, "topk": 3, "max_tokens": 4},
    **{"hc": 4, "cols": 4, "head_dim": 256, "table_rows": 1040},
    **{"layers": 2, "seqs": 33, "k_max": 3, "num_k_heads": 2, "num_v_heads": 4, "k_dim": 12, "v_dim": 20},
}
REAL = {
    **{"dim": 5120, "inter": 2304, "n_routed": 384, "topk": 6, "max_tokens": 1},
    **{"hc": 4, "cols": 24, "head_dim": 256, "table_rows": 1_000_000},
    **{"layers": 1, "seqs": 32, "k_max": 16, "num_k_heads": 16, "num_v_heads": 32, "k_dim": 128, "v_dim": 128},
}
"""An engram table has 384 times as many rows, and as many bytes a row."""
LEAST = {
    **{"dim": 256, "inter": 256, "n_routed": 2, "topk": 1, "max_tokens": 1},
    **{"hc": 1, "cols": 2, "head_dim": 256, "table_rows": 8},
    **{"layers": 1, "seqs": 1, "k_max": 2, "num_k_heads": 1, "num_v_heads": 1, "k_dim": 4, "v_dim": 4},
}
"""Of a cycle, whose allocations count and not their sizes."""
GDN_WORDS = ("layers", "seqs", "k_max", "num_k_heads", "num_v_heads", "k_dim", "v_dim")
STAGING = 2
"""Experts that the page-locked memory of an ``ExpertArena`` holds."""


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


def evaluate(formula: str, shape: Shape) -> int:
    """Bytes of a formula in the words of a shape; ``me`` is ``max(max_tokens, topk)``."""
    words = {**shape, "me": max(shape["max_tokens"], shape["topk"]), "rows": shape["max_tokens"] * shape["topk"]}
    words["channels"] = 2 * shape["num_k_heads"] * shape["k_dim"] + shape["num_v_heads"] * shape["v_dim"]
    words |= {"groups": -(-shape["seqs"] // 32), "state_bytes": 4, "conv_width": 4}
    return int(eval(formula, {"__builtins__": {}, **FUNCTIONS}, words))


class Moe:
    """A ``MoeV41`` with a layer's weights and all its experts."""

    ways = tuple(itertools.product(("device", "host", "several tokens"), (True, False)))
    """To run a step: the selection of one token, or as many tokens as there may be; whether on a side stream."""

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
        """A step, in way number ``way``."""
        selection, side_stream = self.ways[way]
        options = {"selection": selection} if selection in ("device", "host") else {"tokens": self.moe.cfg.max_tokens}
        x = bf16_bits(np.linspace(-1, 1, self.moe.cfg.max_tokens * self.spec.dim))
        with self.gpu.upload(x, "memory_audit.x") as staged:
            self.moe.forward(self.spec.layer, staged, side_stream=side_stream, **options)
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


class Gdn:
    """A ``GdnVerifyPool`` in one of its modes."""

    ways = ("f32", "f16")
    """To run a step: the type of the states, of another pool for the second."""

    def __init__(self, gpu: GpuBackend, mode: str, shape: Shape) -> None:
        self.gpu, self.mode = gpu, mode
        self.shape = {name: shape[name] for name in GDN_WORDS}
        self.pool = GdnVerifyPool(gpu, **self.shape, mode=mode)

    def step(self, way: int) -> None:
        """Two tokens of a sequence, one of them accepted."""
        if self.ways[way] == "f32":
            self._step(self.pool)
            return
        pool = GdnVerifyPool(self.gpu, **self.shape, mode=self.mode, dtype="f16")
        try:
            self._step(pool)
        finally:
            pool.free()

    def _step(self, pool: GdnVerifyPool) -> None:
        with self.gpu.upload(bytes(8 * pool.cfg.channels), "memory_audit.arrays") as a:
            pool.conv(0, [0], a, a, None, a, tokens=2)
            pool.verify(0, [0], a, a, a, a, a, a, tokens=2)
            pool.accept([0], [1], tokens=2)
            self.gpu.synchronize()

    def free(self) -> None:
        """Give everything back."""
        self.pool.free()

    def formulas(self) -> dict[str, str]:
        """Of each tag."""
        return {f"GdnVerifyPool.{spec.name}": spec.formula for spec in self.pool.cfg.buffer_table()}


@dataclass(frozen=True)
class Part:
    """A model part: what makes its weights on the host, what builds it, and the streams and events that it takes."""

    weights: Callable[[Shape], Any]
    build: Callable[[GpuBackend, Any, Shape], Any]
    handles: Mapping[str, int]


PARTS = {
    "MoeV41": Part(moe_weights, Moe, {"stream": 1, "event": 2}),
    "ExpertArena": Part(arena_source, Arena, {"stream": 1, "event": 1 + STAGING}),
    "EngramV41": Part(engram_weights, Engram, {}),
    "GdnVerifyPool": Part(lambda shape: "snapshot", Gdn, {}),
    "GdnVerifyPool-deferred": Part(lambda shape: "deferred", Gdn, {}),
}
