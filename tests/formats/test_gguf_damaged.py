# SPDX-License-Identifier: MIT OR Apache-2.0
"""Damaged GGUF files end in a `FormatError` that says where, whatever the damage."""

import os
import struct
from contextlib import suppress

import pytest
from gguf_files import ARRAY, BOOL, I32, STRING, U8, U32, Image, array, text, value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metrale.errors import FormatError
from metrale.formats.gguf import GgufFile
from metrale.formats.gguf.header import decode, parse_header

SAMPLE = Image(
    {
        "general.architecture": value(STRING, "deepseek41"),
        "general.alignment": value(U32, 32),
        "tokens": array(STRING, ["a", "bb", ""]),
        "numbers": array(I32, [1, -2, 3]),
        "flag": value(BOOL, True),
    },
    {"q": (10, [256, 2], bytes(168)), "f": (0, [4], bytes(16))},
)
FUZZ = settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_all(raw):
    """Everything the reader can be asked about a header."""
    header = parse_header(raw, "fuzz.gguf")
    for name, entry in header.entries.items():
        with suppress(FormatError):
            decode(raw, "fuzz.gguf", name, entry)
    for info in header.tensors.values():
        assert info.nbytes is None or info.offset + info.nbytes <= len(raw)


def file_of(tmp_path, raw):
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    return path


def head(keys=0, tensors=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys)


def one_key(kind, *numbers):
    """A header whose only key `k` has a value of type `kind`, cut after a u32 and u64s."""
    layout = "I" + ("I" if kind == ARRAY else "") + "Q" * (len(numbers) - (kind == ARRAY))
    return head(keys=1) + text("k") + struct.pack("<" + layout, kind, *numbers)


def one_tensor(dims, kind, offset):
    return head(tensors=1) + text("t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def aligned(encoded):
    return Image({"general.alignment": encoded}).encode()


HUGE = (1 << 64) - 1
DAMAGED = {
    "empty": (b"", "file: got 0 bytes, needed: a GGUF header"),
    "magic": (head(magic=b"GGML"), "magic: got b'GGML', needed: b'GGUF'"),
    "short magic": (b"GG", "magic: got b'GG'"),
    "short preamble": (head()[:20], r"preamble: got a file that ends at byte 20 .* needed: 24 bytes at"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: got 0x03000000, a big-endian file"),
    "version 1": (head(version=1), "version: got 1, needed: 2 or 3"),
    "version 4": (head(version=4), "version: got 4, needed: 2 or 3"),
    "keys": (head(keys=HUGE), f"number of keys: got {HUGE}"),
    "tensors": (head(tensors=HUGE), f"number of tensors: got {HUGE}"),
    "keys missing": (head(keys=1), "name of key 0: got a file that ends at byte 24"),
    "key name": (head(keys=1) + struct.pack("<Q", HUGE), f"name of key 0: got a string of {HUGE} bytes"),
    "key not UTF-8": (head(keys=1) + text(b"\xff"), "name of key 0: got bytes that are not UTF-8"),
    "value type": (one_key(77), "key 'k': got value type 77"),
    "string": (one_key(STRING, HUGE), "key 'k': got a file that ends"),
    "array count": (
        one_key(ARRAY, U8, HUGE),
        f"key 'k': got an array of {HUGE}",
    ),
    "array cut": (one_key(ARRAY, U32, 9), "key 'k': .* needed: 36 bytes"),
    "strings cut": (one_key(ARRAY, STRING, 1 << 24), "key 'k': got a file that"),
    "string lengths": (
        one_key(ARRAY, STRING, 2, HUGE) + bytes(64),
        "key 'k': got a file that ends",
    ),
    "nested array": (one_key(ARRAY, ARRAY, 1), "key 'k': got value type 9"),
    "key twice": (head(keys=2) + 2 * (text("k") + value(U8, 1)), "key 'k': got the name twice"),
    "dims": (head(tensors=1) + text("t") + struct.pack("<I", 5), "tensor 't': got 5 dims, needed: up to 4"),
    "zero dim": (
        one_tensor([0, 3], 0, 0),
        r"tensor 't': got shape \[3, 0\], needed: dims of 1 or more",
    ),
    "partial block": (
        one_tensor([255], 10, 0),
        "tensor 't': got Q2_K rows of 255, needed: a multiple of 256",
    ),
    "offset": (
        one_tensor([1], 0, 3) + bytes(99),
        "tensor 't': got offset 3, needed: a multiple of the alignment, 32",
    ),
    "tensor outside": (
        one_tensor([1 << 60], 0, 0),
        f"tensor 't': got a file that ends at byte 57 .* needed: {1 << 62} bytes at byte 64",
    ),
    "tensor twice": (
        head(tensors=2) + 2 * (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(99),
        "tensor 't': got the name twice",
    ),
    "alignment 0": (aligned(value(U32, 0)), "key 'general.alignment': got 0, needed: a power of two"),
    "alignment 48": (aligned(value(U32, 48)), "key 'general.alignment': got 48, needed: a power of two"),
    "alignment type": (
        aligned(value(STRING, "32")),
        "key 'general.alignment': got string, needed: an integer",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_the_error_names_the_file_and_the_place(tmp_path, name):
    raw, message = DAMAGED[name]
    with pytest.raises(FormatError, match=rf"bad.gguf: {message}"):
        GgufFile(file_of(tmp_path, raw))


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (struct.pack("<IB", BOOL, 2), "key 'k': got a bool of another value, needed: 0 or 1"),
        (struct.pack("<I", STRING) + text(b"\xc3"), "key 'k': got bytes that are not UTF-8"),
    ],
)
def test_a_damaged_value_is_found_when_it_is_read(tmp_path, encoded, message):
    path = file_of(tmp_path, Image({"k": encoded}).encode())
    with GgufFile(path) as opened, pytest.raises(FormatError, match=message):
        opened["k"]


def test_a_folder_and_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FormatError, match="file: got a folder, device or pipe, needed: a regular file"):
            GgufFile(path)


def test_every_truncation_of_a_real_file_is_found(tmp_path, tiny_path):
    raw = tiny_path.read_bytes()
    for size in [*range(1, 3200, 7), 3200, len(raw) // 2, len(raw) - 1]:
        with pytest.raises(FormatError, match=r"bad.gguf: (magic|preamble|name|key|tensor)"):
            GgufFile(file_of(tmp_path, raw[:size]))


def test_a_file_that_shrinks_while_open_is_found_by_read_into(tmp_path, tiny_path):
    path = file_of(tmp_path, tiny_path.read_bytes())
    with GgufFile(path) as opened:
        last = list(opened.tensors.values())[-1]
        os.truncate(path, last.offset + 4)
        with pytest.raises(FormatError, match=f"bad.gguf: tensor '{last.name}': got the end of the file"):
            last.read_into(bytearray(last.nbytes))


@FUZZ
@given(st.data())
def test_flipped_bytes_end_in_values_or_a_format_error(data):
    raw = bytearray(SAMPLE.encode())
    places = st.integers(0, len(SAMPLE.header()) - 1)
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(places)] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(len(raw) // 4, len(raw))) :]
    with suppress(FormatError):
        read_all(bytes(raw))


@FUZZ
@given(st.binary(max_size=300), st.integers(0, 1 << 64), st.integers(0, 1 << 64))
def test_random_bytes_after_a_preamble_end_in_a_format_error(tail, tensors, keys):
    with suppress(FormatError):
        read_all(b"GGUF" + struct.pack("<IQQ", 3, tensors % 4 or tensors % (1 << 64), keys % (1 << 64)) + tail)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_of_a_real_header(tiny_path, data):
    raw = bytearray(tiny_path.read_bytes()[:3300])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 3199))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(FormatError):
        read_all(bytes(raw).ljust(tiny_path.stat().st_size, b"\0"))
