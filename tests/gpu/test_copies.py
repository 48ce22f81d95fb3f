# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies of rows, and the bounds and order of `_async` copies."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.errors import ArgumentError

N = 4096
HUGE = (1 << 62) - 1


@pytest.fixture
def block(device):
    """N bytes that count up from 0, and over again."""
    with device.upload(counting(N), "block") as buffer:
        yield buffer


@pytest.fixture
def other(device):
    """N bytes of 255."""
    with device.upload(np.full(N, 255, np.uint8), "other") as buffer:
        yield buffer


def counting(n):
    return np.arange(n).astype(np.uint8)


def refused(message):
    return pytest.raises(ArgumentError, match=message)


def rows_of(memory, offset, pitch, width, height):
    """The rows of a vector of bytes, as an array of `height` x `width` that shares its memory."""
    return np.lib.stride_tricks.as_strided(memory[offset:], (height, width), (pitch, 1))


# Rows


@st.composite
def two_places(draw):
    """`(width, height, source pitch and offset, destination pitch and offset)`, inside N bytes."""
    width, height = draw(st.integers(1, 48)), draw(st.integers(1, 12))
    pitches = [width + draw(st.integers(0, 40)) for _ in range(2)]
    offsets = [draw(st.integers(0, N - (height - 1) * pitch - width)) for pitch in pitches]
    return width, height, pitches, offsets


@settings(max_examples=60)
@given(case=two_places())
def test_rows_go_where_numpy_puts_them(device, block, other, case):
    width, height, pitches, offsets = case
    device.memset(other, 255, N)
    device.copy_d2d_2d_async(
        block.ptr + offsets[0], pitches[0], other.ptr + offsets[1], pitches[1], width, height, None
    )
    expected = np.full(N, 255, np.uint8)
    source = rows_of(counting(N), offsets[0], pitches[0], width, height)
    rows_of(expected, offsets[1], pitches[1], width, height)[:] = source
    assert (other.numpy() == expected).all()


@st.composite
def two_places_of_one_matrix(draw):
    """`(width, height, pitch, two offsets)` that are likely to be near each other."""
    width, height, pitch = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 16))
    pitch += width
    offsets = [draw(st.integers(0, 4)) * pitch + draw(st.integers(0, pitch)) for _ in range(2)]
    return width, height, pitch, offsets


@settings(max_examples=150)
@given(case=two_places_of_one_matrix())
def test_rows_of_one_pitch_are_copied_unless_a_byte_is_of_both(device, block, case):
    width, height, pitch, (src, dst) = case
    device.copy_h2d(counting(N), block)
    expected = counting(N)
    bytes_of = [{start + row * pitch + i for row in range(height) for i in range(width)} for start in (src, dst)]
    arguments = (block.ptr + src, pitch, block.ptr + dst, pitch, width, height, None)
    if bytes_of[0] & bytes_of[1]:
        message = f"dst: got {block.ptr + dst:#x}, allowed: {height} rows of {width} bytes that do not overlap the "
        with refused(f"^{re.escape(message)}source at {block.ptr + src:#x}$"):
            device.copy_d2d_2d_async(*arguments)
    else:
        rows_of(expected, dst, pitch, width, height)[:] = rows_of(counting(N), src, pitch, width, height)
        device.copy_d2d_2d_async(*arguments)
    assert (block.numpy() == expected).all()


def test_columns_beside_each_other_are_copied(device, block):
    device.copy_d2d_2d_async(block.ptr, 16, block.ptr + 8, 16, 8, N // 16, None)
    expected = counting(N).reshape(-1, 16)
    expected[:, 8:] = expected[:, :8]
    assert (block.numpy("uint8", (-1, 16)) == expected).all()


@pytest.mark.parametrize("pitches", [(16, 32), (32, 16)])
def test_rows_of_two_pitches_keep_out_of_each_others_range(device, block, pitches):
    with refused("^dst: got .*, allowed: 4 rows of 8 bytes that do not overlap the source at"):
        device.copy_d2d_2d_async(block.ptr, pitches[0], block.ptr + 8, pitches[1], 8, 4, None)
    assert (block.numpy() == counting(N)).all()


@pytest.mark.parametrize(("width", "height"), [(0, 4), (4, 0), (0, 0), (0, HUGE), (HUGE, 0)])
def test_no_rows_and_empty_rows_are_no_copy(device, other, width, height):
    device.copy_d2d_2d_async(None, 0, other, 0, width, height, None)
    assert set(other.numpy().tolist()) == {255}


def test_one_row_may_have_any_pitch(device, block, other):
    device.copy_d2d_2d_async(block, HUGE, other, HUGE, 16, 1, None)
    assert other.numpy().tolist()[:17] == [*range(16), 255]


@pytest.mark.parametrize("where", ["src_pitch", "dst_pitch"])
@pytest.mark.parametrize("height", [1, 2])
def test_a_pitch_below_the_width_is_refused(device, block, other, where, height):
    pitches = [7 if where == name else 8 for name in ("src_pitch", "dst_pitch")]
    with refused(f"^{where}: got 7, allowed: the width, 8 bytes, or more$"):
        device.copy_d2d_2d_async(block, pitches[0], other, pitches[1], 8, height, None)
    assert set(other.numpy().tolist()) == {255}


@pytest.mark.parametrize(("pitch", "height"), [(HUGE, 2), (1 << 40, 1 << 40), (8, HUGE)])
@pytest.mark.parametrize("where", ["src_pitch", "dst_pitch"])
def test_rows_that_no_memory_holds_are_refused(device, block, other, where, pitch, height):
    pitches = [pitch if where == name else 1 for name in ("src_pitch", "dst_pitch")]
    with refused(rf"^{where}: got {pitch}, allowed: at most 2\*\*62 bytes in {height} rows$"):
        device.copy_d2d_2d_async(block, pitches[0], other, pitches[1], 1, height, None)


@pytest.mark.parametrize("which", ["src", "dst"])
@pytest.mark.parametrize(
    ("offset", "pitch", "width", "height"), [(1, 64, 64, 64), (4000, 1, 1, 97), (0, 4096, 1, 2), (4095, 2, 2, 1)]
)
def test_the_last_row_ends_inside_the_allocation(device, block, other, which, offset, pitch, width, height):
    offsets = [offset if which == name else 0 for name in ("src", "dst")]
    pitches = [pitch if which == name else width for name in ("src", "dst")]
    span = (height - 1) * pitch + width
    tag = {"src": "block", "dst": "other"}[which]
    with refused(f"^{which}: got {span} bytes at offset {offset}, allowed: inside <Allocation {tag} {N} bytes"):
        device.copy_d2d_2d_async(
            block.ptr + offsets[0], pitches[0], other.ptr + offsets[1], pitches[1], width, height, None
        )
    assert set(other.numpy().tolist()) == {255}


def test_the_last_row_may_end_with_the_allocation(device, block, other):
    device.copy_d2d_2d_async(block.ptr + 48, 64, other.ptr, 64, 16, 64, None)
    expected = np.full((64, 64), 255, np.uint8)
    expected[:, :16] = counting(N).reshape(64, 64)[:, 48:]
    assert (other.numpy("uint8", (64, 64)) == expected).all()


@pytest.mark.parametrize("argument", ["width", "height", "src_pitch", "dst_pitch"])
@pytest.mark.parametrize("value", [-1, 1 << 62, 1.5, "8", None, True])
def test_rows_have_sizes(device, block, other, argument, value):
    sizes = {"src_pitch": 8, "dst_pitch": 8, "width": 8, "height": 2, argument: value}
    with refused(re.escape(f"{argument}: got {value!r}, allowed: an integer number of bytes")):
        device.copy_d2d_2d_async(src=block, dst=other, stream=None, **sizes)


def test_rows_of_pinned_memory_are_copied(device, other):
    with device.pinned_buffer(64) as pinned:
        memoryview(pinned)[:] = bytes(range(64))
        device.copy_d2d_2d_async(pinned.ptr, 16, other, 8, 8, 4, None)
        assert other.numpy("uint8")[:33].reshape(-1).tolist() == [
            *(16 * row + i for row in range(4) for i in range(8)),
            255,
        ]


# Bounds of the other forms

ASYNC = {
    "copy_h2d_async": ("dst", lambda gpu, p, n: gpu.copy_h2d_async(bytes(n), p, None)),
    "copy_d2h_async": ("src", lambda gpu, p, n: gpu.copy_d2h_async(p, bytearray(n), None)),
    "copy_d2h_on_stream": ("src", lambda gpu, p, n: gpu.copy_d2h_on_stream(p, bytearray(n), None)),
    "memset_async": ("ptr", lambda gpu, p, n: gpu.memset_async(p, 0, n, None)),
}


@pytest.mark.parametrize("name", ASYNC)
@pytest.mark.parametrize(("offset", "nbytes"), [(0, N + 1), (N - 1, 2)])
def test_ranges_of_async_copies_end_with_their_allocation(device, block, name, offset, nbytes):
    argument, call = ASYNC[name]
    with refused(f"^{argument}: got {nbytes} bytes at offset {offset}, allowed: inside <Allocation block {N} bytes"):
        call(device, block.ptr + offset, nbytes)
    assert (block.numpy() == counting(N)).all()


@pytest.mark.parametrize("nbytes", [N + 1, 1 << 32, HUGE])
def test_both_ends_of_an_async_device_copy_are_checked(device, block, nbytes):
    with device.buffer(N // 2) as small:
        with refused(f"^dst: got {nbytes} bytes at offset 0"):
            device.copy_d2d_async(block, small, nbytes, None)
        with refused(f"^src: got {N - 1} bytes at offset 2"):
            device.copy_d2d_async(block.ptr + 2, block, N - 1, None)


@settings(max_examples=60)
@given(places=st.tuples(st.integers(0, 40), st.integers(0, 40)), nbytes=st.integers(1, 24))
def test_device_ranges_are_copied_unless_they_overlap(device, block, places, nbytes):
    src, dst = places
    device.copy_h2d(counting(N), block)
    expected = counting(N)
    if abs(src - dst) < nbytes:
        with refused(f"^dst: got {block.ptr + dst:#x}, allowed: {nbytes} bytes that do not overlap the source"):
            device.copy_d2d_async(block.ptr + src, block.ptr + dst, nbytes, None)
    else:
        device.copy_d2d_async(block.ptr + src, block.ptr + dst, nbytes, None)
        expected[dst : dst + nbytes] = expected[src : src + nbytes]
    assert (block.numpy() == expected).all()


# Order


def test_copies_on_a_stream_are_done_in_order(device, stream):
    shape = (64, 64)
    values = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    out = np.zeros(shape, np.uint8)
    with device.buffer(N) as one, device.buffer(N) as two:
        device.memset_async(one, 1, N, stream)
        device.copy_h2d_async(values, one, stream)
        device.memset_async(two, 2, N, stream)
        device.copy_d2d_2d_async(one, 64, two.ptr + 32, 64, 32, 64, stream)
        device.copy_d2d_async(two, one, N // 2, stream)
        device.copy_d2h_async(one, out, stream)
        device.memset_async(one, 3, N, stream)
        device.synchronize(stream)
    expected = values.copy()
    expected[:32] = 2
    expected[:32, 32:] = values[:32, :32]
    assert (out == expected).all()
