# SPDX-License-Identifier: MIT OR Apache-2.0
from typing_extensions import disjoint_base

from metrale.gpu.backend import GpuBackend

CHUNK: int
SHARED_MOST: int

@disjoint_base
class CudaContext(GpuBackend):
    @property
    def ordinal(self) -> int: ...
    @property
    def driver_version(self) -> int: ...
    @property
    def overhead(self) -> dict[str, int]: ...
