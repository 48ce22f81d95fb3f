# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each tensor of a model is for, by its GGUF name, and how much of a file each kind and type takes."""

import re
from collections.abc import Container
from dataclasses import dataclass, field

from metrale.formats.gguf import GgufFile, Tensor

__all__ = [
    "DRAFT",
    "EMBEDDING",
    "ENCODERS",
    "ENGRAM_TABLES",
    "KINDS",
    "OTHER",
    "OUTPUT",
    "ROUTED",
    "SHARED",
    "STREAMED",
    "Amount",
    "Contents",
    "contents",
    "kind_of",
    "layer_of",
]

ROUTED = "routed experts"
SHARED = "shared expert"
ROUTER = "router"
FEED_FORWARD = "feed-forward"
ATTENTION = "attention"
RECURRENT = "recurrent"
ENGRAM_TABLES = "engram tables"
ENGRAM_WKV = "engram wkv"
ENGRAM_GATE = "engram gate"
EMBEDDING = "embedding"
OUTPUT = "output"
NORMS = "norms"
DRAFT = "draft layers"
ENCODERS = "encoders"
OTHER = "other"

STREAMED = (ROUTED, ENGRAM_TABLES)
"""Kinds of which a token needs little: the rest of them may lie elsewhere. All else must be resident."""

_BLOCK = r"blk\.\d+\."
# The first that fits the whole name wins: a norm of the attention is a norm.
_PATTERNS = {
    ENCODERS: r"(v|a|mm|enc|resampler)\..+",
    DRAFT: rf"{_BLOCK}nextn\..+",
    ROUTED: rf"{_BLOCK}ffn_(gate|up|down|gate_up)_exps\.\w+",
    SHARED: rf"{_BLOCK}ffn_(gate|up|down|gate_inp)_shexp\.\w+",
    ROUTER: rf"{_BLOCK}(ffn_gate_inp|exp_probs_b)(\.\w+)?",
    ENGRAM_TABLES: rf"{_BLOCK}engram_embd\.weight",
    ENGRAM_WKV: rf"{_BLOCK}engram_wkv\.weight",
    ENGRAM_GATE: rf"{_BLOCK}engram_[qk]\.weight",
    NORMS: rf"({_BLOCK})?([a-z]+\.)?(\w+_)?norm(_\w+)?(\.\w+)?",
    ATTENTION: rf"{_BLOCK}(attn_\w+|indexer\.\w+)\.\w+|rope_(freqs|factors_\w+)\.weight",
    RECURRENT: rf"{_BLOCK}(ssm_\w+|shortconv\.\w+|time_mix_\w+|channel_mix_\w+)(\.\w+)?",
    FEED_FORWARD: rf"{_BLOCK}ffn_(gate|up|down)\.[a-z_]+",
    EMBEDDING: r"(token_embd|per_layer_token_embd|position_embd|token_types)\.weight",
    OUTPUT: r"output\.(weight|bias)",
}
_COMPILED = {kind: re.compile(pattern) for kind, pattern in _PATTERNS.items()}

KINDS = (
    ROUTED, ENGRAM_TABLES, SHARED, ROUTER, FEED_FORWARD, ATTENTION, RECURRENT, ENGRAM_WKV, ENGRAM_GATE, EMBEDDING,
    OUTPUT, NORMS, DRAFT, ENCODERS, OTHER,
)  # fmt: skip
"""All kinds, in the order of reports."""


@dataclass(slots=True)
class Amount:
    """A number of tensors and their bytes."""

    tensors: int = 0
    nbytes: int = 0

    def add(self, tensor: Tensor) -> None:
        """Count one more."""
        self.tensors += 1
        self.nbytes += tensor.nbytes


@dataclass(slots=True)
class Contents:
    """The tensors of a file, by kind and by type, and what each layer is made of."""

    total: Amount = field(default_factory=Amount)
    by_kind: dict[str, list[Tensor]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    kinds: dict[str, Amount] = field(default_factory=dict)
    types: dict[str, Amount] = field(default_factory=dict)
    layers: dict[int, set[str]] = field(default_factory=dict)
    """Names of a layer's tensors, without its number and without ``.weight`` or ``.bias``."""

    def nbytes(self, *kinds: str) -> int:
        """Bytes of these kinds."""
        return sum(self.kinds[kind].nbytes for kind in kinds if kind in self.kinds)


def contents(gguf: GgufFile, draft_layers: Container[int] = ()) -> Contents:
    """Sort the tensors of the file; all those of ``draft_layers`` are of the kind "draft layers".

    ``FormatError`` for a tensor of a type whose size is not known.
    """
    found = Contents()
    for name, tensor in gguf.tensors.items():
        layer = layer_of(name)
        kind = DRAFT if layer in draft_layers else kind_of(name)
        found.by_kind[kind].append(tensor)
        for amount in (
            found.total,
            found.kinds.setdefault(kind, Amount()),
            found.types.setdefault(tensor.type.name, Amount()),
        ):
            amount.add(tensor)
        if layer is not None and kind != DRAFT:
            part = name.split(".", 2)[2].removesuffix(".weight").removesuffix(".bias")
            found.layers.setdefault(layer, set()).add(part)
    found.kinds = {kind: found.kinds[kind] for kind in KINDS if kind in found.kinds}
    found.types = dict(sorted(found.types.items(), key=lambda item: -item[1].nbytes))
    return found


def kind_of(name: str) -> str:
    """The kind of a tensor of that name; "other" for a name that is not known."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.fullmatch(name)), OTHER)


def layer_of(name: str) -> int | None:
    """The number of the layer that the tensor belongs to, if it does to one."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None
