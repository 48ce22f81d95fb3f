# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsIndex

from metrale.gpu.backend import GpuBackend
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.protocols import PointerLike, StreamLike

def dense_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: PointerLike,
    weight: PointerLike,
    output: PointerLike,
    n: SupportsIndex,
    k: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def dense_gemm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: PointerLike,
    weight: PointerLike,
    output: PointerLike,
    m: SupportsIndex,
    n: SupportsIndex,
    k: SupportsIndex,
    stream: StreamLike,
) -> None: ...
