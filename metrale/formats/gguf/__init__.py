# SPDX-License-Identifier: MIT OR Apache-2.0
"""GGUF files, versions 2 and 3, little-endian, whole or split: `GgufFile` and its `Tensor`s, and layers loaded
from them."""

import os
from typing import TYPE_CHECKING

from metrale.formats.gguf.file import GgufFile, Tensor

if TYPE_CHECKING:
    from metrale.formats.load import LoadedMoeLayer
    from metrale.gpu import GpuBackend

__all__ = ["GgufFile", "Tensor", "load_moe_layer"]


def load_moe_layer(gpu: "GpuBackend", path: str | os.PathLike[str], layer: int) -> "LoadedMoeLayer":
    """`metrale.formats.load.load_moe_layer`, imported when called: reading a header needs none of it."""
    from metrale.formats import load

    return load.load_moe_layer(gpu, path, layer)
