# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each way to launch takes from the heap: a program for test_heap.py, run with count_mallocs.c preloaded.

Arguments: the backend's kind, and "fake" where fake_driver.c is the driver, which needs no compiled kernel.
Prints JSON: ``{way: {"mallocs": {library: count}, "traced": [bytes left, bytes at the peak]}}`` for LAUNCHES launches.
"""

import ctypes
import gc
import json
import sys
import tracemalloc
from itertools import repeat
from pathlib import Path

import metrale
from metrale import KernelLaunch, ops
from metrale.gpu import cubin

LAUNCHES = 1000
WARMUP = 20
REPORT_BYTES = 1 << 20
N = 64

kind, driver = sys.argv[1:]
if driver == "fake":
    cubin.cubin = lambda path, arch: b""
gpu = metrale.open(kind)
kernel = gpu.kernel("moe_v41", "moe_v41_finish")
acc, out = gpu.buffer(4 * N), gpu.buffer(2 * N)
acc_ptr, out_ptr, stream = int(acc.ptr), int(out.ptr), gpu.create_stream()
prepared = KernelLaunch(gpu, kernel).block(256).arg_ptr(acc).arg_ptr(out).arg_u32(N).prepare()
shim = ctypes.CDLL(None)
for function in (shim.mallocs_start, shim.mallocs_stop):
    function.restype = None


def nothing():
    pass


def builder():
    KernelLaunch(gpu, kernel).grid(1).block(256).arg_ptr(acc_ptr).arg_ptr(out_ptr).arg_u32(N).launch()


def builder_with_buffers():
    KernelLaunch(gpu, kernel).grid(1, 1, 1).block(256, 1, 1).arg_ptr(acc).arg_ptr(out).arg_u32(N).launch()


def builder_with_shared_mem():
    KernelLaunch(gpu, kernel).block(256).shared_mem(0).arg_ptr(acc_ptr).arg_ptr(out_ptr).arg_u32(N).launch()


def builder_on_a_stream():
    KernelLaunch(gpu, kernel).block(256).arg_ptr(acc_ptr).arg_ptr(out_ptr).arg_u32(N).launch(stream)


def prepared_launch():
    prepared.launch()


def prepared_launch_with_arguments_set():
    prepared.set("n", N).set(0, acc_ptr).launch()


def prepared_launch_on_a_stream():
    prepared.launch(stream)


def op():
    ops.moe_v41_finish(gpu, kernel, acc_ptr, out_ptr, N, None)


def op_with_buffers():
    ops.moe_v41_finish(gpu, kernel, acc, out, N, None)


def op_on_a_stream():
    ops.moe_v41_finish(gpu, kernel, acc_ptr, out_ptr, N, stream)


def one_allocation_more():
    prepared.launch()
    object()


def run(step, times):
    for _ in repeat(None, times):
        step()


def mallocs(step, times):
    """Allocations of this thread meanwhile, by the library that asked for them."""
    text = ctypes.create_string_buffer(REPORT_BYTES)
    shim.mallocs_start()
    run(step, times)
    shim.mallocs_stop()
    assert shim.mallocs_report(text, REPORT_BYTES) == 0
    counts = {}
    for line in text.value.decode().splitlines():
        count, library = line.split(" ", 1)
        counts[Path(library).name] = counts.get(Path(library).name, 0) + int(count)
    return counts


def traced(step, times):
    """Bytes of Python's allocator that are left, and that there were at most."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    run(step, times)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before, peak - before


def taken(step):
    """What LAUNCHES steps take beyond what the measurement does."""
    run(step, WARMUP)
    without, counts = mallocs(step, 0), mallocs(step, LAUNCHES)
    more = {name: count - without.get(name, 0) for name, count in counts.items()}
    none, some = traced(nothing, LAUNCHES), traced(step, LAUNCHES)
    return {"mallocs": {name: count for name, count in more.items() if count},
            "traced": [some[0] - none[0], some[1] - none[1]]}  # fmt: skip


gc.disable()
WAYS = (builder, builder_with_buffers, builder_with_shared_mem, builder_on_a_stream, prepared_launch,
        prepared_launch_with_arguments_set, prepared_launch_on_a_stream, op, op_with_buffers, op_on_a_stream,
        one_allocation_more)  # fmt: skip
for _ in range(2):  # what is cached at the first measurement is there at the second
    report = {way.__name__: taken(way) for way in WAYS}
print(json.dumps(report))
acc.free()
out.free()
gpu.destroy_stream(stream)
