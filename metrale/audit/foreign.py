# SPDX-License-Identifier: MIT OR Apache-2.0
"""What torch and CuPy hold of a device's memory, as they say themselves. None of them is imported here."""

import sys

from metrale.gpu.context import CHUNK, SHARED_MOST

__all__ = ["holdings"]


def holdings(ordinal: int) -> dict[str, tuple[int, int]]:
    """``{library: (bytes that its allocator holds, bytes that rounding to the driver's chunks adds)}`` of device
    ``ordinal``, for the libraries that are loaded. Bytes held are used or cached. CuPy does not say in what pieces it
    holds them: its rounding is 0 here, and may be up to 2 MiB a piece."""
    found = {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        segments = [s["total_size"] for s in torch.cuda.memory_snapshot() if s["device"] == ordinal]
        found["torch"] = (sum(segments), sum(-size % CHUNK for size in segments if size > SHARED_MOST))
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        with cupy.cuda.Device(ordinal):
            found["CuPy"] = (cupy.get_default_memory_pool().total_bytes(), 0)
    return found
