# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsIndex

from metrale.gpu.backend import GpuBackend
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.protocols import PointerLike, StreamLike

def conv1d_update_chunk2(
    gpu: GpuBackend,
    kernel: KernelHandle,
    conv_state: PointerLike,
    input: PointerLike,
    weight: PointerLike,
    output: PointerLike,
    conv_state_intermediate: PointerLike,
    d_inner: SupportsIndex,
    d_conv: SupportsIndex,
    batch_size: SupportsIndex,
    stream: StreamLike,
    bias: PointerLike = 0,
) -> None: ...
def conv1d_update_chunkn(
    gpu: GpuBackend,
    kernel: KernelHandle,
    conv_state: PointerLike,
    input: PointerLike,
    weight: PointerLike,
    output: PointerLike,
    conv_state_intermediate: PointerLike,
    d_inner: SupportsIndex,
    d_conv: SupportsIndex,
    batch_size: SupportsIndex,
    stream: StreamLike,
    bias: PointerLike = 0,
) -> None: ...
def conv1d_verify(
    gpu: GpuBackend,
    kernel: KernelHandle,
    conv_state: PointerLike,
    input: PointerLike,
    weight: PointerLike,
    output: PointerLike,
    tokens: SupportsIndex,
    d_inner: SupportsIndex,
    d_conv: SupportsIndex,
    batch_size: SupportsIndex,
    stream: StreamLike,
    bias: PointerLike = 0,
) -> None: ...
def conv1d_commit(
    gpu: GpuBackend,
    kernel: KernelHandle,
    conv_state: PointerLike,
    input: PointerLike,
    accepted: PointerLike,
    tokens: SupportsIndex,
    d_inner: SupportsIndex,
    d_conv: SupportsIndex,
    batch_size: SupportsIndex,
    stream: StreamLike,
) -> None: ...
