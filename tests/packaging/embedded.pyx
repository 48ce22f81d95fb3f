# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: language_level=3
# A package of another author: its own launcher, and a call of one of metrale's.
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu cimport DeviceBuffer, GpuBackend, KernelHandle, Launch, launch, launch_geometry, push_ptr, push_u32
from metrale.ops.moe cimport c_moe_v41_accumulate


def accumulate(GpuBackend gpu not None, KernelHandle kernel not None, DeviceBuffer acc, DeviceBuffer src, uint32_t n):
    cdef Launch l
    launch_geometry(&l, 1, 1, 1, 256, 1, 1, 0)
    push_ptr(&l, acc.address())
    push_ptr(&l, src.address())
    push_u32(&l, n)
    launch(gpu, kernel, &l, gpu.stream0)


def accumulate_with_ops(GpuBackend gpu not None, KernelHandle kernel not None, uint64_t acc, uint64_t src, uint32_t n):
    c_moe_v41_accumulate(gpu, kernel, acc, src, n, gpu.stream0)
