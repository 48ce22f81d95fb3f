# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsIndex

from metrale.gpu.backend import GpuBackend
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.protocols import PointerLike, StreamLike

def metrale_q8_1_quantize_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    x: PointerLike,
    y: PointerLike,
    K: SupportsIndex,
    M: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def kquant_mmq128(
    gpu: GpuBackend,
    kernel: KernelHandle,
    w: PointerLike,
    y: PointerLike,
    out: PointerLike,
    N: SupportsIndex,
    M: SupportsIndex,
    K: SupportsIndex,
    blocks_per_row: SupportsIndex,
    y_rows: SupportsIndex,
    out_stride: SupportsIndex,
    stream: StreamLike,
) -> None: ...
