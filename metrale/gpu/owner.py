# SPDX-License-Identifier: MIT OR Apache-2.0
"""Owner: what one object holds of a backend, given back together."""

from collections.abc import Callable

from metrale.gpu.backend import GpuBackend
from metrale.gpu.buffer import OwnedHandle
from metrale.gpu.pointer import DevicePtr

__all__ = ["Owner"]

SMALLEST = 16  # bytes: a buffer whose formula gives less is still an address of its own


class Owner:
    """Allocations, streams and events of one object of the name ``name``.

    In a constructor, ``with Owner(gpu, "MoeV41") as own:`` gives everything back if the block raises, and keeps it
    if it does not. ``free()`` gives everything back once, newest first, also when one of the steps fails, which the
    next call then tries again; so does the last reference, as each thing that is held frees itself with its own.
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
        return self._keep(OwnedHandle(self.gpu, self.gpu.create_stream, self.gpu.destroy_stream))

    def event(self) -> int:
        """An event without timing."""
        return self._keep(OwnedHandle(self.gpu, self.gpu.create_event, self.gpu.destroy_event))

    def _keep(self, held: OwnedHandle) -> int:
        self._undo.append(held.free)
        assert held.value is not None  # it has not been freed yet
        return held.value

    def free(self) -> None:
        """Give everything back. Nothing is left to do after the backend's ``close()``, or once all is back."""
        self.freed = True
        first: Exception | None = None
        failed: list[Callable[[], None]] = []
        while self._undo:
            # An interrupt leaves the other steps for the next call; what loses its place here goes with its last
            # reference.
            release = self._undo.pop()
            try:
                if self.gpu.usable:
                    release()
            except Exception as error:
                first = first or error
                failed.insert(0, release)
        self._undo = failed
        if first is not None:
            try:
                raise first
            finally:
                del first  # the error refers to this frame, which would keep what it refers to

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.free()
