# SPDX-License-Identifier: MIT OR Apache-2.0
"""The keys of a model's architecture: integers of the whole model, or one a layer."""

from metrale.errors import malformed
from metrale.formats.gguf import GgufFile

__all__ = ["Keys", "MissingKey"]


class MissingKey(Exception):
    """A key that a figure needs and the file lacks."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class Keys:
    """The integer keys ``{architecture}.{name}`` of a file.

    A value that is no integer, or is negative, is a ``FormatError`` that names the key.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self.architecture = gguf.scalar("general.architecture", str)

    def name(self, name: str) -> str:
        """The key in full."""
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.name(name) in self._gguf

    def get(self, name: str, layer: int = 0, default: int | None = None) -> int:
        """The value, for a key with one a layer the value of ``layer``.

        ``MissingKey`` for a key that the file lacks and that has no default.
        """
        key = self.name(name)
        if key not in self._gguf:
            if default is None:
                raise MissingKey(key)
            return default
        value = self._gguf[key]
        if isinstance(value, list):
            if layer >= len(value):
                malformed(self._gguf.path, f"key {key!r}", f"{len(value)} values", f"one for layer {layer}")
            value = value[layer]
        if not isinstance(value, int) or value < 0:
            malformed(self._gguf.path, f"key {key!r}", repr(value), "integers, 0 or more")
        return int(value)

    def flags(self, name: str) -> list[bool] | None:
        """The value of a key that has a yes or no for each layer, if the file has it in this form."""
        if name not in self:
            return None
        value = self._gguf[self.name(name)]
        return [bool(flag) for flag in value] if isinstance(value, list) else None
