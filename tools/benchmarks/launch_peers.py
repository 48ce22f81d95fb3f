# SPDX-License-Identifier: MIT OR Apache-2.0
"""Other packages' ways to launch a kernel that does nothing.

What a user can make once (streams, configurations, scalars of the right type, tensors) is made outside of the loop.
A peer imports its package when it is asked for; whatever it raises is the reason why it is not measured.
"""

import ctypes
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.driver_calls import check
from benchmarks.launch_ways import FLOAT, INTEGER, Noop, Way, timed
from metrale.gpu import cubin

HERE = Path(__file__).resolve().parent
ELEMENTS = 64  # of the tensors that a peer wants for pointers


def cuda_core(noop: Noop, _cleanup: ExitStack) -> Way:
    import numpy as np
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

    Device(noop.gpu.ordinal).set_current()
    kernel = ObjectCode.from_cubin(_cubin(noop)).get_kernel(noop.kernel.name)
    stream, config = Stream.from_handle(noop.stream), LaunchConfig(grid=1, block=32)
    values = noop.spread(noop.pointer, np.uint32(INTEGER), np.float32(FLOAT))

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            launch(stream, config, kernel, *values)

    return way


def cuda_bindings(noop: Noop, _cleanup: ExitStack) -> Way:
    from cuda.bindings.driver import CUfunction, CUstream, cuLaunchKernel

    function, stream = CUfunction(noop.kernel.address), CUstream(noop.stream)
    kinds = tuple(noop.spread(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_float))
    values = tuple(noop.spread(noop.pointer, INTEGER, FLOAT))
    arguments: Any = (values, kinds) if values else 0

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            result = cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0)
        check(result)

    return way


def cupy_raw_kernel(noop: Noop, _cleanup: ExitStack) -> Way:
    import cupy
    import numpy as np

    cupy.cuda.Device(noop.gpu.ordinal).use()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_cubin(noop))
        file.flush()
        kernel = cupy.RawModule(path=file.name).get_function(noop.kernel.name)
    stream = cupy.cuda.ExternalStream(noop.stream)
    values = tuple(noop.spread(cupy.zeros(ELEMENTS, cupy.float32), np.uint32(INTEGER), np.float32(FLOAT)))

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            kernel((1,), (32,), values, stream=stream)

    return way


def triton(noop: Noop, cleanup: ExitStack) -> Way:
    torch = _torch(noop, cleanup)
    from benchmarks import triton_noop

    kernel = getattr(triton_noop, noop.kernel.name)
    values = noop.spread(torch.zeros(ELEMENTS, dtype=torch.float32, device="cuda"), INTEGER, FLOAT)

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            kernel[(1,)](*values, num_warps=1)

    return way


def torch_compile_kernel(noop: Noop, cleanup: ExitStack) -> Way:
    torch = _torch(noop, cleanup)
    # Without the headers of noop.cu, which torch does not find.
    kinds = noop.spread("float*", "unsigned", "float")
    parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds))
    source = f'extern "C" __global__ void {noop.kernel.name}({parameters}) {{}}'
    kernel = torch.cuda._compile_kernel(source, noop.kernel.name)
    stream = torch.cuda.ExternalStream(noop.stream)
    values = noop.spread(torch.zeros(ELEMENTS, dtype=torch.float32, device="cuda"), INTEGER, FLOAT)

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            kernel((1, 1, 1), (32, 1, 1), values, 0, stream)

    return way


def _cubin(noop: Noop) -> bytes:
    return cubin.cubin(HERE / "noop.cu", noop.gpu.arch)


def _torch(noop: Noop, cleanup: ExitStack) -> Any:
    """torch, with metrale's stream current until the cleanup: Triton launches on the current one."""
    import torch

    torch.cuda.set_device(noop.gpu.ordinal)
    cleanup.callback(torch.cuda.set_stream, torch.cuda.current_stream())
    torch.cuda.set_stream(torch.cuda.ExternalStream(noop.stream))
    return torch
