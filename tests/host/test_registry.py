# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernels that a library says it has, and what it says of their parameters."""

from ctypes import Structure, c_bool, c_double, c_float, c_int, c_int8, c_int64, c_uint16, c_uint32, c_uint64


class Pair(Structure):
    _fields_ = [("first", c_int), ("second", c_double)]


class Eight(Structure):
    _fields_ = [("values", c_float * 8)]


def test_names_kinds_and_sizes_of_parameters(library):
    assert library.parameters("every_kind") == [
        ("out", "ptr", 8),
        ("a", "int", 1),
        ("b", "int", 1),
        ("c", "int", 2),
        ("d", "int", 4),
        ("e", "int", 4),
        ("f", "int", 8),
        ("g", "int", 8),
        ("h", "float", 4),
        ("i", "float", 8),
        ("j", "bytes", 16),
    ]


def test_every_kind_of_argument_arrives(library):
    out = (c_double * 11)()
    library.launch(
        "every_kind",
        out,
        c_bool(True),
        c_int8(-7),
        c_uint16(65535),
        c_uint32(2**32 - 1),
        c_int(-(2**31)),
        c_uint64(2**53),
        c_int64(-(2**53)),
        c_float(0.5),
        c_double(0.1),
        Pair(-3, 2.5),
        block=1,
    )
    assert list(out) == [1, -7, 65535, 2**32 - 1, -(2**31), 2**53, -(2**53), 0.5, 0.1, -3, 2.5]


def test_an_overaligned_argument_may_lie_anywhere(library):
    out, memory = (c_float * 9)(), (c_float * 12)(*range(12))
    for offset in range(4):
        library.launch("overaligned", out, Eight.from_buffer(memory, 4 * offset), block=1)
        assert list(out) == [*range(offset, offset + 8), 0]


def test_a_kernel_without_parameters(library):
    assert library.parameters("no_parameters") == []


def test_modules_are_named_after_their_files(library):
    assert {kernel.module for kernel in library.kernels.values()} == {b"collectives", b"faults"}


def test_macros_make_kernels(library):
    assert (
        library.parameters("reverse_256") == library.parameters("reverse_32") == [("in", "ptr", 8), ("out", "ptr", 8)]
    )
