# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package's modules as the CUDA driver sees them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda.bindings import driver

import metrale
from metrale import Graph, KernelLaunch
from metrale.errors import ArgumentError, CudaError, LaunchError
from metrale.gpu import cubin, sources

PROBES = Path(__file__).with_name("probes.cu")
KERNELS = [(module, kernel) for module, kernels in sources.signatures().items() for kernel in kernels]


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "kernel"), KERNELS)
def test_the_binary_has_the_parameters_that_the_source_declares_and_no_more(cuda, module, kernel):
    ok = driver.CUresult.CUDA_SUCCESS
    handle = cuda.kernel(module, kernel)  # checks each declared parameter's size
    error, context = driver.cuDevicePrimaryCtxRetain(cuda.ordinal)
    assert error == ok
    driver.cuCtxPushCurrent(context)
    error, image = driver.cuModuleLoadData(cubin.cubin(sources.source_path(module), cuda.arch))
    assert error == ok
    try:
        error, function = driver.cuModuleGetFunction(image, kernel.encode())
        assert error == ok
        results = [driver.cuFuncGetParamInfo(function, i)[0] for i in range(len(handle.params) + 1)]
        assert results == [ok] * len(handle.params) + [driver.CUresult.CUDA_ERROR_INVALID_VALUE]
    finally:
        driver.cuModuleUnload(image)
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(cuda.ordinal)


@pytest.fixture
def primary():
    """The device's primary context, and none current on this thread."""
    ok = driver.CUresult.CUDA_SUCCESS
    assert driver.cuInit(0)[0] == ok
    error, context = driver.cuDevicePrimaryCtxRetain(0)
    assert error == ok
    before = driver.cuCtxGetCurrent()[1]
    driver.cuCtxSetCurrent(driver.CUcontext(0))
    yield context
    driver.cuCtxSetCurrent(before)
    driver.cuDevicePrimaryCtxRelease(0)


def current():
    return int(driver.cuCtxGetCurrent()[1])


@pytest.mark.gpu
def test_a_context_that_was_current_is_so_after_every_call_and_after_close(primary):
    driver.cuCtxSetCurrent(primary)
    with metrale.open("cuda") as gpu:
        gpu.free(gpu.alloc(64))
        assert current() == int(primary)
    assert current() == int(primary)


@pytest.mark.gpu
def test_where_no_context_was_current_the_backends_is_until_it_closes(primary):
    with metrale.open("cuda") as gpu:
        gpu.free(gpu.alloc(64))
        assert current() == int(primary)
    assert current() == 0


@pytest.fixture
def another(primary):
    """A context of the device that is not its primary one, and is current."""
    error, context = driver.cuCtxCreate(None, 0, 0)
    assert error == driver.CUresult.CUDA_SUCCESS
    yield context
    driver.cuCtxDestroy(context)


def fill_of(gpu, buffer, value):
    return KernelLaunch(gpu, gpu.kernel("probes", "fill")).block(4).arg_ptr(buffer).arg_u32(4).arg_u32(value)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["builder", "prepared", "legacy stream", "cooperative"])
def test_a_launch_goes_to_the_backends_context_whichever_is_current(primary, another, form):
    with metrale.open("cuda") as gpu:
        gpu.add_module(PROBES)
        with gpu.buffer(16) as out:
            launch = fill_of(gpu, out, 7)
            if form == "prepared":
                launch = launch.prepare()
            if form == "cooperative":
                launch.cooperative()
            stream = 0 if form == "legacy stream" else gpu.default_stream()
            launch.launch(stream)
            assert current() == int(another)
            gpu.synchronize(stream)
            assert out.numpy("uint32").tolist() == [7] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["default", "legacy"])
def test_a_thread_without_a_context_launches(primary, stream):
    with metrale.open("cuda") as gpu:
        gpu.add_module(PROBES)
        with gpu.buffer(16) as out:
            launch = fill_of(gpu, out, 7).prepare()
            driver.cuCtxSetCurrent(driver.CUcontext(0))
            launch.launch(0 if stream == "legacy" else None)
            gpu.synchronize(0 if stream == "legacy" else None)
            assert out.numpy("uint32").tolist() == [7] * 4


@pytest.mark.gpu
def test_a_thread_without_a_context_launches_into_a_capture(primary):
    with metrale.open("cuda") as gpu:
        gpu.add_module(PROBES)
        with gpu.buffer(16) as out, ThreadPoolExecutor(1) as pool:
            with Graph(gpu) as graph:
                pool.submit(fill_of(gpu, out, 7).launch).result()
            graph.launch()
            assert out.numpy("uint32").tolist() == [7] * 4
            graph.free()


@pytest.mark.gpu
def test_a_failed_driver_call_says_what_was_done_and_what_the_driver_calls_it(cuda):
    pair = [cuda.create_event(), cuda.create_event()]
    with pytest.raises(CudaError, match=r"^cuEventElapsedTime .*: CUDA_ERROR_INVALID_HANDLE \(400\)$"):
        cuda.event_elapsed_ms(*pair)
    for event in pair:
        cuda.destroy_event(event)


@pytest.mark.gpu
def test_only_sources_and_cubins_are_modules(cuda, tmp_path):
    with pytest.raises(ArgumentError, match=r"path: got .*kernels.ptx', allowed: a .cu or .cubin file"):
        cuda.add_module(tmp_path / "kernels.ptx")


@pytest.mark.gpu
def test_a_cubins_arguments_are_held_against_their_sizes(cuda, tmp_path):
    path = tmp_path / "by_size.cubin"
    path.write_bytes(cubin.cubin(sources.source_path("moe_v41"), cuda.arch))
    if not cuda.has_module("by_size"):
        cuda.add_module(path)
    kernel = cuda.kernel("by_size", "moe_v41_finish")
    assert [kind for _, kind in kernel.params] == ["any"] * 3
    with cuda.buffer(64) as b:
        metrale.KernelLaunch(cuda, kernel).block(32).arg_ptr(b).arg_ptr(b).arg_u32(1).launch()
        wrong = metrale.KernelLaunch(cuda, kernel).arg_ptr(b).arg_u32(1).arg_u32(1)
        with pytest.raises(LaunchError, match=r"argument 2 \(argument 2\): got a 4-byte integer, takes 8 bytes"):
            wrong.launch()
        with pytest.raises(LaunchError, match="got 1 arguments, takes 3"):
            metrale.KernelLaunch(cuda, kernel).arg_ptr(b).launch()
        cuda.synchronize()
