# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays of other libraries as arguments: what is taken and what is refused.

On the host NumPy is the other library. What needs a GPU is in test_interop_gpu.py.
"""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import metrale
from metrale import KernelLaunch, ops
from metrale.errors import ArgumentError, LaunchError, MetraleError

N = 8
VALUES = np.arange(N, dtype=np.float32)
ROUNDED = (VALUES.view(np.uint32) >> 16).astype(np.uint16)  # as bf16, exactly


def refused(message):
    return pytest.raises(ArgumentError, match=message)


@pytest.fixture
def finish(host):
    """`finish(acc, out)`: out = bf16(acc), through the launcher."""
    kernel = host.kernel("moe_v41", "moe_v41_finish")
    return lambda acc, out: ops.moe_v41_finish(host, kernel, acc, out, N, None)


@pytest.fixture
def out():
    return np.zeros(N, np.uint16)


class Exporting:
    """An array with DLPack and nothing else; keywords replace what it says."""

    def __init__(self, array, device=(1, 0), export=None):
        self.array, self.device, self.export, self.asked = array, device, export, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        return self.export(**asked) if self.export else self.array.__dlpack__(**asked)


class CudaArray:
    """An array with `__cuda_array_interface__` and nothing else, of the memory of a NumPy array."""

    def __init__(self, array=VALUES, without=(), **said):
        interface = {**array.__array_interface__, "version": 3, "data": (array.ctypes.data, False), **said}
        self.__cuda_array_interface__ = {key: value for key, value in interface.items() if key not in without}


class Addressed:
    """An array with `data_ptr()`, and what else is given."""

    def __init__(self, array, **more):
        self.data_ptr = lambda: array.ctypes.data
        self.__dict__.update(more)


class Device:
    def __init__(self, type, index=None):
        self.type, self.index = type, index


# Arrays as arguments


@pytest.mark.parametrize("form", [lambda a: a, Exporting, Addressed])
def test_a_launcher_works_on_the_memory_of_an_array(finish, out, form):
    finish(form(VALUES.copy()), form(out))
    assert (out == ROUNDED).all()


@pytest.mark.parametrize("form", [lambda a: a, Exporting, Addressed])
def test_a_builder_works_on_the_memory_of_an_array(host, out, form):
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).block(256)
    launch.arg_ptr(form(VALUES.copy())).arg_ptr(form(out)).arg_u32(N).launch()
    assert (out == ROUNDED).all()


def test_arrays_buffers_and_addresses_go_together(host, finish, out):
    with host.upload(VALUES) as buffer:
        finish(buffer, out)
        finish(buffer.ptr, out.ctypes.data)
    assert (out == ROUNDED).all()


def test_a_buffer_of_another_backend_of_the_device_is_taken(finish, out):
    with metrale.open("host") as other, other.upload(VALUES) as buffer:
        finish(buffer, out)
        assert (out == ROUNDED).all()


def test_a_buffer_of_another_backend_that_is_freed_is_refused(finish, out):
    with metrale.open("host") as other:
        buffer = other.upload(VALUES)
        buffer.free()
        with pytest.raises(MetraleError, match="the DeviceBuffer has been freed"):
            finish(buffer, out)


def test_a_view_begins_where_it_begins(finish, out):
    longer = np.concatenate([np.full(4, 99, np.float32), VALUES])
    finish(longer[4:], out)
    assert (out == ROUNDED).all()


def test_an_array_without_elements_is_a_null_pointer(finish, out):
    with refused("acc: got None, allowed: a device pointer that is not null"):
        finish(np.empty((0, 4), np.float32), out)


def test_what_asks_for_gradients_is_taken_through_its_alias(finish, out):
    parameter = Exporting(None)
    alias = VALUES.copy()
    parameter.requires_grad, parameter.detach = True, lambda: alias
    finish(parameter, out)
    assert (out == ROUNDED).all()


def test_a_producer_that_knows_no_versions_is_asked_without(finish, out):
    values = VALUES.copy()
    finish(Exporting(values, export=lambda *, stream: values.__dlpack__(stream=stream)), out)
    assert (out == ROUNDED).all()


def test_memory_of_the_cpu_has_no_stream(finish, out):
    array = Exporting(VALUES.copy())
    finish(array, out)
    assert [asked["stream"] for asked in array.asked] == [None]


@given(st.data())
def test_arrays_are_taken_if_and_only_if_they_are_contiguous(host, data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    array = np.zeros(shape, np.float32).transpose(data.draw(st.permutations(range(len(shape)))))
    steps = [data.draw(st.sampled_from([1, 2, -1, 3])) for _ in shape]
    array = array[(*(slice(None, None, step) for step in steps), ...)]
    call = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).arg_ptr
    if array.flags.c_contiguous:
        call(array)
    else:
        with pytest.raises(LaunchError, match="acc: got a numpy.ndarray of shape .* allowed: C-contiguous arrays"):
            call(array)


READ_ONLY = np.frombuffer(bytes(4 * N), np.float32)


def fail(error):
    def export(**asked):
        raise error

    return export


REFUSED = {
    "a column": (
        np.zeros((N, 2), np.float32)[:, 0],
        r"a numpy.ndarray of shape \(8,\) with strides \(2,\), allowed: C-contiguous arrays",
    ),
    "read-only": (READ_ONLY, "a numpy.ndarray that is read-only, allowed: arrays that a kernel may write"),
    "on a GPU": (
        Exporting(VALUES, device=(2, 1)),
        "a test_interop.Exporting in CUDA memory of device 1, allowed: CPU memory",
    ),
    "managed": (Exporting(VALUES, device=(13, 0)), "in managed memory of device 0, allowed: CPU memory"),
    "elsewhere": (Exporting(VALUES, device=(8, 2)), "in memory of kind 8 of device 2, allowed: CPU memory"),
    "nowhere": (Exporting(VALUES, device=None), "whose DLPack export fails: .*, allowed: arrays that can be exported"),
    "unwilling": (
        Exporting(VALUES, export=fail(BufferError("conjugate bit"))),
        "whose DLPack export fails: conjugate bit",
    ),
    "no capsule": (
        Exporting(VALUES, export=lambda **_: 7),
        r"whose DLPack export fails: __dlpack__\(\) gave no capsule",
    ),
    "another capsule": (
        Exporting(VALUES, export=lambda **_: np.random.default_rng(0).bit_generator.capsule),
        "__dlpack__.. gave no capsule with a tensor",
    ),
    "a copy": (
        Exporting(VALUES, export=lambda **asked: VALUES.copy().__dlpack__(**asked, copy=True)),
        "that exports a copy of itself, allowed: arrays that export their own memory",
    ),
    "an address on a GPU": (
        Addressed(VALUES, device=Device("cuda", 0)),
        "in CUDA memory of device 0, allowed: CPU memory",
    ),
    "an address of a part": (
        Addressed(VALUES, is_contiguous=lambda: False),
        "that is not contiguous, allowed: C-contiguous arrays",
    ),
    "an address that is none": (
        type("Broken", (), {"data_ptr": lambda self: -1})(),
        "-1, allowed: an integer, 0 to 2",
    ),
    "nothing of it": (
        object(),
        "<object object .*, allowed: an int, a DeviceBuffer, or an object with DLPack, __cuda_array_interface__ or",
    ),
    "a class": (np.float32, "<class 'numpy.float32'>, allowed: an int"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arrays_that_a_kernel_cannot_use_are_refused(finish, out, what):
    array, message = REFUSED[what]
    with refused(f"^acc: got .*{message}"):
        finish(array, out)


@pytest.mark.parametrize("what", REFUSED)
def test_a_builder_refuses_them_with_the_kernels_name(host, what):
    array, message = REFUSED[what]
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish"))
    with pytest.raises(LaunchError, match=f"^moe_v41.moe_v41_finish: acc: got .*{message}"):
        launch.arg_ptr(array)


MALFORMED = {
    **{f"no {key}": {"without": [key]} for key in ("version", "shape", "typestr", "data")},
    "a shape that is no sequence": {"shape": 8},
    "a shape below zero": {"shape": (-8,)},
    "a shape of floats": {"shape": (8.0,)},
    "an address alone": {"data": 4096},
    "no address": {"data": None},
    "strides of another length": {"strides": (4, 4)},
    "a type without a size": {"typestr": "<f"},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_array_interface_is_refused(finish, out, what):
    with refused("acc: got a test_interop.CudaArray with a __cuda_array_interface__ that cannot be read: .*allowed:"):
        finish(CudaArray(**MALFORMED[what]), out)


CUDA_REFUSED = {
    "well-formed": ({}, "in CUDA memory, allowed: CPU memory"),
    "empty": ({"shape": (0, 3), "data": (0, False)}, "in CUDA memory, allowed: CPU memory"),
    "version 1": ({"version": 1}, "of version 1, allowed: versions 2 and 3"),
    "version 4": ({"version": 4}, "of version 4, allowed: versions 2 and 3"),
    "a mask": ({"mask": CudaArray()}, "with a mask, allowed: arrays without one"),
    "read-only": ({"data": (4096, True)}, "that is read-only, allowed: arrays that a kernel may write"),
    "strided": ({"strides": (8,)}, r"of shape \(8,\) with strides \(8,\), allowed: C-contiguous arrays"),
    "null": ({"data": (0, False)}, "of elements at a null address, allowed: memory"),
    "an address below zero": ({"data": (-1, False)}, "-1, allowed: an integer, 0 to 2"),
    "an address that is no number": ({"data": ("0x10", False)}, "'0x10', allowed: an integer, 0 to 2"),
    "stream 0": ({"stream": 0}, r"with the stream 0, allowed: None, 1 \(legacy\), 2 \(per thread\) or a handle"),
}


@pytest.mark.parametrize("what", CUDA_REFUSED)
def test_an_array_interface_that_cannot_be_used_is_refused(finish, out, what):
    said, message = CUDA_REFUSED[what]
    with refused(f"^acc: got .*{message}"):
        finish(CudaArray(**said), out)


def test_a_stream_that_is_no_number_is_refused(finish, out):
    with refused("acc: stream: got 'x', allowed: an integer"):
        finish(CudaArray(stream="x"), out)


@given(st.data())
def test_an_array_interface_is_contiguous_where_numpy_says_so(host, data):
    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    array = np.zeros([2 * n for n in shape], np.float32)
    array = array[tuple(slice(None, n * step, step) for n in shape for step in [data.draw(st.sampled_from([1, 2]))])]
    expected = "in CUDA memory" if array.flags.c_contiguous else "of shape .* with strides"
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish"))
    with pytest.raises(LaunchError, match=f"acc: got a test_interop.CudaArray {expected}"):
        launch.arg_ptr(CudaArray(array, strides=array.strides))


def test_free_takes_no_array_of_another_library(host):
    with refused("ptr: got 0x.*, allowed: the base of a live device allocation"):
        host.free(VALUES.copy())


# Arrays in launches that are made in steps


def test_a_builder_keeps_an_array_until_the_next_list(host, out):
    array = Exporting(VALUES.copy())
    there = weakref.ref(array)
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).block(256)
    launch.arg_ptr(array).arg_ptr(out).arg_u32(N)
    del array
    launch.launch()
    assert out.tolist() == ROUNDED.tolist()
    assert there() is not None
    launch.arg_ptr(None)
    assert there() is None


def test_a_builder_that_repeats_a_launch_asks_its_arrays_again(host, out):
    array = Exporting(VALUES.copy())
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).block(256)
    launch.arg_ptr(array).arg_ptr(out).arg_u32(N).launch()
    array.array = VALUES[::-1].copy()
    launch.launch()
    assert out.tolist() == ROUNDED[::-1].tolist()


def test_another_list_forgets_the_arrays_of_the_last(host, out):
    array = Exporting(VALUES.copy())
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).block(256)
    launch.arg_ptr(array).arg_ptr(out).arg_u32(N).launch()
    other = VALUES[::-1].copy()
    launch.arg_ptr(other.ctypes.data).arg_ptr(out).arg_u32(N).launch()
    assert out.tolist() == ROUNDED[::-1].tolist()


@pytest.fixture
def prepared(host, out):
    """A PreparedLaunch of `finish` whose input is not set yet."""
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).block(256)
    return launch.arg_ptr(None).arg_ptr(out).arg_u32(N).prepare()


def test_a_prepared_launch_keeps_the_arrays_it_was_made_with(host, out):
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish")).block(256)
    prepared = launch.arg_ptr(VALUES.copy()).arg_ptr(out).arg_u32(N).prepare()
    launch.arg_ptr(None)
    gc.collect()
    prepared.launch()
    assert out.tolist() == ROUNDED.tolist()


def test_a_prepared_launch_keeps_the_arrays_it_is_given(prepared, out):
    prepared.set("acc", VALUES.copy())
    gc.collect()
    prepared.launch()
    assert out.tolist() == ROUNDED.tolist()


def test_a_prepared_launch_follows_an_array_that_moves(prepared, out):
    array = Exporting(np.zeros(N, np.float32))
    prepared.set("acc", array).launch()
    array.array = VALUES.copy()
    prepared.launch()
    assert out.tolist() == ROUNDED.tolist()


def test_an_address_takes_the_place_of_an_array(prepared, out):
    other = VALUES[::-1].copy()
    prepared.set("acc", VALUES.copy()).set("acc", other.ctypes.data).launch()
    assert out.tolist() == ROUNDED[::-1].tolist()


def test_an_array_that_can_no_longer_be_used_stops_the_launch(prepared, out):
    array = Exporting(VALUES.copy())
    prepared.set("acc", array)
    array.array = np.zeros((N, 2), np.float32)[:, 0]
    with refused("acc: got .*allowed: C-contiguous arrays"):
        prepared.launch()
    assert out.tolist() == [0] * N


def test_a_prepared_launch_refuses_an_array_and_keeps_what_it_had(prepared, out):
    values = VALUES.copy()
    prepared.set("acc", values)
    with refused("acc: got a numpy.ndarray that is read-only"):
        prepared.set("acc", READ_ONLY)
    prepared.launch()
    assert out.tolist() == ROUNDED.tolist()


# Streams


@pytest.mark.parametrize("answer", [(0, "own"), [0, "own"]])
@pytest.mark.parametrize("kind", ["method", "property"])
def test_a_stream_says_its_handle_as_a_method_or_a_property(host, answer, kind):
    answer = type(answer)([host.default_stream() if part == "own" else part for part in answer])
    said = (lambda self: answer) if kind == "method" else answer
    host.synchronize(type("Stream", (), {"__cuda_stream__": said})())


@pytest.mark.parametrize("answer", [7, (1,), (), None, (0, 1, 2), (0, "x")])
def test_a_stream_that_says_something_else_is_refused(host, answer):
    stream = type("Stream", (), {"__cuda_stream__": lambda self: answer})()
    with refused("stream: got .*, allowed: an int, an object with __cuda_stream__, or None"):
        host.synchronize(stream)
