# SPDX-License-Identifier: MIT OR Apache-2.0
"""Graph: captured work with an owner."""

from functools import partial
from typing import Self

from metrale.gpu.backend import GpuBackend
from metrale.gpu.buffer import OwnedHandle
from metrale.gpu.protocols import StreamLike

__all__ = ["Graph"]


class Graph:
    """Work of ``stream`` (None: the default stream), captured in a ``with`` block and launched as often as wanted.

    ``with Graph(gpu) as graph: launch.launch()``, then ``graph.launch()``. ``handle`` is what ``gpu.launch_graph`` and
    ``PreparedLaunch.update`` take; None before the capture. A block that raises captures nothing, and leaves the
    stream as it was. ``free()`` destroys the graph, as does the last reference.
    """

    def __init__(self, gpu: GpuBackend, stream: StreamLike = None) -> None:
        self.gpu = gpu
        self.stream = stream
        self._owned: OwnedHandle | None = None

    @property
    def handle(self) -> int | None:
        """The graph, as ``gpu.end_capture`` gave it."""
        return self._owned.value if self._owned else None

    def __enter__(self) -> Self:
        self.free()
        self.gpu.begin_capture(self.stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._owned = OwnedHandle(self.gpu, partial(self.gpu.end_capture, self.stream), self.gpu.destroy_graph)
        elif self.gpu.usable:
            self.gpu.abort_capture_if_active(self.stream)

    def launch(self, stream: StreamLike = None) -> None:
        """Queue the captured work on ``stream`` (None: the default stream)."""
        # What has no handle is refused as any other graph that is not live.
        self.gpu.launch_graph(self.handle or 0, stream)

    def free(self) -> None:
        """Destroy the graph; launches that are queued still complete. Nothing is left to do the second time, or after
        the backend's ``close()``."""
        if self._owned:
            self._owned.free()
