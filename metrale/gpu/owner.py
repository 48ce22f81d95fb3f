# SPDX-License-Identifier: MIT OR Apache-2.0
"""Owner: what one object holds of a backend, given back together."""

from collections.abc import Callable
from typing import Any, TypeVar

from metrale.gpu.backend import GpuBackend
from metrale.gpu.pointer import DevicePtr

__all__ = ["Owner"]

T = TypeVar("T")

SMALLEST = 16  # bytes: a buffer whose formula gives less is still an address of its own


class Owner:
    """Allocations, streams and events of one object of the name ``name``.

    In a constructor, ``with Owner(gpu, "MoeV41") as own:`` gives everything back if the block raises, and keeps it
    if it does not. ``free()`` gives everything back once, newest first, also when one of the steps fails.
    """

    def __init__(self, gpu: GpuBackend, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self._undo: list[tuple[Callable[[Any], None], Any]] = []

    def alloc(self, buffer: str, nbytes: int) -> DevicePtr:
        """Device memory with the tag ``name.buffer``; at least 16 bytes."""
        return self._hold(self.gpu.free, self.gpu.alloc(max(nbytes, SMALLEST), f"{self.name}.{buffer}"))

    def stream(self) -> int:
        """A stream."""
        return self._hold(self.gpu.destroy_stream, self.gpu.create_stream())

    def event(self) -> int:
        """An event without timing."""
        return self._hold(self.gpu.destroy_event, self.gpu.create_event())

    def free(self) -> None:
        """Give everything back. Nothing is left to do after the backend's ``close()``, or the second time."""
        undo, self._undo = self._undo, []
        errors = []
        for release, handle in reversed(undo):
            if self.gpu.closed:
                return
            try:
                release(handle)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _hold(self, release: Callable[[Any], None], handle: T) -> T:
        self._undo.append((release, handle))
        return handle

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.free()
