# SPDX-License-Identifier: MIT OR Apache-2.0
"""How long the host memory of a copy is kept, and when it is read or filled."""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from metrale import KernelLaunch
from metrale.errors import ArgumentError

PROBES = Path(__file__).with_name("probes.cu")
N = 4096


@pytest.fixture
def block(device):
    with device.upload(counting(N)) as buffer:
        yield buffer


def counting(n):
    return np.arange(n).astype(np.uint8)


def array_at(ptr):
    """An array of N bytes of host memory at an address, which no object owns."""
    return np.frombuffer((ctypes.c_ubyte * N).from_address(ptr), np.uint8)


@pytest.fixture
def pinned(device):
    """`pinned()`: a new array over the same N page-locked bytes."""
    ptr = device.alloc_host_pinned(N)
    yield lambda: array_at(ptr)
    device.synchronize()
    device.free_host_pinned(ptr)


COPIES = {
    "copy_h2d": lambda gpu, memory, buffer, stream: gpu.copy_h2d(memory, buffer),
    "copy_d2h": lambda gpu, memory, buffer, stream: gpu.copy_d2h(buffer, memory),
    "copy_d2h_on_stream": lambda gpu, memory, buffer, stream: gpu.copy_d2h_on_stream(buffer, memory, stream),
    "upload": lambda gpu, memory, buffer, stream: gpu.upload(memory).free(),
}
ASYNC_COPIES = {
    "copy_h2d_async": lambda gpu, memory, buffer, stream: gpu.copy_h2d_async(memory, buffer, stream),
    "copy_d2h_async": lambda gpu, memory, buffer, stream: gpu.copy_d2h_async(buffer, memory, stream),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_that_is_done_on_return_keeps_nothing(device, block, stream, pinned, how):
    memory = pinned()
    alive = weakref.ref(memory)
    COPIES[how](device, memory, block, stream)
    del memory
    assert alive() is None


@pytest.mark.parametrize("how", ASYNC_COPIES)
def test_pageable_memory_is_not_kept(device, block, stream, how):
    memory = np.zeros(N, np.uint8)
    alive = weakref.ref(memory)
    ASYNC_COPIES[how](device, memory, block, stream)
    del memory
    assert alive() is None
    device.synchronize(stream)


@pytest.mark.parametrize("how", ASYNC_COPIES)
def test_a_refused_copy_keeps_nothing(device, block, stream, pinned, how):
    memory = pinned()
    alive = weakref.ref(memory)
    with pytest.raises(ArgumentError, match="bytes at offset 1, allowed: inside"):
        ASYNC_COPIES[how](device, memory, block.ptr + 1, stream)
    del memory
    assert alive() is None


@pytest.mark.parametrize("how", ASYNC_COPIES)
def test_a_copy_on_a_stream_that_is_gone_keeps_nothing(host, how):
    gone = host.create_stream()
    host.destroy_stream(gone)
    memory = np.zeros(N, np.uint8)
    alive = weakref.ref(memory)
    with host.buffer(N) as buffer, pytest.raises(ArgumentError, match=f"stream: got {gone}"):
        ASYNC_COPIES[how](host, memory, buffer, gone)
    del memory
    assert alive() is None


def test_memory_can_be_resized_after_its_copy(host):
    source = bytearray(16)
    with host.buffer(16) as buffer:
        host.copy_h2d_async(source, buffer, None)
    source.extend(b"more")
    assert len(source) == 20


# The same on a GPU, behind a kernel that holds the stream back


@pytest.fixture
def gpu_stream(cuda):
    handle = cuda.create_stream()
    yield handle
    cuda.destroy_stream(handle)


@pytest.fixture
def gpu_block(cuda):
    with cuda.upload(counting(N)) as buffer:
        yield buffer


@pytest.fixture
def held_back(cuda, gpu_stream):
    """`with held_back() as release:` work queued on the stream waits for `release()`, or for the end of the block,
    which waits for the work."""
    if not cuda.has_module("probes"):
        cuda.add_module(PROBES)
    word = ctypes.c_uint.from_address(cuda.alloc_host_pinned(4))
    launch = KernelLaunch(cuda, cuda.kernel("probes", "wait_for_host")).arg_ptr(ctypes.addressof(word))

    def release():
        word.value = 1

    @contextmanager
    def hold():
        word.value = 0
        launch.launch(gpu_stream)
        try:
            yield release
        finally:
            release()
            cuda.synchronize(gpu_stream)

    with hold():  # loads the kernel, for which the driver may wait for all that runs
        pass
    yield hold
    cuda.free_host_pinned(ctypes.addressof(word))


@pytest.fixture
def page_locked(cuda):
    """`page_locked()`: a new array over the same N page-locked bytes, which are zeros."""
    ptr = cuda.alloc_host_pinned(N)
    ctypes.memset(ptr, 0, N)
    yield lambda: array_at(ptr)
    cuda.free_host_pinned(ptr)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ASYNC_COPIES)
def test_page_locked_memory_is_kept_until_the_stream_has_passed(
    cuda, gpu_stream, gpu_block, held_back, page_locked, how
):
    memory = page_locked()
    alive = weakref.ref(memory)
    with held_back() as release:
        ASYNC_COPIES[how](cuda, memory, gpu_block, gpu_stream)
        del memory
        assert alive() is not None
        release()
        cuda.synchronize(gpu_stream)
        assert alive() is None


@pytest.mark.gpu
def test_the_next_async_copy_lets_go_of_what_the_stream_has_passed(cuda, gpu_stream, gpu_block, held_back, page_locked):
    memory, passed = page_locked(), cuda.create_event()
    alive = weakref.ref(memory)
    with held_back() as release:
        cuda.copy_h2d_async(memory, gpu_block, gpu_stream)
        cuda.record_event(passed, gpu_stream)
        del memory
        cuda.copy_h2d_async(page_locked(), gpu_block, gpu_stream)
        assert alive() is not None
        release()
        cuda.event_synchronize(passed)
        cuda.copy_h2d_async(page_locked(), gpu_block, gpu_stream)
        assert alive() is None
    cuda.destroy_event(passed)


@pytest.mark.gpu
def test_waiting_for_another_stream_lets_go_of_what_is_done_alone(cuda, gpu_stream, gpu_block, held_back, page_locked):
    waiting, done = page_locked(), page_locked()
    alive, gone = weakref.ref(waiting), weakref.ref(done)
    cuda.copy_h2d_async(done, gpu_block, None)
    with held_back():
        cuda.copy_h2d_async(waiting, gpu_block, gpu_stream)
        del waiting, done
        cuda.synchronize()
        assert alive() is not None
        assert gone() is None


@pytest.mark.gpu
def test_a_copy_waits_for_the_work_before_it(cuda, gpu_stream, gpu_block, held_back, page_locked):
    memory = page_locked()
    with held_back():
        cuda.copy_d2h_async(gpu_block, memory, gpu_stream)
        sleep(0.05)
        assert not memory.any()
    assert (memory == counting(N)).all()


@pytest.mark.gpu
def test_page_locked_memory_is_read_when_the_stream_comes_to_it(cuda, gpu_stream, gpu_block, held_back, page_locked):
    memory = page_locked()
    with held_back():
        cuda.copy_h2d_async(memory, gpu_block, gpu_stream)
        memory[:] = 7
    assert set(gpu_block.numpy().tolist()) == {7}


@pytest.mark.gpu
@pytest.mark.parametrize("how", ASYNC_COPIES)
def test_a_pinned_buffer_that_nobody_has_is_freed_after_its_copy(cuda, gpu_stream, gpu_block, held_back, how):
    before = cuda.snapshot()["pinned_bytes"]
    buffer = cuda.pinned_buffer(N)
    with held_back():
        ASYNC_COPIES[how](cuda, buffer, gpu_block, gpu_stream)
        del buffer
        assert cuda.snapshot()["pinned_bytes"] == before + N
    assert cuda.snapshot()["pinned_bytes"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [64, 1 << 16, 1 << 22])
def test_pageable_memory_has_been_read_on_return(cuda, gpu_stream, held_back, nbytes):
    source = counting(nbytes)

    def copy_and_change():
        cuda.copy_h2d_async(source, buffer, gpu_stream)
        source[:] = 255 - source

    # The driver may wait for the stream in the copy: the release comes from this thread.
    with cuda.buffer(nbytes) as buffer, ThreadPoolExecutor(1) as pool, held_back() as release:
        copying = pool.submit(copy_and_change)
        sleep(0.05)
        release()
        copying.result()
        cuda.synchronize(gpu_stream)
        assert (buffer.numpy() == counting(nbytes)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [64, 1 << 16, 1 << 22])
def test_pageable_memory_has_been_filled_on_return(cuda, gpu_stream, held_back, nbytes):
    out = np.zeros(nbytes, np.uint8)

    def copy_and_look():
        cuda.copy_d2h_async(buffer, out, gpu_stream)
        return out.copy()

    with cuda.upload(counting(nbytes)) as buffer, ThreadPoolExecutor(1) as pool, held_back() as release:
        copying = pool.submit(copy_and_look)
        sleep(0.05)
        release()
        assert (copying.result() == counting(nbytes)).all()


@pytest.mark.gpu
def test_a_thousand_async_copies_keep_no_more_than_what_is_not_done(cuda, gpu_stream, gpu_block, page_locked):
    event, made, most = cuda.create_event(), [], 0
    for _ in range(1000):
        memory = page_locked()
        made.append(weakref.ref(memory))
        cuda.copy_h2d_async(memory, gpu_block, gpu_stream)
        del memory
        cuda.record_event(event, gpu_stream)
        cuda.event_synchronize(event)
        most = max(most, sum(alive() is not None for alive in made))
    cuda.destroy_event(event)
    assert most == 1


@pytest.mark.gpu
def test_copies_that_wait_are_kept_and_let_go_together(cuda, gpu_stream, gpu_block, held_back, page_locked):
    made = []
    with held_back():
        for _ in range(100):  # of many more the driver would wait for room
            memory = page_locked()
            made.append(weakref.ref(memory))
            cuda.copy_h2d_async(memory, gpu_block, gpu_stream)
            del memory
        assert all(alive() is not None for alive in made)
    assert all(alive() is None for alive in made)
