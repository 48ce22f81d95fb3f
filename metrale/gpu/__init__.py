# SPDX-License-Identifier: MIT OR Apache-2.0
"""The runtime: backends, kernel launches, the ledger."""

from typing import Any

from metrale.gpu.backend import GpuBackend
from metrale.gpu.buffer import DeviceBuffer, PinnedBuffer
from metrale.gpu.builder import KernelLaunch
from metrale.gpu.graph import Graph
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.ledger import Allocation, Ledger, Scope
from metrale.gpu.pointer import DevicePtr
from metrale.gpu.prepared import PreparedLaunch

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
    "Scope",
    "open",
]


def open(
    kind: str | None = None, *, device: int = 0, check: bool | None = None, redzone: bool | None = None, **host: Any
) -> GpuBackend:
    """Open a device: ``"cuda"``, ``"host"``, or None for the GPU where there is one and the host where not.

    ``METRALE_BACKEND`` stands in for None. ``device`` is the CUDA device's number; ``order``, ``seed``, ``strict`` and
    ``workers`` go to ``HostBackend``. What does not apply to the backend that is opened has no effect.
    The result's ``kind`` and ``name`` say which it is.

    ``check`` looks at every launch: a pointer to memory that is not there is refused, with the history of the address;
    the launch is waited for, so that an error is its own. ``redzone`` puts a guard band behind every allocation too,
    and names the launch that wrote into one. ``METRALE_CHECK=1`` and ``METRALE_REDZONE=1`` stand in for None.
    """
    import os

    from metrale.errors import refuse

    wanted = kind or os.environ.get("METRALE_BACKEND") or "auto"
    if wanted not in ("auto", "cuda", "host"):
        refuse("kind" if kind else "METRALE_BACKEND", wanted, "cuda, host or auto, or none of them")
    if check is None:
        check = _switch("METRALE_CHECK", os.environ.get("METRALE_CHECK"))
    if redzone is None:
        redzone = _switch("METRALE_REDZONE", os.environ.get("METRALE_REDZONE"))
    if wanted != "host":
        from metrale.gpu.cuda import CudaBackend, device_count

        if wanted == "cuda" or device_count() > 0:
            return CudaBackend(device, check=check, redzone=redzone)
    from metrale.gpu.host import HostBackend

    return HostBackend(check=check, redzone=redzone, **host)


def _switch(variable: str, value: str | None) -> bool:
    from metrale.errors import refuse

    if value not in (None, "", "0", "1"):
        refuse(variable, value, "0 or 1")
    return value == "1"
