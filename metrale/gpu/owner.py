# SPDX-License-Identifier: MIT OR Apache-2.0
"""Owner: what one object holds of a backend, given back together."""

import sys
from collections.abc import Callable

from metrale.gpu.backend import GpuBackend
from metrale.gpu.pointer import DevicePtr

__all__ = ["Owner"]

SMALLEST = 16  # bytes: a buffer whose formula gives less is still an address of its own


class Owner:
    """Allocations, streams and events of one object of the name ``name``.

    In a constructor, ``with Owner(gpu, "MoeV41") as own:`` gives everything back if the block raises, and keeps it
    if it does not. ``free()`` gives everything back once, newest first, also when one of the steps fails; so does
    the last reference.
    """

    def __init__(self, gpu: GpuBackend, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self.freed = False
        self._undo: list[Callable[[], None]] = []

    def alloc(self, buffer: str, nbytes: int) -> DevicePtr:
        """Device memory with the tag ``name.buffer``; at least 16 bytes."""
        held = self.gpu.buffer(max(nbytes, SMALLEST), f"{self.name}.{buffer}")
        self._undo.append(held.free)
        return held.ptr

    def stream(self) -> int:
        """A stream."""
        stream = self.gpu.create_stream()
        self._undo.append(lambda: self.gpu.destroy_stream(stream))
        return stream

    def event(self) -> int:
        """An event without timing."""
        event = self.gpu.create_event()
        self._undo.append(lambda: self.gpu.destroy_event(event))
        return event

    def free(self) -> None:
        """Give everything back. Nothing is left to do after the backend's ``close()``, or the second time."""
        self.freed = True
        errors = []
        while self._undo:
            # An interrupt in a step leaves the other steps for the next call.
            release = self._undo.pop()
            try:
                if self.gpu.usable:
                    release()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.free()

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.free()
