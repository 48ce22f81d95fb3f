# SPDX-License-Identifier: MIT OR Apache-2.0
"""What Cython code of another package gets from metrale at the C level, without the GIL: results, and errors."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import metrale
from metrale.errors import ArgumentError, LaunchError, MetraleError

OTHERS = Path(__file__).with_name("others.cu")
N = 1000  # not a multiple of the launcher's block
ROWS = 5
WEIGHTS = np.array([0.5, -2, 4, 8, -16], np.float32)  # powers of 2: products and sums are exact
X = np.random.default_rng(7).integers(-100, 100, (ROWS, N)).astype(np.float32)


@pytest.fixture
def kernel(device, saxpy_demo):
    return saxpy_demo.kernel(device)


@pytest.fixture
def other(device):
    """`other(name)`: a kernel that the launcher was not written for."""
    if not device.has_module("others"):
        device.add_module(OTHERS)
    return lambda name: device.kernel("others", name)


@pytest.fixture
def x(device):
    with device.upload(X) as buffer:
        yield buffer


@pytest.fixture
def y(device):
    with device.upload(np.ones((ROWS, N), np.float32)) as buffer:
        yield buffer


@pytest.fixture
def streams(device):
    made = np.array([device.create_stream() for _ in range(ROWS)], np.uint64)
    yield made
    for stream in made.tolist():
        device.destroy_stream(stream)


def matrix(buffer):
    return buffer.numpy("float32", (ROWS, N))


def test_a_launcher_launches(device, saxpy_demo, kernel, x, y):
    saxpy_demo.saxpy(device, kernel, y, x, -0.5, ROWS * N)
    np.testing.assert_array_equal(matrix(y), 1 - 0.5 * X)


def test_a_loop_without_the_gil_launches_in_order(device, saxpy_demo, kernel, x):
    out = np.empty(N, np.float32)
    with saxpy_demo.RunningSum(device, kernel, N) as total:
        total.add(x, WEIGHTS)
        total.read(out)
    np.testing.assert_array_equal(out, WEIGHTS @ X)


def test_a_launcher_of_metrale_runs_after_one_of_the_package(device, saxpy_demo, kernel, x):
    out = np.empty(N, np.uint16)
    with saxpy_demo.RunningSum(device, kernel, N) as total:
        total.add(x, np.ones(1, np.float32))
        total.read_bf16(out)
    np.testing.assert_array_equal((out.astype(np.uint32) << 16).view(np.float32), X[0])


def test_a_prepared_launch_is_repeated_with_an_argument_set_as_bytes(device, saxpy_demo, kernel, x, y):
    builder = metrale.KernelLaunch(device, kernel).grid(ROWS * N).block(1)
    prepared = builder.arg_ptr(y).arg_ptr(x).arg_f32(100).arg_u32(ROWS * N).prepare()
    saxpy_demo.repeat(prepared, 0.25, 8)
    np.testing.assert_array_equal(matrix(y), 1 + 2 * X)


def test_threads_that_python_does_not_know_launch(device, saxpy_demo, kernel, x, y, streams):
    saxpy_demo.saxpy_rows(device, kernel, y, x, 2, N, streams)
    for stream in streams.tolist():
        device.synchronize(stream)
    np.testing.assert_array_equal(matrix(y), 1 + 2 * X)


def test_threads_of_python_launch(device, saxpy_demo, kernel, x):
    def summed(seed):
        weights, out = np.roll(WEIGHTS, seed), np.empty(N, np.float32)
        with saxpy_demo.RunningSum(device, kernel, N, stream=device.default_stream()) as total:
            total.add(x, weights)
            total.read(out)
        return np.array_equal(out, weights @ X)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(summed, range(8)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fewer", r"others.fewer: got 4 arguments, takes 3: \(y, x, a\)"),
        ("integer", r"others.integer: argument 3 \(a\): got a 4-byte float, takes a 4-byte integer"),
        ("wider", r"others.wider: argument 3 \(a\): got a 4-byte float, takes a 8-byte float"),
    ],
)
class TestAKernelThatDoesNotFit:
    def test_is_refused_by_a_loop_without_the_gil(self, device, saxpy_demo, other, x, name, message):
        with saxpy_demo.RunningSum(device, other(name), N) as total:
            with pytest.raises(LaunchError, match=message):
                total.add(x, WEIGHTS)

    def test_is_refused_in_a_thread_that_python_does_not_know(
        self, device, saxpy_demo, other, x, y, streams, name, message
    ):
        with pytest.raises(LaunchError, match=message):
            saxpy_demo.saxpy_rows(device, other(name), y, x, 2, N, streams)


def test_a_grid_of_zero_is_refused(device, saxpy_demo, kernel, x, y):
    with pytest.raises(LaunchError, match=r"saxpy.saxpy: grid: got \(0, 1, 1\), allowed: 1 to"):
        saxpy_demo.saxpy(device, kernel, y, x, 2, 0)


def test_a_refused_launch_leaves_the_memory_as_it_was(device, saxpy_demo, other, x, y):
    with pytest.raises(LaunchError):
        saxpy_demo.saxpy(device, other("wider"), y, x, 2, ROWS * N)
    np.testing.assert_array_equal(matrix(y), 1)


def test_a_kernel_of_another_backend_is_refused(device, saxpy_demo, x, y):
    with metrale.open("host") as another:
        with pytest.raises(LaunchError, match="the kernel belongs to another backend"):
            saxpy_demo.saxpy(device, saxpy_demo.kernel(another), y, x, 2, N)


def test_what_the_class_owns_is_on_the_ledger_until_it_is_freed(device, saxpy_demo, kernel):
    before = device.live_bytes
    total = saxpy_demo.RunningSum(device, kernel, N)
    held = {(a.tag, a.nbytes, Path(a.file).name) for a in device.ledger.live()}
    total.free()
    total.free()
    here = Path(__file__).name
    assert held == {("saxpy_demo total", 4 * N, here), ("saxpy_demo rounded", 2 * N, here)}
    assert device.live_bytes == before


def test_a_constructor_that_fails_half_way_keeps_nothing(host, saxpy_demo):
    with pytest.raises(ArgumentError, match="stream: got 12345"):  # of the memset, which follows the allocations
        saxpy_demo.RunningSum(host, saxpy_demo.kernel(host), N, stream=12345)
    assert host.live_alloc_count == 0


def test_use_after_free_is_refused(device, saxpy_demo, kernel, x):
    total = saxpy_demo.RunningSum(device, kernel, N)
    total.free()
    with pytest.raises(MetraleError, match="the RunningSum has been freed"):
        total.add(x, WEIGHTS)


def test_the_ledger_refuses_a_size_of_zero(device, saxpy_demo, kernel):
    with pytest.raises(ArgumentError, match="nbytes: got 0, allowed: 1 or more"):
        saxpy_demo.RunningSum(device, kernel, 0)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
class TestAfterClose:
    @pytest.fixture
    def total(self, fresh, saxpy_demo):
        made = saxpy_demo.RunningSum(fresh, saxpy_demo.kernel(fresh), N)
        fresh.close()
        return made

    def test_a_launch_without_the_gil_is_refused(self, total):
        with pytest.raises(MetraleError, match="is closed"):
            total.add(256, WEIGHTS)

    def test_a_copy_is_refused(self, total):
        with pytest.raises(MetraleError, match="is closed"):
            total.read(np.empty(N, np.float32))

    def test_the_owner_has_nothing_left_to_free(self, total):
        total.free()
        with pytest.raises(MetraleError, match="has been freed"):
            total.add(256, WEIGHTS)
