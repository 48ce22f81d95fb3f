# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launchers of ``metrale.ops``, called from Python on shapes so small that one block does the work."""

import ctypes
from contextlib import ExitStack
from typing import Any, NamedTuple

import metrale
from benchmarks.launch_ways import Way, timed
from metrale import ops
from metrale.gpu import KernelHandle


class Op(NamedTuple):
    """A launcher's call, and the launch it comes to: one block of ``block`` threads with ``values``, and no dynamic
    shared memory."""

    kernel: KernelHandle
    block: int
    values: list[Any]
    way: Way


def gather_rows(gpu: metrale.GpuBackend, cleanup: ExitStack) -> Op:
    """A launcher of few arguments, 4 of which are the kernel's."""
    kernel, stream, dim = gpu.kernel("moe_v41", "moe_v41_gather_rows"), gpu.default_stream(), 8
    x, out = (_ones(gpu, cleanup, dim // 2) for _ in range(2))
    rows = cleanup.enter_context(gpu.upload(bytes(4)))

    @timed
    def way(times: int) -> None:
        for _ in range(times):
            ops.moe_v41_gather_rows(gpu, kernel, x, rows, out, 1, dim, stream)

    return Op(kernel, 256, [*_pointers(x, rows, out), ctypes.c_uint32(dim)], way)


def route_select(gpu: metrale.GpuBackend, cleanup: ExitStack) -> Op:
    """The launcher with the most arguments, 17."""
    kernel, stream, routed, topk = gpu.kernel("moe_v41", "moe_v41_route_select"), gpu.default_stream(), 8, 2
    words = (routed, routed, routed, 1 + 3 * topk, topk, topk, 6 * topk)
    logits, bias, slots, hdr, weights, rows, ptrs = (_ones(gpu, cleanup, n) for n in words)
    arena, size, gate, up, down = 1 << 40, 12810240, 0, 3870720, 7741440  # addresses that nothing reads

    @timed
    def way(times: int) -> None:
        for _ in range(times):
            ops.moe_v41_route_select(
                gpu, kernel, logits, bias, routed, topk, 1.0, 1.5, True, slots, arena, size, gate, up, down,
                hdr, weights, rows, ptrs, stream,
            )  # fmt: skip

    u32, u64, f32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
    values = [*_pointers(logits, bias), u32(routed), u32(topk), f32(1.0), f32(1.5), u32(1), *_pointers(slots)]
    values += [u64(value) for value in (arena, size, gate, up, down)]
    values += _pointers(hdr, weights, rows, ptrs)
    return Op(kernel, 256, values, way)


OPS = (gather_rows, route_select)


def _ones(gpu: metrale.GpuBackend, cleanup: ExitStack, words: int) -> metrale.DeviceBuffer:
    """A buffer of 4-byte words, each two ones in bf16, which is a little more than 1 in f32."""
    return cleanup.enter_context(gpu.upload(bytes.fromhex("803f803f") * words))


def _pointers(*buffers: metrale.DeviceBuffer) -> list[Any]:
    return [ctypes.c_uint64(int(buffer.ptr)) for buffer in buffers]
