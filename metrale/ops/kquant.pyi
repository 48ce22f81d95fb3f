# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsFloat, SupportsIndex

from metrale.gpu.backend import GpuBackend
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.protocols import PointerLike, StreamLike

def kquant_q8_1_rows_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    x: PointerLike,
    y: PointerLike,
    K: SupportsIndex,
    M: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def kquant_swiglu_q8_1_rows_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate: PointerLike,
    up: PointerLike,
    w: PointerLike,
    h: PointerLike,
    y: PointerLike,
    rows: SupportsIndex,
    inter: SupportsIndex,
    limit: SupportsFloat,
    stream: StreamLike,
) -> None: ...
def kquant_mmvq_w(
    gpu: GpuBackend,
    kernel: KernelHandle,
    w: PointerLike,
    y: PointerLike,
    out: PointerLike,
    K: SupportsIndex,
    N: SupportsIndex,
    M: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def kquant_mmvq_experts_w(
    gpu: GpuBackend,
    kernel: KernelHandle,
    tables: PointerLike,
    y: PointerLike,
    out: PointerLike,
    K: SupportsIndex,
    N: SupportsIndex,
    M: SupportsIndex,
    y_stride_bytes: SupportsIndex,
    experts: SupportsIndex,
    warps: SupportsIndex,
    stream: StreamLike,
) -> None: ...
