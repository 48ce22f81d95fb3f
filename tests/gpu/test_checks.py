# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check mode and red zones."""

import ctypes
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import python

import metrale
from metrale import Graph, KernelLaunch, ops
from metrale.errors import ArgumentError, LaunchError, MetraleError

N = 16
PROBES = Path(__file__).with_name("probes.cu")


def opened(request, **switches):
    kind = "cuda" if request.param.startswith("cuda") else "host"
    return metrale.open(kind, **switches)


BOTH = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=BOTH)
def checked(request):
    with opened(request, check=True) as gpu:
        gpu.add_module(PROBES)
        yield gpu
        assert gpu.live_alloc_count == 0


@pytest.fixture(params=BOTH)
def guarded(request):
    with opened(request, redzone=True) as gpu:
        gpu.add_module(PROBES)
        yield gpu
        assert gpu.live_alloc_count == 0


def fill(gpu, out, n=N, value=7):
    return KernelLaunch(gpu, gpu.kernel("probes", "fill")).block(64).arg_ptr(out).arg_u32(n).arg_u32(value)


def refused(message):
    return pytest.raises(LaunchError, match=r"^probes\.fill: argument 1 \(out\): got " + message)


# Pointers


def test_a_launch_on_live_memory_goes_through(checked):
    with checked.buffer(4 * N) as out:
        fill(checked, out).launch()
        fill(checked, out.ptr + 32, 8, 9).prepare().launch()
        assert out.numpy("uint32").tolist() == [7] * 8 + [9] * 8


@pytest.mark.parametrize("form", ["builder", "prepared"])
def test_a_dead_pointer_is_named_with_its_history(checked, form):
    dead = checked.alloc(4 * N, "logits")
    checked.free(dead)
    launch = fill(checked, dead)
    with refused(
        rf"{int(dead):#x}, inside <Allocation logits 64 bytes at .* from .*test_checks.py:\d+> freed at .*test_che"
    ):
        (launch if form == "builder" else launch.prepare()).launch()


def test_a_launcher_names_the_kernels_parameter(checked):
    with checked.buffer(64) as live:
        dead = checked.alloc(64)
        checked.free(dead)
        with pytest.raises(LaunchError, match=r"^moe_v41\.moe_v41_accumulate: argument 2 \(src\): got .*freed at"):
            ops.moe_v41_accumulate(checked, checked.kernel("moe_v41", "moe_v41_accumulate"), live, dead, 8, None)


def test_the_end_of_an_allocation_is_out_of_range(checked):
    with checked.buffer(4096, "row") as out:
        with refused(r".*, 0 bytes past the end of <Allocation row 4096 bytes"):
            fill(checked, out.ptr + 4096).launch()


def test_an_address_of_nobody_is_refused(checked):
    with refused("0x10, an address the ledger does not know"):
        fill(checked, 16).launch()


def test_a_users_kernel_may_take_null(checked):
    fill(checked, None, 0).launch()


def test_a_null_pointer_is_refused_where_the_kernel_needs_memory(checked):
    kernel = checked.kernel("moe_v41", "moe_v41_accumulate")
    with checked.buffer(64) as acc:
        launch = KernelLaunch(checked, kernel).block(256).arg_ptr(acc).arg_ptr(None).arg_u32(0)
        with pytest.raises(LaunchError, match=r"accumulate: argument 2 \(src\): got a null pointer, takes memory"):
            launch.launch()


def test_a_null_pointer_is_taken_where_the_kernel_may_do_without(checked):
    kernel = checked.kernel("moe_v41", "moe_v41_swiglu")
    assert ("w", "ptr?") in kernel.params
    with checked.upload(bytes(16)) as gate, checked.buffer(16) as h:
        ops.moe_v41_swiglu(checked, kernel, gate, gate, None, h, 1, 8, 0.0, None)
        assert h.numpy().tolist() == [0] * 16


def test_a_pointer_is_checked_in_a_capture(checked):
    dead = checked.alloc(64)
    checked.free(dead)
    with pytest.raises(LaunchError, match="freed at"), Graph(checked):
        fill(checked, dead).launch()


def test_a_pointer_is_checked_when_a_graph_gets_it(checked):
    with checked.buffer(4 * N) as out:
        prepared = fill(checked, out).prepare()
        with Graph(checked) as graph:
            prepared.launch()
        dead = checked.alloc(64)
        checked.free(dead)
        with refused(".*freed at"):
            prepared.set("out", dead).update(graph.handle)
        graph.free()


def test_a_graph_on_memory_that_is_gone_is_not_launched(checked):
    out = checked.alloc(4 * N)
    with Graph(checked) as graph:
        fill(checked, out).launch()
    graph.launch()
    checked.free(out)
    with refused(".*freed at"):
        graph.launch()
    graph.free()


def test_a_graph_is_looked_at_with_the_arguments_that_it_was_given_last(checked):
    first, second = checked.alloc(4 * N), checked.alloc(4 * N)
    prepared = fill(checked, first).prepare()
    with Graph(checked) as graph:
        prepared.launch()
    prepared.set("out", second).update(graph.handle)
    checked.free(first)
    graph.launch()
    checked.free(second)
    with refused(".*freed at"):
        graph.launch()
    graph.free()


def test_foreign_memory_is_taken_and_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="metrale")
    with metrale.open("host", check=True) as gpu:
        x = np.zeros(2 * N, np.uint16)
        kernel = gpu.kernel("moe_v41", "moe_v41_accumulate")
        with gpu.upload(bytes(4 * N)) as acc:
            for _ in range(2):
                ops.moe_v41_accumulate(gpu, kernel, acc, x, N, None)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert re.match(rf"moe_v41.moe_v41_accumulate: argument 2 \(src\): {x.ctypes.data:#x} is foreign, in", messages[0])


def test_an_array_where_an_allocation_was_is_foreign():
    reused = []
    nbytes = 64 << 20  # of its own pages, whatever is on the heap: the next as large gets the same
    with metrale.open("host", check=True) as gpu, gpu.buffer(2 * N) as out:
        kernel = gpu.kernel("moe_v41", "moe_v41_finish")
        for _ in range(5):
            with gpu.buffer(nbytes) as gone:
                begin = gone.ptr
            acc = np.empty(nbytes // 4, np.float32)[1024:]  # allocators put different heads before what they give
            reused.append(begin <= acc.ctypes.data < begin + nbytes)
            ops.moe_v41_finish(gpu, kernel, acc, out, N, None)
    assert any(reused)


@pytest.mark.gpu
def test_a_tensor_of_torch_is_taken_and_logged_once(caplog):
    torch = pytest.importorskip("torch")
    caplog.set_level(logging.INFO, logger="metrale")
    with metrale.open("cuda", check=True) as gpu:
        x = torch.zeros(N, dtype=torch.bfloat16, device="cuda")
        kernel = gpu.kernel("moe_v41", "moe_v41_accumulate")
        with gpu.upload(bytes(4 * N)) as acc:
            for _ in range(2):
                ops.moe_v41_accumulate(gpu, kernel, acc, x, N, None)
    assert [f"{x.data_ptr():#x} is foreign" in record.getMessage() for record in caplog.records] == [True]


# Errors of the launch itself


@pytest.mark.gpu
def test_a_kernel_that_faults_is_named():
    code = """
        import sys, metrale
        from metrale import KernelLaunch
        gpu = metrale.open("cuda", check=True)
        gpu.add_module(sys.argv[1])
        out = gpu.alloc(64)
        good = KernelLaunch(gpu, gpu.kernel("probes", "fill")).block(1).arg_ptr(out).arg_u32(1).arg_u32(7)
        good.launch()
        try:
            KernelLaunch(gpu, gpu.kernel("probes", "count_threads")).arg_ptr(None).launch()
        except metrale.errors.CudaError as error:
            print(error)
    """
    done = python(code, PROBES)
    assert re.match(
        r"running probes\.count_threads with grid \(1, 1, 1\), block \(1, 1, 1\), 0 bytes of shared memory: "
        r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\)\n",
        done.stdout,
    )


def test_without_check_mode_a_launch_is_not_looked_at(device, probe):
    KernelLaunch(device, probe("fill")).arg_ptr(16).arg_u32(0).arg_u32(7).launch()
    device.synchronize()


# Red zones


def test_a_launch_that_keeps_to_its_buffers_goes_through(guarded):
    with guarded.buffer(4 * N) as out, guarded.buffer(1) as other:
        fill(guarded, out).launch()
        assert out.numpy("uint32").tolist() == [7] * N
        assert guarded.scan_redzones() == []
        assert other.nbytes == 1


@pytest.mark.parametrize("kind", ["alloc", "alloc_managed", "buffer"])
@pytest.mark.parametrize("nbytes", [4, 40, 4096])
def test_a_launch_that_writes_past_a_buffer_is_named(guarded, kind, nbytes):
    out = getattr(guarded, kind)(nbytes, "short")
    words = nbytes // 4
    message = (
        r"^probes\.fill with grid \(\d+, 1, 1\), block \(64, 1, 1\), 0 bytes of shared memory: 8 bytes were written "
        rf"past the end of <Allocation short {nbytes} bytes at .*test_checks.py:\d+>, from 0 bytes behind it on$"
    )
    with pytest.raises(LaunchError, match=message):
        fill(guarded, out, words + 2).grid(words // 64 + 1).launch()
    fill(guarded, out, words).grid(words // 64 + 1).launch()  # told once
    out.free() if kind == "buffer" else guarded.free(out)


def test_a_pinned_buffer_has_a_red_zone(guarded):
    out = guarded.alloc_host_pinned(64, "pinned")
    with pytest.raises(LaunchError, match="4 bytes were written past the end of <Allocation pinned 64 bytes"):
        fill(guarded, out, N + 1).launch()
    guarded.free_host_pinned(out)


def test_a_graph_that_writes_past_a_buffer_is_named(guarded):
    with guarded.buffer(4 * N, "short") as out:
        with Graph(guarded) as graph:
            fill(guarded, out, N + 1).launch()
        message = r"^the graph 0x\w+ from .*test_checks.py:\d+: 4 bytes were written past the end of <Allocation short"
        with pytest.raises(LaunchError, match=message):
            graph.launch()
        graph.free()


def overrun(gpu, out, first=0):
    """Write four bytes behind out past the backend, as foreign code would."""
    if gpu.kind == "host":
        ctypes.memset(out.ptr + out.nbytes + first, 0, 4)
    else:
        from cuda.bindings import driver

        assert driver.cuMemsetD8(int(out.ptr) + out.nbytes + first, 0, 4)[0] == 0
        assert driver.cuCtxSynchronize()[0] == 0


@pytest.mark.parametrize("first", [0, 1, 5, 1020])
def test_a_scan_tells_what_was_overrun_once(guarded, first):
    with guarded.buffer(61, "victim") as out, guarded.buffer(64):
        overrun(guarded, out, first)
        ((allocation, begins, count),) = guarded.scan_redzones()
        assert (allocation.tag, begins, count) == ("victim", first, 4)
        assert guarded.scan_redzones() == []


def test_freeing_tells_of_an_overrun_and_frees(guarded):
    out = guarded.buffer(64, "victim")
    overrun(guarded, out)
    with pytest.raises(MetraleError, match="^freed, but 4 bytes were written past the end of <Allocation victim"):
        out.free()
    assert guarded.live_alloc_count == 0


def test_threads_that_allocate_launch_and_free_overrun_nothing(guarded):
    def allocate(_):
        for _ in range(200):
            with guarded.buffer(1 << 20), guarded.buffer(1 << 20):
                pass

    def launch(_):
        with guarded.buffer(4 * N) as out:
            for _ in range(200):
                fill(guarded, out).launch()

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, i) for i in range(2) for work in (allocate, launch)]
        assert [work.result() for work in done] == [None] * 4


def test_the_ledger_counts_what_was_asked_for(guarded):
    with guarded.buffer(100) as out:
        assert (guarded.live_bytes, out.nbytes) == (100, 100)


def test_without_red_zones_there_is_nothing_to_scan(device):
    with pytest.raises(MetraleError, match="^scan_redzones: the backend was opened without red zones"):
        device.scan_redzones()


def test_memory_that_other_threads_take_and_free_is_not_taken_for_an_overrun(guarded):
    stop = threading.Event()

    def take_and_free():
        while not stop.is_set():
            for buffer in [guarded.buffer(64) for _ in range(8)]:
                buffer.free()

    threads = [threading.Thread(target=take_and_free) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    found = []
    while time.monotonic() < end:
        found += guarded.scan_redzones()
    stop.set()
    for thread in threads:
        thread.join()
    assert found == []


# Switches


@pytest.mark.parametrize(("variable", "switch"), [("METRALE_CHECK", "check"), ("METRALE_REDZONE", "redzone")])
def test_the_environment_switches_on(monkeypatch, variable, switch):
    def refuses_a_dead_pointer(**switches):
        with metrale.open("host", **switches) as gpu:
            gpu.add_module(PROBES)
            dead = gpu.alloc(64)
            gpu.free(dead)
            try:
                fill(gpu, dead, 0).launch()
            except LaunchError:
                return True
            return False

    assert not refuses_a_dead_pointer()
    monkeypatch.setenv(variable, "1")
    assert refuses_a_dead_pointer()
    assert not refuses_a_dead_pointer(**{switch: False})
    monkeypatch.setenv(variable, "0")
    assert not refuses_a_dead_pointer()
    assert refuses_a_dead_pointer(**{switch: True})


@pytest.mark.parametrize("variable", ["METRALE_CHECK", "METRALE_REDZONE"])
def test_another_value_of_the_environment_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ArgumentError, match=f"^{variable}: got 'yes', allowed: 0 or 1"):
        metrale.open("host")
