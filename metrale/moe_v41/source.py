# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where an ExpertArena reads experts from: memory, a GGUF file, or any object with ``read_into``."""

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from metrale.errors import MetraleError, refuse
from metrale.formats.deepseek41 import expert_tensors
from metrale.formats.gguf import GgufFile
from metrale.gpu import PinnedBuffer

__all__ = ["PARTS", "ArrayExperts", "ExpertSource", "GgufExperts", "read_part"]

PARTS = ("gate", "up", "down")


class ExpertSource(Protocol):
    """Gives experts' raw blocks."""

    def read_into(self, layer: int, expert: int, part: str, memory: memoryview) -> int | None:
        """Fill ``memory`` with the blocks of an expert's ``part``, "gate", "up" or "down".

        Several threads call this at once. A number that is returned is that of the bytes read; fewer than
        ``memory`` has are an error, as is any exception. ``memory`` is of no use after the return.
        """


class ArrayExperts:
    """Experts in host memory: ``{layer: (gate, up, down)}``, arrays of bytes of which the first index is the expert.

    What an array is over, such as a map of a file, may be larger than the memory.
    """

    def __init__(self, layers: Mapping[int, tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]) -> None:
        self._layers: dict[int, list[npt.NDArray[np.uint8]]] = {}
        for layer, arrays in layers.items():
            self._layers[layer] = [_blocks(f"layer {layer}: {p}", a) for p, a in zip(PARTS, arrays, strict=True)]

    def read_into(self, layer: int, expert: int, part: str, memory: memoryview) -> None:
        """Copy the part. Refuses an expert that is not there, and memory of another size."""
        if layer not in self._layers:
            refuse("layer", layer, _listed(self._layers))
        blocks = self._layers[layer][PARTS.index(part)]
        if not 0 <= expert < len(blocks):
            refuse("expert", expert, f"0 to {len(blocks) - 1}")
        if memory.nbytes != blocks[expert].nbytes:
            refuse("memory", f"{memory.nbytes} bytes", f"{blocks[expert].nbytes} bytes")
        np.copyto(np.frombuffer(memory, np.uint8), blocks[expert])  # which lets other threads run


class GgufExperts:
    """The experts of all layers of a DeepSeek-V4.1 GGUF file, whole or split, read with ``preadv``.

    A context manager; close it after the arenas that read from it have been freed. ``FormatError`` for a file whose
    experts are not Q2_K and Q3_K of one shape; a file that was cut short later is an error of the read.
    """

    def __init__(self, path: Any) -> None:
        self._file = GgufFile(path)
        try:
            self._layers = expert_tensors(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have routed experts."""
        return tuple(self._layers)

    def read_into(self, layer: int, expert: int, part: str, memory: memoryview) -> None:
        """Read the part. Refuses an expert that is not there, and memory of another size."""
        if layer not in self._layers:
            refuse("layer", layer, _listed(self._layers))
        tensor = self._layers[layer][PARTS.index(part)]
        if not 0 <= expert < tensor.shape[0]:
            refuse("expert", expert, f"0 to {tensor.shape[0] - 1}")
        if memory.nbytes != tensor.slice_nbytes:
            refuse("memory", f"{memory.nbytes} bytes", f"{tensor.slice_nbytes} bytes")
        tensor.read_into(memory, expert * tensor.slice_nbytes)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _blocks(name: str, values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """As ``[expert, bytes]``, over the same memory."""
    array = np.asarray(values)
    if array.dtype != np.uint8 or array.ndim < 2 or not array.flags.c_contiguous:
        refuse(name, f"{array.dtype} {list(array.shape)}", "contiguous uint8 [experts, ...]")
    return array.reshape(len(array), -1)


def _listed(layers: Mapping[int, Any]) -> str:
    return f"a layer with experts ({', '.join(map(str, layers)) or 'none'})"


def read_part(
    source: ExpertSource, layer: int, expert: int, part: str, ring: PinnedBuffer, first: int, last: int
) -> None:
    """Have the source fill bytes ``first`` to ``last`` of ``ring``."""
    memory = memoryview(cast(Any, ring))[first:last]
    try:
        count = source.read_into(layer, expert, part, memory)
    finally:
        with suppress(BufferError):  # the source looks at it still, in what is kept of an error perhaps
            memory.release()
    if count is not None and count < last - first:
        raise MetraleError(f"{part}: the source gave {count} bytes, needed: {last - first}")
