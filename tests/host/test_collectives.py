# SPDX-License-Identifier: MIT OR Apache-2.0
"""Barriers, warp collectives, atomics and intrinsics of the host runtime against plain Python."""

import math
import operator
import random
import struct
from ctypes import c_double, c_float, c_int, c_int8, c_uint8, c_uint16, c_uint32, c_uint64, sizeof
from functools import reduce

import pytest

WARP = 32
FULL = 0xFFFFFFFF
TYPES = {"i32": c_int, "u32": c_uint32, "f32": c_float, "u64": c_uint64, "f64": c_double}


def numbers(ctype, count, seed=0):
    rng = random.Random(seed)
    if ctype in (c_float, c_double):
        return (ctype * count)(*(rng.uniform(-1e6, 1e6) for _ in range(count)))
    return (ctype * count)(*(rng.getrandbits(8 * sizeof(ctype)) for _ in range(count)))


def shuffled_lane(mode, lane, argument, width):
    """The lane that `lane` reads, by the CUDA C++ programming guide."""
    first, last = lane // width * width, lane // width * width + width - 1
    source = {
        "shfl": first + argument % width,
        "shfl_up": lane - argument if lane - argument >= first else lane,
        "shfl_down": lane + argument if lane + argument <= last else lane,
        "shfl_xor": lane ^ argument if lane ^ argument <= last else lane,
    }
    return source[mode]


@pytest.mark.parametrize("width", [32, 16, 4, 1])
@pytest.mark.parametrize("argument", [0, 1, 5, 16, 31])
@pytest.mark.parametrize("mode", ["shfl", "shfl_up", "shfl_down", "shfl_xor"])
def test_a_shuffle_reads_the_documented_lane(library, order, mode, argument, width):
    values, out = numbers(c_uint32, 64), (c_uint32 * 64)()
    library.launch(f"{mode}_u32", values, out, c_int(argument), c_int(width), block=64, order=order, seed=argument)
    lanes = [shuffled_lane(mode, lane, argument, width) for lane in range(WARP)]
    assert list(out) == [values[warp + lane] for warp in (0, WARP) for lane in lanes]


@pytest.mark.parametrize("suffix", TYPES)
@pytest.mark.parametrize("mode", ["shfl", "shfl_up", "shfl_down", "shfl_xor"])
def test_a_shuffle_carries_every_type(library, mode, suffix):
    values, out = numbers(TYPES[suffix], WARP), (TYPES[suffix] * WARP)()
    library.launch(f"{mode}_{suffix}", values, out, c_int(3), c_int(32))
    assert list(out) == [values[shuffled_lane(mode, lane, 3, 32)] for lane in range(WARP)]


@pytest.mark.parametrize("mask", [FULL, 0x0000FFFF, 0x80000001, 0x00000010])
@pytest.mark.parametrize("name", ["add_i32", "min_i32", "max_i32", "add_u32", "min_u32", "max_u32"])
def test_a_reduction_is_over_the_lanes_of_its_mask(library, order, name, mask):
    operation, suffix = name.split("_")
    values, out = numbers(TYPES[suffix], WARP), (TYPES[suffix] * WARP)()
    library.launch(f"reduce_{name}", values, out, c_uint32(mask), order=order)
    taking_part = [lane for lane in range(WARP) if mask >> lane & 1]
    total = {"add": sum, "min": min, "max": max}[operation](values[lane] for lane in taking_part)
    assert [out[lane] for lane in taking_part] == [TYPES[suffix](total).value] * len(taking_part)


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_a_reduction_of_bits(library, order, name):
    values, out = numbers(c_uint32, WARP), (c_uint32 * WARP)()
    library.launch(f"reduce_{name}_u32", values, out, c_uint32(FULL), order=order)
    assert list(out) == [reduce(getattr(operator, {"and": "and_", "or": "or_", "xor": "xor"}[name]), values)] * WARP


@pytest.mark.parametrize("mask", [FULL, 0x00FF00FF])
@pytest.mark.parametrize("votes", [0, FULL, 0x00FF00FF, 0x12345678])
def test_votes_are_of_the_lanes_of_their_mask(library, order, votes, mask):
    predicate = (c_int * WARP)(*(2 * (votes >> lane & 1) for lane in range(WARP)))
    ballot, any_of, all_of = (c_uint32 * WARP)(), (c_int * WARP)(), (c_int * WARP)()
    library.launch("votes", predicate, ballot, any_of, all_of, c_uint32(mask), order=order)
    for lane in (lane for lane in range(WARP) if mask >> lane & 1):
        assert ballot[lane] == votes & mask
        assert bool(any_of[lane]) == bool(votes & mask)
        assert bool(all_of[lane]) == (votes & mask == mask)


@pytest.mark.parametrize("ones", [0, 1, 99, 100])
def test_a_barrier_votes_over_the_block(library, order, ones):
    predicate = (c_int * 100)(*(-1 if i < ones else 0 for i in range(100)))
    any_of, all_of, count = (c_int * 100)(), (c_int * 100)(), (c_int * 100)()
    library.launch("block_votes", predicate, any_of, all_of, count, block=100, order=order)
    assert {(bool(any_of[i]), bool(all_of[i]), count[i]) for i in range(100)} == {(ones > 0, ones == 100, ones)}


def test_parts_of_a_warp_meet_apart(library, order):
    out = (c_uint32 * WARP)()
    library.launch("half_warps", out, order=order)
    assert list(out) == [sum(range(16))] * 16 + [16 * sum(range(16, 32))] * 16


def test_lanes_meet_first_while_others_wait_for_them(library, order):
    out = (c_uint32 * WARP)()
    library.launch("two_then_all", out, order=order)
    assert list(out) == [30 + 2 * 2] * WARP


@pytest.mark.parametrize("stay", [1, 31, 32, 100, 256])
def test_a_barrier_does_not_wait_for_threads_that_have_exited(library, order, stay):
    out = (c_uint32 * 256)()
    library.launch("leave_before_barrier", out, c_uint32(stay), block=256, order=order)
    assert list(out) == [sum(range(stay))] * stay + [0] * (256 - stay)


def test_the_last_exit_opens_a_barrier(library, order):
    out = (c_uint32 * 64)()
    library.launch("leave_after_others_wait", out, block=64, order=order)
    assert list(out) == [1] * 64


@pytest.mark.parametrize("block", [3, 32])
def test_a_warp_barrier_does_not_wait_for_absent_lanes(library, order, block):
    out = (c_uint32 * WARP)()
    library.launch("leave_before_syncwarp", out, block=block, order=order)
    assert sum(out) == min(block, 5)


def test_indices_name_every_thread_of_the_grid_once(library, order):
    grid, block = (3, 2, 2), (5, 3, 4)
    count = math.prod(grid) * math.prod(block)
    out = (c_uint32 * (12 * count))()
    library.launch("indices", out, grid=grid, block=block, order=order, seed=1)

    def points(extent):
        return [(x, y, z) for z in range(extent[2]) for y in range(extent[1]) for x in range(extent[0])]

    expected = [(*thread, *at, *block, *grid) for at in points(grid) for thread in points(block)]
    assert [tuple(out[12 * i : 12 * i + 12]) for i in range(count)] == expected


@pytest.mark.parametrize("size", [32, 256])
def test_shared_memory_of_a_template_is_the_blocks_own(library, order, size):
    values, out = numbers(c_int, 50 * size), (c_int * (50 * size))()
    library.launch(f"reverse_{size}", values, out, grid=50, block=size, order=order)
    assert list(out) == [x for i in range(50) for x in reversed(values[i * size : (i + 1) * size])]


def test_dynamic_shared_memory(library, order):
    values, out = numbers(c_int, 300), (c_int * 300)()
    library.launch("reverse_dynamic", values, out, block=300, shared=300 * 4, order=order)
    assert list(out) == list(reversed(values))


@pytest.mark.parametrize("workers", [1, 4])
def test_every_block_finds_shared_memory_filled(library, order, workers):
    fixed, dynamic = (c_uint32 * (64 * 100))(), (c_uint32 * (64 * 100))()
    library.launch("first_sight", fixed, dynamic, grid=100, block=64, shared=256, order=order, workers=workers)
    assert set(fixed) == set(dynamic) == {{"forward": FULL, "reversed": 0x7F7F7F7F, "shuffled": 0xA5A5A5A5}[order]}


def test_atomics_are_atomic_between_workers(library):
    count = 64 * 256
    results = [(ctype * 1)() for ctype in (c_uint32, c_uint32, c_int, c_int, c_float, c_uint32)]
    library.launch("atomics", *results, grid=64, block=256, workers=4)
    assert [result[0] for result in results] == [
        sum(range(count)),
        FULL,
        1 - count,
        count - 1,
        count / 2,
        2 * count,
    ]


def signed(word, bits=32):
    return (word & (1 << bits) - 1) - (word >> bits - 1 & 1) * (1 << bits)


def byte(word, i):
    return word >> 8 * i & 0xFF


def permuted(x, y, selector):
    picks = [selector >> 4 * i & 0xF for i in range(4)]
    chosen = [byte(y << 32 | x, pick & 7) for pick in picks]
    return sum(
        (0xFF * (c >> 7) if pick & 8 else c) << 8 * i for i, (pick, c) in enumerate(zip(picks, chosen, strict=True))
    )


INTEGERS = {
    "__dp4a of s8": lambda x, y, z: z + sum(signed(byte(x, i), 8) * signed(byte(y, i), 8) for i in range(4)),
    "__dp4a of u8": lambda x, y, z: z + sum(byte(x, i) * byte(y, i) for i in range(4)),
    "__byte_perm": permuted,
    "__funnelshift_l": lambda x, y, z: (y << 32 | x) << z % 32 >> 32,
    "__funnelshift_r": lambda x, y, z: (y << 32 | x) >> z % 32,
    "__popc": lambda x, y, z: x.bit_count(),
    "__clz": lambda x, y, z: 32 - x.bit_length(),
    "__ffs": lambda x, y, z: (x & -x).bit_length(),
    "__brev": lambda x, y, z: int(f"{x:032b}"[::-1], 2),
    "__umulhi": lambda x, y, z: x * y >> 32,
    "min of unsigned": lambda x, y, z: min(x, y),
    "max of int": lambda x, y, z: max(signed(x), signed(y)),
}


def test_integer_intrinsics(library):
    count = 256
    a, b, c = (numbers(c_uint32, count, seed) for seed in range(3))
    a[0] = b[1] = c[2] = 0
    a[3], b[3], a[4], b[4] = 0x80808080, 0x80808080, 0xFFFFFFFF, 0x7F7F7F7F
    out = (c_uint32 * (len(INTEGERS) * count))()
    library.launch("integers", a, b, c, out, block=count)
    for row, (name, expected) in enumerate(INTEGERS.items()):
        results = list(out[row * count : (row + 1) * count])
        assert results == [expected(*xyz) & FULL for xyz in zip(a, b, c, strict=True)], name


def test_conversion_to_integers_rounds_saturates_and_takes_nan_to_zero(library):
    inputs = [0.5, 1.5, -2.5, -0.7, 3e9, -3e9, 5e9, math.nan, math.inf, -math.inf, 2147483520.0]
    nearest, truncated, positive = (c_int * 11)(), (c_int * 11)(), (c_uint32 * 11)()
    library.launch("rounding", (c_float * 11)(*inputs), nearest, truncated, positive, block=11)
    top, bottom = 2**31 - 1, -(2**31)
    assert list(nearest) == [0, 2, -2, -1, top, bottom, top, 0, top, bottom, 2147483520]
    assert list(truncated) == [0, 1, -2, 0, top, bottom, top, 0, top, bottom, 2147483520]
    assert list(positive) == [0, 2, 0, 0, 3000000000, 0, FULL, 0, FULL, 0, 2147483520]


def half_bits(values):
    return (c_uint16 * len(values))(*(struct.unpack("<H", struct.pack("<e", value))[0] for value in values))


def test_half_precision_functions_that_cuda_lacks_on_a_cpu(library):
    rng = random.Random(3)
    a, b, c = ([rng.randint(-2000, 2000) / 64 for _ in range(WARP)] for _ in range(3))
    out, nearest = (c_uint16 * 96)(), (c_int * WARP)()
    library.launch("halves", half_bits(a), half_bits(b), half_bits(c), out, nearest)
    assert list(out[:WARP]) == list(half_bits([x * y + z for x, y, z in zip(a, b, c, strict=True)]))
    assert list(out[WARP:]) == [
        *half_bits([a[lane ^ 1] for lane in range(WARP)]),
        *half_bits([b[lane ^ 1] for lane in range(WARP)]),
    ]
    assert list(nearest) == [round(x) for x in a]


def test_mma_of_bytes_is_exact(library, order):
    rng = random.Random(1)
    a = (c_uint8 * (16 * 32))(*(rng.randint(0, 255) for _ in range(16 * 32)))
    b = (c_int8 * (8 * 32))(*(rng.randint(-128, 127) for _ in range(8 * 32)))
    c, d = numbers(c_int, 16 * 8), (c_int * (16 * 8))()
    library.launch("mma_u8s8", a, b, c, d, order=order)
    expected = [
        c[8 * m + n] + sum(a[32 * m + k] * b[32 * n + k] for k in range(32)) for m in range(16) for n in range(8)
    ]
    assert list(d) == [signed(value & FULL) for value in expected]


def bf16(value):
    """A float that bf16 holds, and its bits (truncated)."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0], bits


def f16(value):
    """A float that f16 holds, and its bits."""
    stored = struct.pack("<e", value)
    return struct.unpack("<e", stored)[0], struct.unpack("<H", stored)[0]


@pytest.mark.parametrize("half", [bf16, f16], ids=["bf16", "f16"])
def test_mma_of_halves_rounds_once(library, order, half):
    rng = random.Random(2)
    a, a_bits = zip(*(half(rng.uniform(-4, 4)) for _ in range(16 * 16)), strict=True)
    b, b_bits = zip(*(half(rng.uniform(-4, 4)) for _ in range(8 * 16)), strict=True)
    c, d = (c_float * 128)(*(rng.uniform(-4, 4) for _ in range(128))), (c_float * 128)()
    library.launch(f"mma_{half.__name__}", (c_uint16 * 256)(*a_bits), (c_uint16 * 128)(*b_bits), c, d, order=order)
    exact = [
        math.fsum([c[8 * m + n], *(a[16 * m + k] * b[16 * n + k] for k in range(16))])
        for m in range(16)
        for n in range(8)
    ]
    assert list(d) == [c_float(value).value for value in exact]
