# SPDX-License-Identifier: MIT OR Apache-2.0
"""metrale's ways to launch a kernel that does nothing, as a user writes them.

A way is a function of n that makes n launches in a loop of its own and returns nanoseconds a launch. The arguments are
pointers, all the same, then integers of value ``INTEGER``, then a float of value ``FLOAT``.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

import metrale
from benchmarks import native
from metrale import KernelLaunch
from metrale.gpu import KernelHandle, PreparedLaunch

# The kinds of the kernels' arguments, by their number.
POINTERS = {0: 0, 5: 2, 17: 10}
INTEGERS = {0: 0, 5: 2, 17: 6}
FLOATS = {0: 0, 5: 1, 17: 1}
INTEGER = 3  # not 1, nor a multiple of 16: Triton compiles those in, and would pass fewer arguments
FLOAT = 0.5
GRAPH = 100  # launches in a graph

Way = Callable[[int], float]


def timed(loop: Callable[[int], None]) -> Way:
    """The way that a loop in Python is: what it takes, by the clock around it."""

    def way(n: int) -> float:
        start = perf_counter_ns()
        loop(n)
        return (perf_counter_ns() - start) / n

    return way


class Noop:
    """One of the kernels, where it runs, and what it is given."""

    def __init__(self, gpu: metrale.GpuBackend, kernel: KernelHandle, arguments: int, pointer: int) -> None:
        self.gpu, self.kernel, self.arguments, self.pointer = gpu, kernel, arguments, pointer
        self.stream = gpu.default_stream()

    def spread(self, pointer: Any, integer: Any, number: Any) -> list[Any]:
        """A list as long as the arguments', of one value for each kind."""
        n = self.arguments
        return [pointer] * POINTERS[n] + [integer] * INTEGERS[n] + [number] * FLOATS[n]

    def c_values(self) -> list[Any]:
        return self.spread(ctypes.c_uint64(self.pointer), ctypes.c_uint32(INTEGER), ctypes.c_float(FLOAT))

    def prepare(self) -> PreparedLaunch:
        launch = KernelLaunch(self.gpu, self.kernel).block(32)
        for push in self.spread(
            lambda: launch.arg_ptr(self.pointer), lambda: launch.arg_u32(INTEGER), lambda: launch.arg_f32(FLOAT)
        ):
            push()
        return launch.prepare()


def embedded(name: str, noop: Noop, _cleanup: ExitStack) -> Way:
    """The loop ``name`` of embedded.pyx."""
    loop = getattr(native.embedded(), name)
    return timed(lambda n: loop(noop.gpu, noop.kernel, noop.arguments, noop.pointer, noop.stream, n))


def prepared(noop: Noop, _cleanup: ExitStack) -> Way:
    launch, stream = noop.prepare(), noop.stream

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            launch.launch(stream)

    return way


def prepared_set(noop: Noop, _cleanup: ExitStack) -> Way:
    launch, stream, place = noop.prepare(), noop.stream, POINTERS[noop.arguments]
    if noop.arguments == 0:
        raise ValueError("there is no argument to set")

    @timed
    def way(n: int) -> None:
        for _ in range(n):
            launch.set(place, INTEGER).launch(stream)

    return way


def builder(noop: Noop, _cleanup: ExitStack) -> Way:
    gpu, kernel, p, stream = noop.gpu, noop.kernel, noop.pointer, noop.stream

    def none(n: int) -> None:
        for _ in range(n):
            KernelLaunch(gpu, kernel).grid(1, 1, 1).block(32, 1, 1).launch(stream)

    def five(n: int) -> None:
        for _ in range(n):
            (
                KernelLaunch(gpu, kernel).grid(1, 1, 1).block(32, 1, 1)
                .arg_ptr(p).arg_ptr(p).arg_u32(3).arg_u32(3).arg_f32(0.5).launch(stream)
            )  # fmt: skip

    def seventeen(n: int) -> None:
        for _ in range(n):
            (
                KernelLaunch(gpu, kernel).grid(1, 1, 1).block(32, 1, 1)
                .arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p)
                .arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p).arg_ptr(p)
                .arg_u32(3).arg_u32(3).arg_u32(3).arg_u32(3).arg_u32(3).arg_u32(3).arg_f32(0.5).launch(stream)
            )  # fmt: skip

    return timed({0: none, 5: five, 17: seventeen}[noop.arguments])


def graph(noop: Noop, cleanup: ExitStack) -> Way:
    gpu, launch, stream = noop.gpu, noop.prepare(), noop.stream
    gpu.begin_capture(stream)
    for _ in range(GRAPH):
        launch.launch(stream)
    captured = gpu.end_capture(stream)
    cleanup.callback(gpu.destroy_graph, captured)

    @timed
    def way(n: int) -> None:
        for _ in range(n // GRAPH):
            gpu.launch_graph(captured, stream)

    return way
