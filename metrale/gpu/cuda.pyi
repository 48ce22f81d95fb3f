# SPDX-License-Identifier: MIT OR Apache-2.0
from typing_extensions import disjoint_base

from metrale.gpu.context import CudaContext

@disjoint_base
class CudaBackend(CudaContext):
    def __init__(self, device: int = 0, check: bool = False, redzone: bool = False) -> None: ...
    @property
    def arch(self) -> str: ...

def device_count() -> int: ...
