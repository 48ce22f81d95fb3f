# SPDX-License-Identifier: MIT OR Apache-2.0
"""KernelLaunch: what arrives in a kernel, and which launches are refused."""

import pickle
import re
import struct
import threading

import numpy as np
import pytest

import metrale
from metrale import KernelLaunch
from metrale.errors import ArgumentError, KernelNotFound, LaunchError

PAIR = struct.pack("if", -7, 0.5)


@pytest.fixture
def out(device):
    """64 words of zeros."""
    with device.upload(np.zeros(64, np.uint32)) as buffer:
        yield buffer


@pytest.fixture
def fill(device, probe, out):
    """A builder for `fill(out, n, value)`, without arguments."""
    return KernelLaunch(device, probe("fill")).grid(1).block(64)


def words(out):
    return out.numpy("uint32").tolist()


# Arguments


def echo(device, probe, build):
    with device.buffer(9 * 8) as out:
        build(KernelLaunch(device, probe("echo")).arg_ptr(out)).launch()
        return out.numpy("float64").tolist()


def test_every_kind_of_argument_arrives(device, probe, out):
    got = echo(
        device,
        probe,
        lambda launch: (
            launch.arg_u32(4_000_000_000)
            .arg_i32(-5)
            .arg_u64(1 << 63)
            .arg_i64(-(1 << 62))
            .arg_f32(0.1)
            .arg_f64(0.1)
            .arg_bytes(PAIR)
            .arg_ptr(out)
        ),
    )
    assert got == [4e9, -5, 2.0**63, -(2.0**62), float(np.float32(0.1)), 0.1, -7, 0.5, 0]


def test_none_is_the_null_pointer(device, probe):
    got = echo(
        device,
        probe,
        lambda launch: (
            launch.arg_u32(0).arg_i32(0).arg_u64(0).arg_i64(0).arg_f32(0).arg_f64(0).arg_bytes(PAIR).arg_ptr(None)
        ),
    )
    assert got[-1] == 1


def test_numpy_numbers_are_numbers(fill, out):
    fill.arg_ptr(out).arg_u32(np.uint16(3)).arg_u32(np.int64(8)).launch()
    assert words(out)[:4] == [8, 8, 8, 0]


class Tensor:
    def __init__(self, ptr):
        self.data_ptr = lambda: int(ptr)


@pytest.mark.parametrize("form", [int, metrale.DevicePtr, Tensor])
def test_pointers_come_in_many_forms(fill, out, form):
    fill.arg_ptr(form(out.ptr)).arg_u32(1).arg_u32(5).launch()
    assert words(out)[0] == 5


class Stream:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


def test_streams_come_in_many_forms(device, fill, out):
    side = device.create_stream()
    for value, stream in enumerate((None, device.default_stream(), side, Stream(side), 0), 1):
        fill.arg_ptr(out).arg_u32(1).arg_u32(value).launch(stream)
        device.synchronize(stream)
        assert words(out)[0] == value
    device.destroy_stream(side)


# Geometry


@pytest.mark.parametrize("grid", [(3, 2, 4), (5,), ((3, 2, 4),), ([5, 1, 1],), (np.array([2, 2, 2]),)])
@pytest.mark.parametrize("block", [(33,), (4, 8, 2), ((2, 2, 2),)])
def test_a_launch_has_as_many_threads_as_asked_for(device, probe, out, grid, block):
    KernelLaunch(device, probe("count_threads")).grid(*grid).block(*block).arg_ptr(out).launch()
    threads = [int(np.prod(extent[0] if np.ndim(extent[0]) else extent)) for extent in (grid, block)]
    assert words(out)[0] == threads[0] * threads[1]


def test_a_launch_starts_as_one_thread(device, probe, out):
    KernelLaunch(device, probe("count_threads")).arg_ptr(out).launch()
    assert words(out)[0] == 1


@pytest.mark.parametrize("nbytes", [1024, 48 * 1024, 48 * 1024 + 16, 96 * 1024, 1024])
def test_dynamic_shared_memory_also_beyond_48_kib(device, probe, out, nbytes):
    launch = KernelLaunch(device, probe("rotate")).block(128).shared_mem(nbytes)
    launch.arg_ptr(out).arg_u32(nbytes).launch()
    assert words(out)[0] == int((np.arange(nbytes) % 251).sum())


# Using a builder again


def test_a_second_launch_repeats_the_first(device, probe, out):
    launch = KernelLaunch(device, probe("count_threads")).block(8).arg_ptr(out)
    launch.launch()
    launch.launch()
    assert words(out)[0] == 16


def test_after_a_launch_arguments_start_again_and_geometry_stays(fill, out):
    fill.arg_ptr(out).arg_u32(64).arg_u32(1).launch()
    fill.arg_ptr(out).arg_u32(40).arg_u32(2).launch()
    assert words(out) == [2] * 40 + [1] * 24


def test_geometry_changes_without_new_arguments(fill, out):
    fill.block(4).arg_ptr(out).arg_u32(64).arg_u32(1).launch()
    fill.grid(2).launch()
    assert words(out) == [1] * 8 + [0] * 56


def test_a_refused_launch_can_be_put_right(fill, out):
    fill.grid(0).arg_ptr(out).arg_u32(64).arg_u32(1)
    with pytest.raises(LaunchError):
        fill.launch()
    fill.grid(1).launch()
    assert words(out) == [1] * 64


def test_after_a_refused_argument_the_next_one_starts_a_new_list(fill, out):
    with pytest.raises(LaunchError):
        fill.arg_ptr(out).arg_u32(-1)
    fill.arg_ptr(out).arg_u32(64).arg_u32(3).launch()
    assert words(out) == [3] * 64


def test_after_a_refused_launch_the_next_argument_starts_a_new_list(fill, out):
    with pytest.raises(LaunchError):
        fill.arg_ptr(out).launch()
    fill.arg_ptr(out).arg_u32(64).arg_u32(3).launch()
    assert words(out) == [3] * 64


def test_after_a_refused_preparation_the_next_argument_starts_a_new_list(fill, out):
    with pytest.raises(LaunchError):
        fill.arg_ptr(out).prepare()
    fill.arg_ptr(out).arg_u32(64).arg_u32(3).launch()
    assert words(out) == [3] * 64


# Refusals


WRONG_ARGUMENTS = {
    "none": (lambda b, p: b, "got 0 arguments, takes 3: (out, n, value)"),
    "too few": (lambda b, p: b.arg_ptr(p).arg_u32(1), "got 2 arguments, takes 3: (out, n, value)"),
    "too many": (
        lambda b, p: b.arg_ptr(p).arg_u32(1).arg_u32(1).arg_u32(1),
        "got 4 arguments, takes 3: (out, n, value)",
    ),
    "far too many": (
        lambda b, p: [b.arg_u32(1) for _ in range(200)],
        "more than 128 arguments or 4096 bytes of them",
    ),
    "far too large": (lambda b, p: b.arg_bytes(bytes(5000)), "more than 128 arguments or 4096 bytes of them"),
    "too large together": (
        lambda b, p: [b.arg_bytes(bytes(1000)) for _ in range(5)],
        "more than 128 arguments or 4096 bytes of them",
    ),
    "a float for an integer": (
        lambda b, p: b.arg_ptr(p).arg_f32(1).arg_u32(1),
        "argument 2 (n): got a 4-byte float, takes a 4-byte integer",
    ),
    "too wide an integer": (
        lambda b, p: b.arg_ptr(p).arg_u32(1).arg_u64(1),
        "argument 3 (value): got a 8-byte integer, takes a 4-byte integer",
    ),
    "an integer for a pointer": (
        lambda b, p: b.arg_u64(p.ptr).arg_u32(1).arg_u32(1),
        "argument 1 (out): got a 8-byte integer, takes a 8-byte pointer",
    ),
    "a pointer for an integer": (
        lambda b, p: b.arg_ptr(p).arg_ptr(p).arg_u32(1),
        "argument 2 (n): got a 8-byte pointer, takes a 4-byte integer",
    ),
    "a struct for an integer": (
        lambda b, p: b.arg_ptr(p).arg_bytes(bytes(4)).arg_u32(1),
        "argument 2 (n): got a 4-byte struct, takes a 4-byte integer",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_the_kernel(fill, out, wrong):
    push, message = WRONG_ARGUMENTS[wrong]
    push(fill, out)
    with pytest.raises(LaunchError, match=f"^{re.escape(f'probes.fill: {message}')}$"):
        fill.launch()
    assert words(out) == [0] * 64


@pytest.mark.parametrize("size", [4, 12])
def test_a_struct_of_another_size(device, probe, out, size):
    launch = KernelLaunch(device, probe("echo")).arg_ptr(out).arg_u32(0).arg_i32(0).arg_u64(0).arg_i64(0)
    launch.arg_f32(0).arg_f64(0).arg_bytes(bytes(size)).arg_ptr(None)
    message = rf"probes.echo: argument 8 \(pair\): got a {size}-byte struct, takes a 8-byte struct"
    with pytest.raises(LaunchError, match=message):
        launch.launch()


BAD_NUMBERS = [
    *[("arg_u32", value, "an integer from 0 to 4294967295") for value in (-1, 1 << 32, 1.0, "1", None)],
    *[("arg_i32", value, "an integer from -2147483648 to 2147483647") for value in (-(1 << 31) - 1, 1 << 31, 1.0)],
    *[("arg_u64", value, "an integer from 0 to 2**64 - 1") for value in (-1, 1 << 64, 1.0)],
    *[("arg_i64", value, "an integer from -2**63 to 2**63 - 1") for value in (-(1 << 63) - 1, 1 << 63, "1")],
    *[(method, value, "a float") for method in ("arg_f32", "arg_f64") for value in ("1", None)],
]


@pytest.mark.parametrize(("method", "value", "allowed"), BAD_NUMBERS)
def test_numbers_out_of_range_name_the_parameter(fill, out, method, value, allowed):
    fill.arg_ptr(out)
    message = f"probes.fill: n: got {value!r}, allowed: {allowed}"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        getattr(fill, method)(value)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), np.zeros(2, np.int32), np.float32(1)], ids=["huge", "negative", "array", "float"]
)
@pytest.mark.parametrize("method", ["arg_u32", "arg_i64"])
def test_what_is_no_integer_of_its_size_names_the_parameter(fill, out, method, value):
    with pytest.raises(LaunchError, match=r"^probes.fill: n: got .*, allowed: an integer from "):
        getattr(fill.arg_ptr(out), method)(value)


@pytest.mark.parametrize("what", ["grid", "block", "cluster"])
@pytest.mark.parametrize("value", [10**5000, np.array(5.0), "abc"], ids=["huge", "array", "str"])
def test_dimensions_that_are_no_integers(fill, what, value):
    with pytest.raises(ArgumentError, match=rf"^{what}: got .*, allowed: integers from 1 to the device's limit$"):
        getattr(fill, what)(value)


def test_a_number_beyond_the_last_parameter_is_called_by_its_place(fill, out):
    fill.arg_ptr(out).arg_u32(1).arg_u32(1)
    with pytest.raises(LaunchError, match="probes.fill: argument 4: got -1"):
        fill.arg_u32(-1)


def test_a_struct_is_a_buffer(fill):
    with pytest.raises(ArgumentError, match="arg_bytes: got <class 'int'>, allowed: a contiguous buffer"):
        fill.arg_bytes(5)


BAD_GEOMETRY = [
    *[("grid", dims) for dims in ((0,), (1, 0), (1, 1, 0), (1 << 31,), (1, 65_536), (1, 1, 65_536), ((1, 0, 1),))],
    *[("block", dims) for dims in ((0,), (1, 0), (1, 1, 0), (1025,), (1, 1025), (1, 1, 65), ((1, 1, 0),))],
]


@pytest.mark.parametrize(("what", "dims"), BAD_GEOMETRY)
def test_geometry_that_no_device_takes(fill, out, what, dims):
    getattr(fill, what)(*dims).arg_ptr(out).arg_u32(64).arg_u32(1)
    with pytest.raises(LaunchError, match=rf"^probes.fill: {what}: got \(.*\), allowed: 1 to \("):
        fill.launch()
    assert words(out) == [0] * 64


def test_more_threads_than_a_block_of_the_kernel_may_have(fill, out):
    fill.block(64, 32).arg_ptr(out).arg_u32(64).arg_u32(1)
    with pytest.raises(LaunchError, match=r"^probes.fill: block: got 2048 threads, allowed: 1 to \d+$"):
        fill.launch()


@pytest.mark.parametrize("what", ["grid", "block"])
@pytest.mark.parametrize("dims", [(-1,), (1 << 32,), (1.5,), ("1",), ((1, 2),), ((1, 2, 3, 4),), ((1, 1, 1), 2)])
def test_what_is_no_geometry(fill, what, dims):
    with pytest.raises(ArgumentError, match=f"^{what}: got "):
        getattr(fill, what)(*dims)


@pytest.mark.parametrize("nbytes", [-1, 1 << 20, 1 << 40, 1.0, "1"])
def test_shared_memory_that_no_block_has(fill, nbytes):
    with pytest.raises(LaunchError, match=rf"^probes.fill: shared_mem: got {nbytes!r}, allowed: 0 to \d+ bytes$"):
        fill.shared_mem(nbytes)


def test_a_kernel_runs_on_the_backend_it_was_loaded_by(fresh, probe, out):
    launch = KernelLaunch(fresh, probe("fill")).arg_ptr(out.ptr).arg_u32(1).arg_u32(1)
    with pytest.raises(LaunchError, match="^probes.fill: the kernel belongs to another backend than <"):
        launch.launch()
    assert words(out)[0] == 0


# Kernels


def test_a_kernel_knows_its_parameters(probe):
    kernel = probe("echo")
    assert (kernel.module, kernel.name) == ("probes", "echo")
    assert kernel.params == (
        *(("out", "ptr"), ("u32", "u32"), ("i32", "i32"), ("u64", "u64"), ("i64", "i64")),
        *(("f32", "f32"), ("f64", "f64"), ("pair", "bytes"), ("p", "ptr")),
    )
    assert repr(probe("fill")) == "<KernelHandle probes.fill(out: ptr, n: u32, value: u32)>"


def test_a_kernel_is_loaded_once(device, probe):
    assert probe("fill") is device.kernel("probes", "fill")


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("gemvs", "dense_gemv_bf16", "no kernel module 'gemvs'; nearest: gemv"),
        ("gemv", "dense_gemv_f16", "no kernel 'dense_gemv_f16' in module 'gemv'; nearest: dense_gemv_bf16"),
        ("moe_v41", "swiglu", "no kernel 'swiglu' in module 'moe_v41'; nearest: .*moe_v41_swiglu"),
        ("", "", "no kernel module ''; nearest: "),
    ],
)
def test_a_name_that_is_not_there_gets_near_ones(device, module, name, message):
    with pytest.raises(KernelNotFound, match=f"^{message}"):
        device.kernel(module, name)


def test_every_kernel_of_the_package_loads_with_its_declared_parameters(device):
    from metrale.gpu import sources

    for module, kernels in sources.signatures().items():
        for name, params in kernels.items():
            assert device.kernel(module, name).params == params


def test_handles_and_launches_stay_in_their_process(device, fill, probe):
    for what in (device, fill, probe("fill")):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(what)


def test_handles_are_not_made_by_hand():
    with pytest.raises(TypeError, match=r"KernelHandle comes from GpuBackend.kernel"):
        metrale.KernelHandle()
    with pytest.raises(TypeError, match=r"use metrale.open"):
        metrale.GpuBackend()


# Threads


def test_many_threads_share_a_backend(device, probe):
    kernel, failures = probe("fill"), []

    def work(value):
        try:
            for _ in range(20):
                with device.upload(np.zeros(64, np.uint32), f"of thread {value}") as out:
                    stream = device.create_stream()
                    launch = KernelLaunch(device, kernel).block(64).arg_ptr(out).arg_u32(64).arg_u32(value)
                    launch.launch(stream)
                    device.synchronize(stream)
                    device.destroy_stream(stream)
                    assert words(out) == [value] * 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
