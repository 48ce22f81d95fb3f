# SPDX-License-Identifier: MIT OR Apache-2.0
"""GGUF files, versions 2 and 3, little-endian, whole or split: `GgufFile` and its `Tensor`s, and layers and
experts loaded from them."""

import os
from typing import TYPE_CHECKING

from metrale.formats.gguf.file import GgufFile, Tensor

if TYPE_CHECKING:
    from metrale.formats.load import LoadedEngramLayer, LoadedMoeLayer
    from metrale.gpu import GpuBackend
    from metrale.moe_v41 import ExpertArena, GgufExperts

__all__ = ["GgufFile", "Tensor", "expert_source", "load_engram_layer", "load_moe_layer"]


def load_engram_layer(
    gpu: "GpuBackend", path: str | os.PathLike[str], layer: int, *, resident: bool = True, several_tokens: bool = True
) -> "LoadedEngramLayer":
    """`metrale.formats.load.load_engram_layer`, imported when called."""
    from metrale.formats import load

    return load.load_engram_layer(gpu, path, layer, resident=resident, several_tokens=several_tokens)


def expert_source(path: str | os.PathLike[str]) -> "GgufExperts":
    """`metrale.formats.load.expert_source`, imported when called."""
    from metrale.formats import load

    return load.expert_source(path)


def load_moe_layer(
    gpu: "GpuBackend", path: str | os.PathLike[str], layer: int, experts: "ExpertArena | None" = None
) -> "LoadedMoeLayer":
    """`metrale.formats.load.load_moe_layer`, imported when called: reading a header needs none of it."""
    from metrale.formats import load

    return load.load_moe_layer(gpu, path, layer, experts)
