# SPDX-License-Identifier: MIT OR Apache-2.0
"""PreparedLaunch: checked once, launched often, one argument changed at a time."""

import pickle
import struct

import numpy as np
import pytest

import metrale
from metrale import KernelLaunch
from metrale.errors import ArgumentError, LaunchError, MetraleError
from metrale.gpu import PreparedLaunch

N = 64


@pytest.fixture
def fill(device, probe):
    return KernelLaunch(device, probe("fill")).block(N)


@pytest.fixture
def out(device):
    with device.buffer(4 * N) as buffer:
        device.memset(buffer, 0, 4 * N)
        yield buffer


def words(buffer):
    return buffer.numpy("uint32").tolist()


def test_it_launches_what_the_builder_would(fill, out):
    fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare().launch()
    assert words(out) == [7] * N


def test_it_launches_again_and_again(fill, out, device):
    prepared = fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare()
    for _ in range(3):
        device.memset(out, 0, 4 * N)
        prepared.launch()
        assert words(out) == [7] * N


def test_the_builder_is_free_for_something_else(fill, out):
    prepared = fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare()
    fill.arg_ptr(out).arg_u32(N).arg_u32(9).launch()
    prepared.launch()
    assert words(out) == [7] * N


@pytest.mark.parametrize("which", ["value", 2])
def test_an_argument_is_set_by_name_or_place(fill, out, which):
    fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare().set(which, 0xFFFFFFFF).launch()
    assert words(out) == [0xFFFFFFFF] * N


def test_a_pointer_is_set(fill, out, device):
    prepared = fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare()
    with device.buffer(4 * N) as other:
        prepared.set("out", other).launch()
        assert (words(other), words(out)) == ([7] * N, [0] * N)


def test_every_kind_of_argument_is_set(device, probe):
    pair = struct.pack("if", -7, 0.5)
    values = (4_000_000_000, -5, 2**63, -(2**62), 0.1, 0.1, pair, None)
    with device.buffer(9 * 8) as out:
        launch = KernelLaunch(device, probe("echo")).arg_ptr(out)
        launch.arg_u32(0).arg_i32(0).arg_u64(0).arg_i64(0).arg_f32(0).arg_f64(0).arg_bytes(bytes(8)).arg_ptr(out)
        prepared = launch.prepare()
        for place, value in enumerate(values, start=1):
            prepared.set(place, value)
        prepared.launch()
        assert out.numpy("float64").tolist() == [4e9, -5, 2.0**63, -(2.0**62), float(np.float32(0.1)), 0.1, -7, 0.5, 1]


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        ("value", -1, "value: got -1, allowed: an integer from 0 to 4294967295"),
        ("value", 1 << 32, "value: got 4294967296, allowed: an integer from 0 to 4294967295"),
        ("value", True, "value: got True, allowed: an integer from 0 to 4294967295"),
        ("value", 1.5, "value: got 1.5, allowed: an integer from 0 to 4294967295"),
        ("out", "x", "out: got 'x', allowed: an int, a DeviceBuffer"),
        ("speed", 1, r"which: got 'speed', allowed: a parameter of fill \(out, n, value\) or its place from 0"),
        (3, 1, "which: got 3, allowed: a parameter of fill"),
        (-1, 1, "which: got -1, allowed: a parameter of fill"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(fill, out, which, value, message):
    prepared = fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare()
    with pytest.raises(ArgumentError, match=message):
        prepared.set(which, value)
    prepared.launch()
    assert words(out) == [7] * N


def test_what_does_not_fit_the_kernel_is_refused_when_prepared(fill, out):
    with pytest.raises(LaunchError, match="got 1 arguments, takes 3"):
        fill.arg_ptr(out).prepare()


def test_it_says_so_when_the_backend_is_closed():
    with metrale.open("host") as gpu, gpu.buffer(64) as b:
        kernel = gpu.kernel("moe_v41", "moe_v41_finish")
        prepared = KernelLaunch(gpu, kernel).arg_ptr(b).arg_ptr(b).arg_u32(1).prepare()
    with pytest.raises(MetraleError, match="is closed"):
        prepared.launch()


def test_it_is_made_by_a_builder_alone_and_stays_in_its_process(fill, out):
    with pytest.raises(TypeError, match=r"PreparedLaunch comes from KernelLaunch.prepare\(\)"):
        PreparedLaunch()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(fill.arg_ptr(out).arg_u32(N).arg_u32(7).prepare())
