# SPDX-License-Identifier: MIT OR Apache-2.0
import os

from typing_extensions import disjoint_base

from metrale.gpu.backend import GpuBackend

@disjoint_base
class HostBackend(GpuBackend):
    def __init__(
        self,
        order: str = "forward",
        seed: int = 0,
        strict: bool = False,
        workers: int = 0,
        library: str | os.PathLike[str] | None = None,
        check: bool = False,
        redzone: bool = False,
    ) -> None: ...
    @property
    def order(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def strict(self) -> bool: ...
    @property
    def workers(self) -> int: ...
