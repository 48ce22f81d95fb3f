# SPDX-License-Identifier: MIT OR Apache-2.0
"""The header of one GGUF file: where each key's value and each tensor's bytes lie.

    magic "GGUF" | version u32 | tensors u64 | keys u64
    keys:    name string | value type u32 | value          string: length u64, then UTF-8
    tensors: name string | dims u32 | dim u64 ... | type u32 | offset u64
    padding to `general.alignment` | data; offsets count from here
    array value: element type u32 | count u64 | elements

Values are located, not decoded: a tokenizer's arrays cost a walk over their lengths. No count or length is
believed before it was compared with the bytes that are there, and with a limit far above what real files
hold, so a damaged header ends in a `FormatError` and neither in a long loop nor in a huge allocation.
"""

import math
import struct
from dataclasses import dataclass
from mmap import mmap

from metrale.errors import malformed
from metrale.formats.kquant import QuantType, quant_type

__all__ = ["Entry", "Header", "Scalar", "TensorInfo", "decode", "parse_header"]

Source = bytes | mmap
Scalar = bool | int | float | str

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Limits on what a header may claim. The largest real files have about 10^3 keys, 10^4 tensors,
# 3 * 10^5 strings in an array and a few hundred kilobytes in a string.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 24
MAX_NAME_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 26
MAX_DIMS = 4

STRING = 8
ARRAY = 9


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type of key values: its name, its struct code (none for a string), and its Python type."""

    name: str
    code: str
    python: type[Scalar]


VALUE_TYPES = {
    0: ValueType("u8", "B", int),
    1: ValueType("i8", "b", int),
    2: ValueType("u16", "H", int),
    3: ValueType("i16", "h", int),
    4: ValueType("u32", "I", int),
    5: ValueType("i32", "i", int),
    6: ValueType("f32", "f", float),
    7: ValueType("bool", "B", bool),
    STRING: ValueType("string", "", str),
    10: ValueType("u64", "Q", int),
    11: ValueType("i64", "q", int),
    12: ValueType("f64", "d", float),
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PREAMBLE = struct.Struct("<4sIQQ")
_ARRAY_HEAD = struct.Struct("<IQ")
_TENSOR_TAIL = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value, undecoded: element type, byte position, and the count if it is an array."""

    type: ValueType
    position: int
    count: int | None = None

    def __str__(self) -> str:
        return self.type.name if self.count is None else f"array of {self.count} {self.type.name}"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place.

    `shape` is row-major (the file has the dims reversed), `offset` counts from the file's start, `nbytes` is
    None for a type of unknown block size.
    """

    type: QuantType
    shape: tuple[int, ...]
    offset: int
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Header:
    """What `parse_header` found."""

    version: int
    entries: dict[str, Entry]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads forward through the header; `path` is for messages."""

    __slots__ = ("buffer", "path", "position", "size", "strings")

    def __init__(self, buffer: Source, path: str, position: int = 0) -> None:
        self.buffer = buffer
        self.path = path
        self.position = position
        self.size = len(buffer)
        self.strings = 0

    def take(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`, which must be there; returns where they start."""
        start = self.position
        if nbytes > self.size - start:
            needed = f"{nbytes} bytes at byte {start}"
            malformed(self.path, what, f"a file that ends at byte {self.size} (truncated?)", needed)
        self.position = start + nbytes
        return start

    def read(self, layout: struct.Struct, what: str) -> tuple[int, ...]:
        return layout.unpack_from(self.buffer, self.take(layout.size, what))

    def string(self, what: str, limit: int) -> str:
        (length,) = self.read(_U64, what)
        if length > limit:
            malformed(self.path, what, f"a string of {length} bytes", f"{limit} or fewer (damaged header?)")
        start = self.take(length, what)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            malformed(self.path, what, "bytes that are not UTF-8", "a UTF-8 string")

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings: one 8-byte read each, since each length is the only way to the next."""
        self.strings += count
        if self.strings > MAX_ELEMENTS:
            malformed(self.path, what, f"{self.strings} strings", f"up to {MAX_ELEMENTS} in all keys")
        unpack_from, buffer, position = _U64.unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + unpack_from(buffer, position)[0]
        except (struct.error, OverflowError, IndexError):
            position = self.size + 1
        self.take(position - self.position, what)

    def value_type(self, type_id: int, what: str) -> ValueType:
        found = VALUE_TYPES.get(type_id)
        if found is None:
            malformed(self.path, what, f"value type {type_id}", "a scalar, a string or an array of them")
        return found

    def entry(self, what: str) -> Entry:
        """Locate the value of a key, and step over it."""
        (type_id,) = self.read(_U32, what)
        if type_id != ARRAY:
            kind = self.value_type(type_id, what)
            start = self.position
            if type_id == STRING:
                self.skip_strings(1, what)
            else:
                self.take(struct.calcsize(kind.code), what)
            return Entry(kind, start)

        element_id, count = self.read(_ARRAY_HEAD, what)
        kind = self.value_type(element_id, what)
        if count > MAX_ELEMENTS:
            malformed(self.path, what, f"an array of {count}", f"up to {MAX_ELEMENTS} (damaged header?)")
        start = self.position
        if element_id == STRING:
            self.skip_strings(count, what)
        else:
            self.take(count * struct.calcsize(kind.code), what)
        return Entry(kind, start, count)


def parse_header(buffer: Source, path: str) -> Header:
    """Locate every key and tensor of the GGUF file in `buffer`; `path` names it in errors."""
    cursor = _Cursor(buffer, path)
    version, n_tensors, n_keys = _preamble(cursor)

    entries: dict[str, Entry] = {}
    for index in range(n_keys):
        name = cursor.string(f"name of key {index}", MAX_NAME_BYTES)
        if name in entries:
            malformed(path, f"key {name!r}", "the name twice", "distinct names")
        entries[name] = cursor.entry(f"key {name!r}")

    raw: dict[str, tuple[QuantType, tuple[int, ...], int]] = {}
    for index in range(n_tensors):
        name = cursor.string(f"name of tensor {index}", MAX_NAME_BYTES)
        if name in raw:
            malformed(path, f"tensor {name!r}", "the name twice", "distinct names")
        raw[name] = _tensor(cursor, f"tensor {name!r}")

    alignment = _alignment(buffer, path, entries)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _place(cursor, f"tensor {name!r}", kind, shape, offset, data_start, alignment)
        for name, (kind, shape, offset) in raw.items()
    }
    return Header(version, entries, tensors)


def decode(buffer: Source, path: str, name: str, entry: Entry) -> Scalar | list[Scalar]:
    """The value at `entry`: a Python scalar, or a list of them for an array."""
    what = f"key {name!r}"
    cursor = _Cursor(buffer, path, entry.position)
    count = 1 if entry.count is None else entry.count
    values: list[Scalar]
    if entry.type.python is str:
        values = [cursor.string(what, MAX_STRING_BYTES) for _ in range(count)]
    else:
        layout = struct.Struct(f"<{count}{entry.type.code}")
        values = list(cursor.read(layout, what))
    if entry.type.python is bool:
        if any(value not in (0, 1) for value in values):
            malformed(path, what, "a bool of another value", "0 or 1")
        values = [bool(value) for value in values]
    return values[0] if entry.count is None else values


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors and number of keys."""
    path = cursor.path
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        malformed(path, "magic", magic, "b'GGUF'")
    start = cursor.take(_PREAMBLE.size, "preamble")
    _, version, n_tensors, n_keys = _PREAMBLE.unpack_from(cursor.buffer, start)
    if version & 0xFFFF == 0:
        malformed(path, "version", f"{version:#010x}, a big-endian file", "a little-endian file")
    if version not in VERSIONS:
        malformed(path, "version", version, " or ".join(map(str, VERSIONS)))
    if n_keys > MAX_KEYS:
        malformed(path, "number of keys", n_keys, f"up to {MAX_KEYS} (damaged header?)")
    if n_tensors > MAX_TENSORS:
        malformed(path, "number of tensors", n_tensors, f"up to {MAX_TENSORS} (damaged header?)")
    return version, n_tensors, n_keys


def _tensor(cursor: _Cursor, what: str) -> tuple[QuantType, tuple[int, ...], int]:
    """Type, row-major shape, and offset in the data section."""
    (n_dims,) = cursor.read(_U32, what)
    if n_dims > MAX_DIMS:
        malformed(cursor.path, what, f"{n_dims} dims", f"up to {MAX_DIMS} (damaged header?)")
    dims = cursor.read(struct.Struct(f"<{n_dims}Q"), what)
    if 0 in dims:
        malformed(cursor.path, what, f"shape {list(dims[::-1])}", "dims of 1 or more")
    type_id, offset = cursor.read(_TENSOR_TAIL, what)
    return quant_type(type_id), dims[::-1], offset


def _alignment(buffer: Source, path: str, entries: dict[str, Entry]) -> int:
    name = "general.alignment"
    if name not in entries:
        return DEFAULT_ALIGNMENT
    entry = entries[name]
    if entry.count is not None or entry.type.python is not int:
        malformed(path, f"key {name!r}", entry, "an integer")
    value = decode(buffer, path, name, entry)
    if not isinstance(value, int) or value <= 0 or value & (value - 1):
        malformed(path, f"key {name!r}", value, "a power of two")
    return value


def _place(
    cursor: _Cursor,
    what: str,
    kind: QuantType,
    shape: tuple[int, ...],
    offset: int,
    data_start: int,
    alignment: int,
) -> TensorInfo:
    """Check that the tensor's rows are whole blocks and that its bytes are in the file."""
    if offset % alignment:
        malformed(cursor.path, what, f"offset {offset}", f"a multiple of the alignment, {alignment}")
    nbytes = None
    if kind.known:
        row = shape[-1] if shape else 1
        if row % kind.block_values:
            malformed(cursor.path, what, f"{kind} rows of {row}", f"a multiple of {kind.block_values}")
        nbytes = math.prod(shape[:-1]) * kind.row_bytes(row)
    cursor.position = data_start + offset
    cursor.take(nbytes or 0, what)
    return TensorInfo(kind, shape, data_start + offset, nbytes)
