# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times a launch from Python against the C driver call, and other packages beside it.

All ways launch the same kernels, which do nothing, and take turns: ``ROUNDS`` times each, ``BATCH`` launches at a time
with the stream idle before. A figure is the median over rounds of the time a launch took to queue.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import driver

import metrale
from metrale import KernelLaunch
from metrale.gpu import KernelHandle, cubin

HERE = Path(__file__).resolve().parent
ARGUMENTS = (0, 5, 17)
ROUNDS = 60
BATCH = 200  # launches: fewer than the driver queues before it makes the caller wait
WARM_UP = 5

# The kinds of the kernels' arguments, in order: pointers, integers, floats.
POINTERS = {0: 0, 5: 2, 17: 10}
INTEGERS = {0: 0, 5: 2, 17: 6}
FLOATS = {0: 0, 5: 1, 17: 1}

Batch = Callable[[], float]  # runs BATCH launches and returns nanoseconds a launch


def run(gpu: metrale.GpuBackend) -> dict[str, Any]:
    """The results: a row for each number of arguments and way to launch, in nanoseconds."""
    gpu.add_module(HERE / "noop.cu")
    rows = []
    with gpu.buffer(256) as buffer:
        for n in ARGUMENTS:
            ways, missing = _ways(gpu, n, int(buffer.ptr))
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(WARM_UP + ROUNDS):
                for name, batch in ways.items():
                    gpu.synchronize()
                    times[name].append(batch())
            gpu.synchronize()
            floor = statistics.median(times["C driver call"][WARM_UP:])
            for name, measured in times.items():
                ns = statistics.median(measured[WARM_UP:])
                rows.append({"arguments": n, "way": name, "ns": ns, "over_c_ns": ns - floor})
    return {"rows": rows, "not_measured": missing}


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown: microseconds a launch, and over the C call in brackets."""
    ways = list(dict.fromkeys(row["way"] for row in facts["rows"]))
    at = {(row["way"], row["arguments"]): row for row in facts["rows"]}
    lines = ["Microseconds a launch, and how much of it is over the C driver call.", ""]
    lines.append("| way | " + " | ".join(f"{n} arguments" for n in ARGUMENTS) + " |")
    lines.append("|---|" + "---:|" * len(ARGUMENTS))
    for way in ways:
        cells = [f"{at[way, n]['ns'] / 1e3:.2f} ({at[way, n]['over_c_ns'] / 1e3:+.2f})" for n in ARGUMENTS]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    lines += [f"\nNot measured: {way}: {why}" for way, why in facts["not_measured"].items()]
    return "\n".join(lines)


def _ways(gpu: metrale.GpuBackend, n: int, p: int) -> tuple[dict[str, Batch], dict[str, str]]:
    kernel = gpu.kernel("noop", f"noop{n}")
    ways = {
        "C driver call": _driver_loop(gpu, kernel, n, p),
        "metrale PreparedLaunch": _batch(_prepared(gpu, kernel, n, p)),
        "metrale KernelLaunch": _batch(_builder(gpu, kernel, n, p)),
    }
    missing = {}
    for name, make in (("cuda.core", _cuda_core), ("CuPy RawKernel", _cupy), ("cuda.bindings", _cuda_bindings)):
        try:
            ways[name] = _batch(make(gpu, kernel, n, p))
        except ImportError as error:
            missing[name] = str(error)
    return ways, missing


def _batch(launch: Callable[[], object]) -> Batch:
    def batch() -> float:
        start = time.perf_counter_ns()
        for _ in range(BATCH):
            launch()
        return (time.perf_counter_ns() - start) / BATCH

    return batch


def _driver_loop(gpu: metrale.GpuBackend, kernel: KernelHandle, n: int, p: int) -> Batch:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "driver_loop.so"
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", HERE / "driver_loop.cpp", "-o", library], check=True)
        loop = ctypes.CDLL(library).driver_loop
    loop.restype = ctypes.c_double
    cuda = ctypes.CDLL("libcuda.so.1")
    values = [ctypes.c_uint64(p)] * POINTERS[n] + [ctypes.c_uint32(1)] * INTEGERS[n] + [ctypes.c_float(1)] * FLOATS[n]
    pointers = (ctypes.c_void_p * max(n, 1))(*[ctypes.addressof(value) for value in values])
    function, stream = ctypes.c_void_p(kernel.address), ctypes.c_void_p(gpu.default_stream())

    def batch(_alive: object = values) -> float:
        ns: float = loop(cuda.cuLaunchKernel, function, stream, pointers, BATCH)
        if ns < 0:
            raise RuntimeError("cuLaunchKernel failed")
        return ns

    return batch


def _arguments(launch: KernelLaunch, n: int, p: int) -> KernelLaunch:
    for _ in range(POINTERS[n]):
        launch.arg_ptr(p)
    for _ in range(INTEGERS[n]):
        launch.arg_u32(1)
    for _ in range(FLOATS[n]):
        launch.arg_f32(1.0)
    return launch


def _prepared(gpu: metrale.GpuBackend, kernel: KernelHandle, n: int, p: int) -> Callable[[], object]:
    prepared, stream = _arguments(KernelLaunch(gpu, kernel).block(32), n, p).prepare(), gpu.default_stream()
    return lambda: prepared.launch(stream)


def _builder(gpu: metrale.GpuBackend, kernel: KernelHandle, n: int, p: int) -> Callable[[], object]:
    stream = gpu.default_stream()

    def none() -> None:
        KernelLaunch(gpu, kernel).grid(1, 1, 1).block(32, 1, 1).launch(stream)

    def five() -> None:
        launch = KernelLaunch(gpu, kernel).grid(1, 1, 1).block(32, 1, 1)
        launch.arg_ptr(p).arg_ptr(p).arg_u32(1).arg_u32(1).arg_f32(1.0).launch(stream)

    def seventeen() -> None:
        launch = KernelLaunch(gpu, kernel).grid(1, 1, 1).block(32, 1, 1).arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p)
        launch.arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_u32(1).arg_u32(1)
        launch.arg_u32(1).arg_u32(1).arg_u32(1).arg_u32(1).arg_f32(1.0).launch(stream)

    return {0: none, 5: five, 17: seventeen}[n]


def _cuda_core(gpu: metrale.GpuBackend, kernel: KernelHandle, n: int, p: int) -> Callable[[], object]:
    import numpy as np
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

    Device(0).set_current()
    code = ObjectCode.from_cubin(cubin.cubin(HERE / "noop.cu", gpu.arch))
    other = code.get_kernel(f"noop{n}")
    stream, config = Stream.from_handle(gpu.default_stream()), LaunchConfig(grid=1, block=32)
    values = [p] * POINTERS[n] + [np.uint32(1)] * INTEGERS[n] + [np.float32(1)] * FLOATS[n]
    return lambda: launch(stream, config, other, *values)


def _cupy(gpu: metrale.GpuBackend, kernel: KernelHandle, n: int, p: int) -> Callable[[], object]:
    import cupy
    import numpy as np

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.cubin(HERE / "noop.cu", gpu.arch))
        file.flush()
        other = cupy.RawModule(path=file.name).get_function(f"noop{n}")
    stream = cupy.cuda.ExternalStream(gpu.default_stream())
    pointer = np.uint64(p)
    values = (pointer,) * POINTERS[n] + (np.uint32(1),) * INTEGERS[n] + (np.float32(1),) * FLOATS[n]

    def launch() -> None:
        other((1,), (32,), values, stream=stream)

    return launch


def _cuda_bindings(gpu: metrale.GpuBackend, kernel: KernelHandle, n: int, p: int) -> Callable[[], object]:
    function, stream = driver.CUfunction(kernel.address), driver.CUstream(gpu.default_stream())
    values = (p,) * POINTERS[n] + (1,) * INTEGERS[n] + (1.0,) * FLOATS[n]
    kinds = (ctypes.c_void_p,) * POINTERS[n] + (ctypes.c_uint32,) * INTEGERS[n] + (ctypes.c_float,) * FLOATS[n]
    arguments: Any = (values, kinds) if n else 0
    return lambda: driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0)
