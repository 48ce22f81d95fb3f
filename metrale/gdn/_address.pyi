# SPDX-License-Identifier: MIT OR Apache-2.0
from metrale.gpu.backend import GpuBackend
from metrale.gpu.pointer import DevicePtr
from metrale.gpu.protocols import PointerLike, StreamLike

def address(gpu: GpuBackend, value: PointerLike, name: str, stream: StreamLike) -> DevicePtr: ...
