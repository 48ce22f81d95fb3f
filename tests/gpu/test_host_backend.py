# SPDX-License-Identifier: MIT OR Apache-2.0
"""HostBackend: its options, a user's kernels, and what it says of a kernel that fails."""

import ctypes.util
import re
from pathlib import Path

import numpy as np
import pytest

import metrale
from metrale import KernelLaunch
from metrale.errors import ArgumentError, CompileError, KernelNotFound, LaunchError, MetraleError
from metrale.gpu import hostlib

PROBES = Path(__file__).with_name("probes.cu")
ORDERS = ("forward", "reversed", "shuffled")

# Each thread hands a value to its neighbour; a barrier is missing, or half the threads never get to one.
FAULTY = """
#include "common/types.cuh"
extern "C" __global__ void without_barrier(int* out) {
    METRALE_DYNAMIC_SHARED(int, tile);
    tile[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = tile[(threadIdx.x + 1) % blockDim.x];
}
extern "C" __global__ void half_a_barrier(int* out) {
    if (blockIdx.x == 2 && threadIdx.x >= 16)
        while (true)
            __shfl_sync(0xffffffffu, 0, 0);
    __syncthreads();
    out[threadIdx.x] = 1;
}
extern "C" __global__ void early_return(int* out) {
    if (threadIdx.x == 5)
        return;
    __syncthreads();
    out[threadIdx.x] = 1;
}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "faulty.cu"
    path.write_text(FAULTY)
    return path


@pytest.fixture
def opened_with():
    """`opened_with(**options)`: a host backend that is closed after the test."""
    backends = []

    def open_host(**options):
        backends.append(metrale.open("host", **options))
        return backends[-1]

    yield open_host
    assert [left for backend in backends for left in backend.close()] == []


# Options


@pytest.mark.parametrize("order", ORDERS)
def test_options_can_be_read_back(opened_with, order):
    gpu = opened_with(order=order, seed=5, strict=True, workers=3)
    assert (gpu.order, gpu.seed, gpu.strict, gpu.workers, gpu.sm_count) == (order, 5, True, 3, 3)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("order", "sideways", "forward, reversed, shuffled"),
        ("order", None, "forward, reversed, shuffled"),
        ("seed", -1, "0 to 2**64 - 1"),
        ("seed", 1 << 64, "0 to 2**64 - 1"),
        ("workers", -1, "0 (all cores) to 1024"),
        ("workers", 1025, "0 (all cores) to 1024"),
    ],
)
def test_options_out_of_range_are_refused(name, value, allowed):
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{name}: got {value!r}, allowed: {allowed}')}$"):
        metrale.open("host", **{name: value})


def test_the_number_of_a_cuda_device_has_no_effect_on_the_host():
    with metrale.open("host", device=3) as gpu:
        assert gpu.kind == "host"


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="threads"):
        metrale.open("host", threads=3)


def rotated(gpu, faulty):
    """What 64 threads get from their neighbours when nobody waits."""
    if not gpu.has_module("faulty"):
        gpu.add_module(faulty)
    with gpu.buffer(64 * 4) as out:
        KernelLaunch(gpu, gpu.kernel("faulty", "without_barrier")).block(64).shared_mem(256).arg_ptr(out).launch()
        return tuple(out.numpy("int32"))


def test_a_missing_barrier_shows_in_every_order(opened_with, faulty):
    results = {rotated(opened_with(order=order, seed=1), faulty) for order in ORDERS}
    assert len(results) == 3
    assert tuple(np.roll(range(64), -1)) not in results


def test_a_seed_is_an_order(opened_with, faulty):
    results = [rotated(opened_with(order="shuffled", seed=seed), faulty) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]


def test_the_number_of_workers_does_not_show(opened_with):
    totals = set()
    for workers in (1, 2, 7):
        gpu = opened_with(workers=workers)
        gpu.add_module(PROBES)
        with gpu.upload(np.zeros(1, np.uint32)) as out:
            KernelLaunch(gpu, gpu.kernel("probes", "count_threads")).grid(50).block(40).arg_ptr(out).launch()
            totals.add(int(out.numpy("uint32")[0]))
    assert totals == {2000}


# Modules


def test_a_users_kernels_are_added_by_file(opened_with):
    gpu = opened_with()
    assert not gpu.has_module("probes")
    assert gpu.add_module(PROBES) == ["probes"]
    assert gpu.has_module("probes")
    assert gpu.kernel("probes", "fill").params == (("out", "ptr"), ("n", "u32"), ("value", "u32"))


def test_a_kernel_library_is_added_by_file(opened_with, tmp_path):
    library = tmp_path / "mine.so"
    hostlib.build_tool().build([PROBES], library)
    gpu = opened_with()
    assert gpu.add_module(library) == ["probes"]
    assert gpu.kernel("probes", "fill").name == "fill"


@pytest.mark.parametrize("form", [str, Path])
def test_a_module_is_loaded_once(opened_with, form):
    gpu = opened_with()
    gpu.add_module(form(PROBES))
    with pytest.raises(ArgumentError, match=r"path: got .*, allowed: modules that are not there yet \(probes would be"):
        gpu.add_module(form(PROBES))


def test_a_module_of_the_package_is_not_replaced(opened_with, tmp_path):
    mine = tmp_path / "gemv.cu"
    mine.write_text('extern "C" __global__ void dense_gemv_bf16(int* out) { out[0] = 1; }\n')
    gpu = opened_with()
    with pytest.raises(ArgumentError, match=r"allowed: modules that are not there yet \(gemv would be loaded twice\)"):
        gpu.add_module(mine)
    assert len(gpu.kernel("gemv", "dense_gemv_bf16").params) == 5


def test_a_users_kernel_that_is_not_there_gets_near_names(opened_with):
    gpu = opened_with()
    gpu.add_module(PROBES)
    with pytest.raises(KernelNotFound, match="no kernel 'fil' in module 'probes'; nearest: fill"):
        gpu.kernel("probes", "fil")
    with pytest.raises(KernelNotFound, match="no kernel module 'probe'; nearest: probes"):
        gpu.kernel("probe", "fill")


def test_a_source_that_does_not_compile_carries_the_compilers_log(opened_with, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text('extern "C" __global__ void broken(int* out) { out[0] = question; }\n')
    with pytest.raises(CompileError, match=r"^broken.cu does not compile for the host") as caught:
        opened_with().add_module(broken)
    assert "question" in caught.value.log
    assert "broken.cu" in caught.value.log


def test_a_file_that_is_not_there_is_an_error(opened_with, tmp_path):
    with pytest.raises(OSError, match=r"none\.cu"):
        opened_with().add_module(tmp_path / "none.cu")
    with pytest.raises(MetraleError, match=r"host kernels: .*none\.so"):
        opened_with().add_module(tmp_path / "none.so")


def test_a_library_without_kernels_is_an_error(opened_with):
    other = hostlib.default_library().replace("libmetrale_host", "missing")
    with pytest.raises(MetraleError, match="host kernels: "):
        opened_with(library=other)
    libc = ctypes.util.find_library("m")
    gpu = opened_with()
    path = next(Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if libc in line)
    with pytest.raises(MetraleError, match=rf"host kernels: {path} was not built by cuda/host/build\.py"):
        gpu.add_module(path)


# Kernels that fail


def test_an_error_names_kernel_block_and_thread(opened_with, faulty):
    gpu = opened_with()
    gpu.add_module(faulty)
    with gpu.buffer(64 * 4) as out:
        launch = KernelLaunch(gpu, gpu.kernel("faulty", "half_a_barrier")).grid(4).block(32).arg_ptr(out)
        with pytest.raises(LaunchError, match=r"kernel half_a_barrier, block \(2, 0, 0\), thread \(\d+, 0, 0\)"):
            launch.launch()


@pytest.mark.parametrize("order", ORDERS)
def test_threads_that_returned_are_missed_if_strict(opened_with, faulty, order):
    for strict in (False, True):
        gpu = opened_with(order=order, strict=strict)
        gpu.add_module(faulty)
        with gpu.buffer(32 * 4) as out:
            launch = KernelLaunch(gpu, gpu.kernel("faulty", "early_return")).block(32).arg_ptr(out)
            if strict:
                with pytest.raises(LaunchError, match=r"kernel early_return.*thread \(5, 0, 0\)"):
                    launch.launch()
            else:
                launch.launch()


def test_a_backend_goes_on_after_an_error(opened_with, faulty):
    gpu = opened_with(strict=True)
    gpu.add_module(faulty)
    gpu.add_module(PROBES)
    with gpu.buffer(32 * 4) as out:
        with pytest.raises(LaunchError):
            KernelLaunch(gpu, gpu.kernel("faulty", "early_return")).block(32).arg_ptr(out).launch()
        KernelLaunch(gpu, gpu.kernel("probes", "fill")).block(32).arg_ptr(out).arg_u32(32).arg_u32(6).launch()
        assert out.numpy("uint32").tolist() == [6] * 32


# Memory


def test_memory_starts_as_nan(host):
    with host.buffer(256) as buffer:
        assert np.isnan(buffer.numpy("float32")).all()
        assert np.isnan(buffer.numpy("float16")).all()
