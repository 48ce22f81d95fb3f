# SPDX-License-Identifier: MIT OR Apache-2.0
"""Byte-level GGUF files for the tests: whatever is asked for, valid or not."""

import struct
from dataclasses import dataclass, field

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
_CODES = {U8: "B", U16: "H", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: object) -> bytes:
    """A typed value as it follows a key's name."""
    return struct.pack("<I", kind) + (text(content) if kind == STRING else struct.pack("<" + _CODES[kind], content))


def array(kind: int, content: list) -> bytes:
    body = b"".join(map(text, content)) if kind == STRING else struct.pack(f"<{len(content)}{_CODES[kind]}", *content)
    return struct.pack("<IIQ", ARRAY, kind, len(content)) + body


@dataclass
class Image:
    """A GGUF file to be: keys are encoded values by name, tensors (ggml type, dims innermost first, data)."""

    keys: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, tuple[int, list[int], bytes]] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        out = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))]
        out += [text(name) + encoded for name, encoded in self.keys.items()]
        offset = 0
        for name, (kind, dims, data) in self.tensors.items():
            out.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
            offset += self._padded(len(data))
        return b"".join(out)

    def encode(self) -> bytes:
        header = self.header()
        data = [data.ljust(self._padded(len(data)), b"\0") for _, _, data in self.tensors.values()]
        return header.ljust(self._padded(len(header)), b"\0") + b"".join(data)

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment
