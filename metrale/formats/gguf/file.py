# SPDX-License-Identifier: MIT OR Apache-2.0
"""`GgufFile`: the keys and tensors of a GGUF file, or of all parts of a split one.

Opening maps the file and reads its header; the cost does not depend on the size of the tensors. Tensor bytes
are reached in two ways: `Tensor.data` is a view of the map (no copy, paged in when touched), and
`Tensor.read_into` reads with `pread`, which several threads may do at once and which reports a file that was
cut short after it was opened (touching such a part of the map is a bus error, as with any map).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from metrale.errors import ArgumentError, malformed, refuse
from metrale.formats.gguf.header import Header, Scalar, decode, parse_header
from metrale.formats.kquant import BF16, F16, F32, QuantType

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import WriteableBuffer

__all__ = ["GgufFile", "Tensor"]

T = TypeVar("T", bool, int, float, str)

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_ARRAY_DTYPES = {F32: "<f4", F16: "<f2", BF16: "<u2"}


class GgufFile:
    """An open GGUF file; any part of a split file opens all of it.

    A context manager. After `close()` nothing can be read through it, but arrays and views taken before stay
    valid: the map goes away with the last of them. `FormatError` for damaged files names the file and the key
    or tensor; a path that cannot be opened is the usual `OSError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._parts: list[_Part] = []
        try:
            self._open_parts()
            self._tensors = self._collect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GgufFile {self.path!r}: {len(self.keys)} keys, {len(self.tensors)} tensors>"

    def close(self) -> None:
        """Release the map and the file handle. Closing twice is fine."""
        for part in self._parts:
            part.close()

    @property
    def version(self) -> int:
        """The GGUF version of the (first) file."""
        return self._parts[0].header.version

    @property
    def keys(self) -> Sequence[str]:
        """Names of all keys, in file order; those of a split file are the first part's."""
        return tuple(self._parts[0].header.entries)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name, in file order, part after part."""
        return MappingProxyType(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._parts[0].header.entries

    def __getitem__(self, key: str) -> Scalar | list[Scalar]:
        """The value of a key, decoded when asked for: a scalar, or a list for an array."""
        return self._parts[0].value(key)

    def scalar(self, key: str, kind: type[T]) -> T:
        """The value of a key that must be there and be a `kind`: bool, int, float or str."""
        return cast(T, self._parts[0].typed(key, kind))

    def array(self, key: str, kind: type[T]) -> list[T]:
        """The value of a key that must be there and be an array of `kind`."""
        return cast("list[T]", self._parts[0].typed(key, kind, array=True))

    def tensor(self, name: str, types: Sequence[QuantType], shape: Sequence[int]) -> Tensor:
        """The tensor of that name, which must have one of `types` and the row-major `shape`."""
        needed = f"{' or '.join(map(str, types))} {list(shape)}"
        found = self._tensors.get(name)
        if found is None:
            malformed(self.path, f"tensor {name!r}", "none in the file", needed)
        if found.type not in types or found.shape != tuple(shape):
            malformed(found.path, f"tensor {name!r}", f"{found.type} {list(found.shape)}", needed)
        return found

    def _open_parts(self) -> None:
        """Open the file, and if it is a part of a split one, all of them in order."""
        given = _Part(self.path)
        self._parts.append(given)
        if given.split_count <= 1:
            return
        given_number, paths = _part_paths(given)
        self._parts.clear()
        for number, path in enumerate(paths):
            part = given if number == given_number else _Part(path, given)
            self._parts.append(part)
            if (part.split_number, part.split_count) != (number, len(paths)):
                got = f"split.no {part.split_number}, split.count {part.split_count}"
                malformed(part.path, "split", got, f"split.no {number}, split.count {len(paths)}")

    def _collect(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for part in self._parts:
            for name, info in part.header.tensors.items():
                if name in tensors:
                    got = f"the name of one in {tensors[name].path}"
                    malformed(part.path, f"tensor {name!r}", got, "distinct names")
                tensors[name] = Tensor(name, info.type, info.shape, info.offset, info.nbytes, part)
        total_key = "split.tensors.count"
        if len(self._parts) > 1 and total_key in self:
            total = self.scalar(total_key, int)
            if len(tensors) != total:
                needed = f"{len(tensors)}, the sum over all parts"
                malformed(self._parts[0].path, f"key {total_key!r}", total, needed)
        return tensors


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an open file.

    `shape` is row-major, outermost first: `[n_routed, inter, dim]` for the gate matrices of a layer's
    experts. `offset` counts from the start of `path`. A type whose block size is not known has no
    size, and its bytes are refused.
    """

    name: str
    type: QuantType
    shape: tuple[int, ...]
    offset: int
    _nbytes: int | None = field(repr=False)
    _part: _Part = field(repr=False, compare=False)

    @property
    def path(self) -> str:
        """The file that holds the tensor: one of the parts if it is split."""
        return self._part.path

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        if self._nbytes is None:
            malformed(self.path, f"tensor {self.name!r}", self.type, "a type whose block size is known")
        return self._nbytes

    @property
    def slice_nbytes(self) -> int:
        """Bytes of one index of the outermost dim: of one expert's matrix, or of one row of a matrix."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    @property
    def data(self) -> memoryview:
        """All bytes, read-only, in the map: nothing is copied."""
        return self._part.view(self.offset, self.nbytes)

    def slice(self, index: int) -> memoryview:
        """The bytes of one index of the outermost dim, as `data`."""
        rows = self.shape[0] if self.shape else 1
        if not 0 <= index < rows:
            refuse("index", index, f"0..{rows - 1} for tensor {self.name!r}")
        return self._part.view(self.offset + index * self.slice_nbytes, self.slice_nbytes)

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as an array over `data`.

        f32 and f16 are themselves, bf16 its uint16 bits, all else the uint8 bytes of the rows,
        `[..., row bytes]`.
        """
        import numpy as np

        data, dtype = self.data, _ARRAY_DTYPES.get(self.type)
        if dtype is not None:
            return np.frombuffer(data, dtype).reshape(self.shape)
        row_bytes = self.type.row_bytes(self.shape[-1] if self.shape else 1)
        return np.frombuffer(data, np.uint8).reshape(*self.shape[:-1], row_bytes)

    def read_into(self, buffer: WriteableBuffer, offset: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from `offset` on, by `pread`."""
        with memoryview(buffer) as given, given.cast("B") as target:
            if offset < 0 or offset + target.nbytes > self.nbytes:
                asked = f"bytes {offset}..{offset + target.nbytes}"
                refuse("buffer", asked, f"a range within the {self.nbytes} bytes of {self.name!r}")
            self._part.read_into(target, self.offset + offset, f"tensor {self.name!r}")

    def read_rows_into(self, buffer: WriteableBuffer, indices: Sequence[int]) -> None:
        """Fill `buffer` with the bytes of these indices of the outermost dim, one after the other, by `pread`: all
        are asked of the disk before the first is waited for."""
        rows, size = self.shape[0] if self.shape else 1, self.slice_nbytes
        for index in indices:
            if not 0 <= index < rows:
                refuse("index", index, f"0..{rows - 1} for tensor {self.name!r}")
        with memoryview(buffer) as given, given.cast("B") as target:
            if target.nbytes != len(indices) * size:
                refuse("buffer", f"{target.nbytes} bytes", f"{len(indices) * size}, {size} an index")
            offsets = [self.offset + int(index) * size for index in indices]
            self._part.announce(offsets, size)
            for i, offset in enumerate(offsets):
                self._part.read_into(target[i * size : (i + 1) * size], offset, f"tensor {self.name!r}")


class _Part:
    """One file on disk: its handle, its map and its header.

    `sibling` is the part whose name led here, for the message when the file is not there.
    """

    def __init__(self, path: str, sibling: _Part | None = None) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            # A pipe would block in open, and a folder has no bytes to map.
            if not stat.S_ISREG(os.stat(path).st_mode):
                malformed(path, "file", "a folder, device or pipe", "a regular file")
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            if sibling is None:
                raise
            malformed(path, "part", "no such file", f"every part that {sibling.path} belongs to")
        try:
            if os.fstat(self._file.fileno()).st_size == 0:
                malformed(path, "file", "0 bytes", "a GGUF header")
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self.header: Header = parse_header(self._map, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()
        if self._map is not None:
            # Views of the map that are still held keep it alive; it goes with the last of them.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    @property
    def map(self) -> mmap.mmap:
        if self._map is None:
            raise ArgumentError(f"{self.path}: the file is closed")
        return self._map

    @property
    def split_count(self) -> int:
        """How many parts the model has; 1 if it is not split."""
        return cast(int, self.typed("split.count", int)) if "split.count" in self.header.entries else 1

    @property
    def split_number(self) -> int:
        """Which part this is, from 0."""
        return cast(int, self.typed("split.no", int))

    def value(self, key: str, needed: str = "this key") -> Scalar | list[Scalar]:
        entry = self.header.entries.get(key)
        if entry is None:
            malformed(self.path, f"key {key!r}", "none in the file", needed)
        return decode(self.map, self.path, key, entry)

    def typed(self, key: str, kind: type[Scalar], array: bool = False) -> Scalar | list[Scalar]:
        needed = f"an array of {kind.__name__}" if array else f"a single {kind.__name__}"
        entry = self.header.entries.get(key)
        if entry is not None and (entry.type.python is not kind or (entry.count is not None) != array):
            malformed(self.path, f"key {key!r}", entry, needed)
        return self.value(key, needed)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.map)[offset : offset + nbytes]

    def announce(self, offsets: Sequence[int], nbytes: int) -> None:
        """Have the system begin to read these places."""
        if self._map is not None:
            for offset in offsets:
                os.posix_fadvise(self._file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, target: memoryview, offset: int, what: str) -> None:
        if self._map is None:
            raise ArgumentError(f"{self.path}: the file is closed")
        done = 0
        while done < target.nbytes:
            count = os.preadv(self._file.fileno(), [target[done:]], offset + done)
            if count == 0:
                needed = f"{target.nbytes - done} more bytes at byte {offset + done}"
                malformed(self.path, what, "the end of the file", needed)
            done += count


def _part_paths(part: _Part) -> tuple[int, list[str]]:
    """Which part of its split file `part` is, from 0, and the paths of all of them, by their names."""
    folder, name = os.path.split(part.path)
    count = part.split_count
    match = _PART_NAME.fullmatch(name)
    number = int(match["number"]) if match else 0
    if match is None or int(match["count"]) != count or not 1 <= number <= count:
        needed = f"a file name that ends in -NNNNN-of-{count:05}.gguf"
        malformed(part.path, "key 'split.count'", count, needed)
    stem = os.path.join(folder, match["stem"])
    return number - 1, [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
