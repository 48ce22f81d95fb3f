# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package's modules as the CUDA driver sees them."""

import pytest
from cuda.bindings import driver

import metrale
from metrale.gpu import cubin, sources

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
