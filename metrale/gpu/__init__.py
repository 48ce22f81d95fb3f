# SPDX-License-Identifier: MIT OR Apache-2.0
"""The runtime: backends, kernel launches, the ledger."""

from typing import Any

from metrale.gpu.backend import GpuBackend
from metrale.gpu.buffer import DeviceBuffer, PinnedBuffer
from metrale.gpu.graph import Graph
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.launch import KernelLaunch, PreparedLaunch
from metrale.gpu.ledger import Allocation, Ledger
from metrale.gpu.pointer import DevicePtr

__all__ = [
    "Allocation",
    "DeviceBuffer",
    "DevicePtr",
    "GpuBackend",
    "Graph",
    "KernelHandle",
    "KernelLaunch",
    "Ledger",
    "PinnedBuffer",
    "PreparedLaunch",
    "open",
]


def open(kind: str | None = None, *, device: int = 0, **host: Any) -> GpuBackend:
    """Open a device: ``"cuda"``, ``"host"``, or None for the GPU where there is one and the host where not.

    ``METRALE_BACKEND`` stands in for None. ``device`` is the CUDA device's number; ``order``, ``seed``, ``strict`` and
    ``workers`` go to ``HostBackend``. What does not apply to the backend that is opened has no effect.
    The result's ``kind`` and ``name`` say which it is.
    """
    import os

    from metrale.errors import refuse

    wanted = kind or os.environ.get("METRALE_BACKEND") or "auto"
    if wanted not in ("auto", "cuda", "host"):
        refuse("kind" if kind else "METRALE_BACKEND", wanted, "cuda, host, or none of them")
    if wanted != "host":
        from metrale.gpu.cuda import CudaBackend, device_count

        if wanted == "cuda" or device_count() > 0:
            return CudaBackend(device)
    from metrale.gpu.host import HostBackend

    return HostBackend(**host)
