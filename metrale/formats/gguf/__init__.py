# SPDX-License-Identifier: MIT OR Apache-2.0
"""GGUF files, versions 2 and 3, little-endian, whole or split: `GgufFile` and its `Tensor`s."""

from metrale.formats.gguf.file import GgufFile, Tensor

__all__ = ["GgufFile", "Tensor"]
