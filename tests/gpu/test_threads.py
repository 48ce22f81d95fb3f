# SPDX-License-Identifier: MIT OR Apache-2.0
"""Several threads on one backend."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import metrale
from metrale import KernelLaunch, ops
from metrale.errors import LaunchError, MetraleError

N = 1 << 20
SLOW = 4_000_000  # elements of a launch that takes a while on the host


def finish(gpu, acc, out, n):
    ops.moe_v41_finish(gpu, gpu.kernel("moe_v41", "moe_v41_finish"), acc, out, n, None)


def test_threads_that_allocate_launch_and_free_leave_nothing(device):
    def work(seed):
        x = np.random.default_rng(seed).standard_normal(1000, np.float32)
        for _ in range(20):
            with device.upload(x) as acc, device.buffer(2000) as out:
                finish(device, acc, out, 1000)
                bits = out.numpy(np.uint16).astype(np.uint32) << 16
            np.testing.assert_allclose(bits.view(np.float32), x, rtol=2**-8)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert device.live_alloc_count == 0


def test_a_kernel_that_threads_ask_for_together_is_loaded_once(fresh):
    with ThreadPoolExecutor(8) as pool:
        handles = set(pool.map(lambda _: fresh.kernel("gemv", "dense_gemv_bf16"), range(8)))
    assert len(handles) == 1


def launching(gpu, stop, acc, out):
    """Launch until told to stop, or until the backend or a buffer is gone."""
    try:
        while not stop.is_set():
            finish(gpu, acc, out, SLOW)
    except MetraleError:
        pass


@pytest.fixture
def busy(fresh):
    """`(backend, thread, stop, buffers)` with a thread that launches without a pause."""
    stop = threading.Event()
    buffers = [fresh.buffer(4 * SLOW), fresh.buffer(2 * SLOW)]
    thread = threading.Thread(target=launching, args=(fresh, stop, *buffers))
    thread.start()
    time.sleep(0.05)
    yield fresh, thread, stop, buffers
    stop.set()
    thread.join()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_close_waits_for_a_launch_in_another_thread(busy):
    gpu, thread, _, _ = busy
    gpu.close()
    thread.join(10)
    assert not thread.is_alive()


def test_free_waits_for_a_launch_in_another_thread(busy):
    _, thread, stop, buffers = busy
    for buffer in buffers:
        buffer.free()
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_allocation_during_close_is_given_back():
    for _ in range(20):
        gpu = metrale.open("host")

        def allocate(gpu=gpu):
            try:
                while True:
                    gpu.alloc(8 << 20)
            except MetraleError:
                pass

        thread = threading.Thread(target=allocate)
        thread.start()
        time.sleep(0.002)
        gpu.close()
        thread.join()
        assert gpu.live_alloc_count == 0


def test_a_builder_that_is_launching_refuses_another_thread(host):
    with host.buffer(4 * SLOW) as acc, host.buffer(2 * SLOW) as out:
        launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).grid(SLOW // 2048).block(256)
        launch.arg_ptr(acc).arg_ptr(out).arg_u32(SLOW)
        thread = threading.Thread(target=lambda: [launch.launch() for _ in range(50)])
        thread.start()
        with pytest.raises(LaunchError, match="another thread is launching with this KernelLaunch"):
            while thread.is_alive():
                launch.block(256)
        thread.join()
