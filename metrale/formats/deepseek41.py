# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a GGUF file of a DeepSeek-V4.1 model holds: names, types, shapes and keys, checked before use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from metrale.errors import ArgumentError, FormatError, malformed, refuse
from metrale.formats.gguf import GgufFile, Tensor
from metrale.formats.kquant import BF16, F32, Q2_K, Q3_K, QuantType

if TYPE_CHECKING:
    from metrale.engram_v41 import EngramTables

__all__ = [
    "EngramLayerSpec",
    "MoeLayerSpec",
    "StoredTensor",
    "engram_layer_spec",
    "engram_layers",
    "expert_tensors",
    "moe_layer_spec",
]

ARCHITECTURE = "deepseek41"
SCORING_FUNC = "sqrtsoftplus"
SHARED_TYPES = (BF16, Q2_K, Q3_K)
WKV_TYPES = (BF16, Q2_K)
MAX_STREAMS = 4


class StoredTensor(Protocol):
    """A tensor's stored bytes: a `Tensor` of a file, or one made in memory."""

    @property
    def type(self) -> QuantType:
        """How a row is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, outermost first."""

    @property
    def data(self) -> memoryview:
        """All bytes."""

    def slice(self, index: int) -> memoryview:
        """The bytes of one index of the outermost dim."""

    def numpy(self) -> Any:
        """As an array: f32, bf16 bits as uint16, or uint8 `[..., row bytes]`."""


@dataclass(frozen=True, slots=True)
class MoeLayerSpec:
    """One MoE layer: its numbers, and handles to its tensors (those of a file are valid while it is open).

    A limit of 0 means no clamp. `gate_temp` has no key in the file.
    """

    layer: int
    dim: int
    inter: int
    shared_inter: int
    n_routed: int
    topk: int
    route_scale: float
    norm_topk_prob: bool
    swiglu_limit: float
    shared_swiglu_limit: float
    router: StoredTensor
    """bf16 `[n_routed, dim]`"""
    bias: StoredTensor
    """f32 `[n_routed]`, added to the scores for the choice of experts only"""
    gate: StoredTensor
    """Q2_K `[n_routed, inter, dim]`, as is `up`"""
    up: StoredTensor
    down: StoredTensor
    """Q3_K `[n_routed, dim, inter]`"""
    shared_gate: StoredTensor
    """bf16, Q2_K or Q3_K `[shared_inter, dim]`, as is `shared_up`"""
    shared_up: StoredTensor
    shared_down: StoredTensor
    """bf16, Q2_K or Q3_K `[dim, shared_inter]`"""
    gate_temp: float = 1.0


def moe_layer_spec(gguf: GgufFile, layer: int) -> MoeLayerSpec:
    """Describe MoE layer `layer` of the file.

    Refuses a layer that the model does not have (`ArgumentError`). A missing key or tensor, one of another
    type or shape, and a model of another form are a `FormatError` that names it.
    """
    _require(gguf, "general.architecture", gguf.scalar("general.architecture", str), ARCHITECTURE)
    scoring_key = _key("expert_scoring_func")
    _require(gguf, scoring_key, gguf.scalar(scoring_key, str), SCORING_FUNC)
    shared_key = _key("expert_shared_count")
    _require(gguf, shared_key, gguf.scalar(shared_key, int), 1)

    blocks = _count(gguf, "block_count")
    if not 0 <= layer < blocks:
        refuse("layer", layer, f"0..{blocks - 1}")
    dim = _count(gguf, "embedding_length")
    inter = _count(gguf, "expert_feed_forward_length")
    shared_inter = _count(gguf, "expert_shared_feed_forward_length")
    n_routed = _count(gguf, "expert_count")
    topk = _count(gguf, "expert_used_count")
    scale_key = _key("expert_weights_scale")
    if topk > n_routed:
        malformed(gguf.path, f"key {_key('expert_used_count')!r}", topk, f"up to the {n_routed} experts")

    block = f"blk.{layer}"
    gate, up, down = _experts(gguf, layer, n_routed, dim, inter)
    return MoeLayerSpec(
        layer=layer,
        dim=dim,
        inter=inter,
        shared_inter=shared_inter,
        n_routed=n_routed,
        topk=topk,
        route_scale=_finite(gguf, scale_key, gguf.scalar(scale_key, float)),
        norm_topk_prob=gguf.scalar(_key("expert_weights_norm"), bool),
        swiglu_limit=_of_layer(gguf, "swiglu_clamp_exp", layer),
        shared_swiglu_limit=_of_layer(gguf, "swiglu_clamp_shexp", layer),
        router=gguf.tensor(f"{block}.ffn_gate_inp.weight", (BF16,), (n_routed, dim)),
        bias=gguf.tensor(f"{block}.exp_probs_b.bias", (F32,), (n_routed,)),
        gate=gate,
        up=up,
        down=down,
        shared_gate=gguf.tensor(f"{block}.ffn_gate_shexp.weight", SHARED_TYPES, (shared_inter, dim)),
        shared_up=gguf.tensor(f"{block}.ffn_up_shexp.weight", SHARED_TYPES, (shared_inter, dim)),
        shared_down=gguf.tensor(f"{block}.ffn_down_shexp.weight", SHARED_TYPES, (dim, shared_inter)),
    )


def expert_tensors(gguf: GgufFile) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Gate, up and down of the routed experts of each layer that has some, by layer, as in `MoeLayerSpec`.

    A `FormatError` names what is missing or of another type or shape; so does one for a file without such a layer.
    """
    _require(gguf, "general.architecture", gguf.scalar("general.architecture", str), ARCHITECTURE)
    sizes = [_count(gguf, key) for key in ("expert_count", "embedding_length", "expert_feed_forward_length")]
    layers = [n for n in range(_count(gguf, "block_count")) if f"blk.{n}.ffn_gate_exps.weight" in gguf.tensors]
    if not layers:
        malformed(gguf.path, "tensors", "no blk.N.ffn_gate_exps.weight", "a layer with routed experts")
    return {layer: _experts(gguf, layer, *sizes) for layer in layers}


def _experts(gguf: GgufFile, layer: int, n_routed: int, dim: int, inter: int) -> tuple[Tensor, Tensor, Tensor]:
    def tensor(name: str, kind: QuantType, n: int, k: int) -> Tensor:
        return gguf.tensor(f"blk.{layer}.ffn_{name}_exps.weight", (kind,), (n_routed, n, k))

    return tensor("gate", Q2_K, inter, dim), tensor("up", Q2_K, inter, dim), tensor("down", Q3_K, dim, inter)


@dataclass(frozen=True, slots=True)
class EngramLayerSpec:
    """One engram layer: its numbers, and handles to its tensors (those of a file are valid while it is open)."""

    layer: int
    site: int
    """Which of the model's engram layers, from 0: its place in `hash`"""
    dim: int
    hc: int
    head_dim: int
    eps: float
    hash: EngramTables
    """Of all sites"""
    table: StoredTensor
    """Q2_K `[rows, head_dim]`"""
    wkv: StoredTensor
    """bf16 or Q2_K `[(hc + 1) * dim, cols * head_dim]`"""
    q: StoredTensor
    """f32 `[hc, dim]`, as is `k`"""
    k: StoredTensor

    @property
    def cols(self) -> int:
        """Rows a token gathers."""
        return self.hash.cols


def engram_layers(gguf: GgufFile) -> list[int]:
    """The model's engram layers; none if it has no engram keys."""
    key = _key("engram.layer_ids")
    return gguf.array(key, int) if key in gguf else []


def engram_layer_spec(gguf: GgufFile, layer: int) -> EngramLayerSpec:
    """Describe engram layer `layer` of the file.

    Refuses a layer that has no engram (`ArgumentError`). A missing key or tensor, one of another type or shape, and
    constants that `EngramTables` refuses are a `FormatError` that names it.
    """
    _require(gguf, "general.architecture", gguf.scalar("general.architecture", str), ARCHITECTURE)
    layers = engram_layers(gguf)
    if layer not in layers:
        refuse("layer", layer, f"an engram layer ({', '.join(map(str, layers)) or 'none in the file'})")
    dim, hc = _count(gguf, "embedding_length"), _count(gguf, "hyper_connection.count")
    if hc > MAX_STREAMS:
        malformed(gguf.path, f"key {_key('hyper_connection.count')!r}", hc, f"1 to {MAX_STREAMS}")
    head_dim = _count(gguf, "engram.key_length")
    _require(gguf, _key("engram.key_length"), head_dim, Q2_K.block_values)
    eps_key = _key("attention.layer_norm_rms_epsilon")
    eps = _finite(gguf, eps_key, gguf.scalar(eps_key, float))
    if eps < 0:
        malformed(gguf.path, f"key {eps_key!r}", eps, "0 or more")
    tables = _engram_tables(gguf, layers)
    site, block = layers.index(layer), f"blk.{layer}"
    return EngramLayerSpec(
        layer=layer,
        site=site,
        dim=dim,
        hc=hc,
        head_dim=head_dim,
        eps=eps,
        hash=tables,
        table=gguf.tensor(f"{block}.engram_embd.weight", (Q2_K,), (int(tables.table_rows[site]), head_dim)),
        wkv=gguf.tensor(f"{block}.engram_wkv.weight", WKV_TYPES, ((hc + 1) * dim, tables.cols * head_dim)),
        q=gguf.tensor(f"{block}.engram_q.weight", (F32,), (hc, dim)),
        k=gguf.tensor(f"{block}.engram_k.weight", (F32,), (hc, dim)),
    )


def _engram_tables(gguf: GgufFile, layers: list[int]) -> EngramTables:
    """The constants of all sites, with the rows of the tables that are in the file."""
    import numpy as np

    from metrale.engram_v41.tables import EngramTables

    sites, ngram, heads = len(layers), _count(gguf, "engram.max_ngram_size"), _count(gguf, "engram.head_count")
    rows = []
    for layer in layers:
        name = f"blk.{layer}.engram_embd.weight"
        if name not in gguf.tensors:
            malformed(gguf.path, f"tensor {name!r}", "none in the file", "the table of an engram layer")
        rows.append(gguf.tensors[name].shape[0])

    def of_sites(name: str, each: int) -> list[list[int]]:
        values = gguf.array(_key(name), int)
        if len(values) != sites * each:
            needed = f"{sites * each}, {each} for each of {sites} engram layers"
            malformed(gguf.path, f"key {_key(name)!r}", f"{len(values)} values", needed)
        return [values[site * each : (site + 1) * each] for site in range(sites)]

    cols = (ngram - 1) * heads
    try:
        return EngramTables(
            token_map=np.array(gguf.array(_key("engram.token_map"), int)),
            pad_id=gguf.scalar(_key("engram.pad_id"), int),
            multipliers=np.array(of_sites("engram.multipliers", ngram), np.uint64),
            primes=np.array(of_sites("engram.primes", cols)),
            offsets=np.array(of_sites("engram.offsets", cols)),
            table_rows=np.array(rows),
        )
    except (ArgumentError, OverflowError) as error:
        raise FormatError(f"{gguf.path}: engram constants: {error}") from None


def _key(name: str) -> str:
    return f"{ARCHITECTURE}.{name}"


def _require(gguf: GgufFile, key: str, value: str | int, needed: str | int) -> None:
    if value != needed:
        malformed(gguf.path, f"key {key!r}", repr(value), repr(needed))


def _count(gguf: GgufFile, name: str) -> int:
    value = gguf.scalar(_key(name), int)
    if value < 1:
        malformed(gguf.path, f"key {_key(name)!r}", value, "1 or more")
    return value


def _of_layer(gguf: GgufFile, name: str, layer: int) -> float:
    """The layer's value in an array that has one for each layer."""
    key = _key(name)
    values = gguf.array(key, float)
    if layer >= len(values):
        malformed(gguf.path, f"key {key!r}", f"{len(values)} values", f"one for layer {layer}")
    return _finite(gguf, f"{key}[{layer}]", values[layer])


def _finite(gguf: GgufFile, key: str, value: float) -> float:
    if not math.isfinite(value):
        malformed(gguf.path, f"key {key!r}", value, "a finite number")
    return value
