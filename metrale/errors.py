# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every error that metrale raises on purpose, and the helpers that word the two common ones.

A bad argument is refused with `ArgumentError` before anything is launched or allocated; a bad file with
`FormatError`; the driver's own failures keep their code and name in `CudaError`. All derive from
`MetraleError`, so one `except` clause catches the package and nothing else.
"""

import os
from collections.abc import Sequence
from typing import NoReturn

__all__ = [
    "ArgumentError",
    "CaptureError",
    "CompileError",
    "CudaError",
    "FormatError",
    "KernelNotFound",
    "LaunchError",
    "MetraleError",
    "OutOfMemoryError",
    "malformed",
    "refuse",
]


LONGEST_VALUE = 200  # characters of a refused value that a message shows


class MetraleError(Exception):
    """Base of every error of the package."""


class ArgumentError(MetraleError, ValueError):
    """A value outside what a function accepts."""


class FormatError(MetraleError):
    """A file that is damaged, or does not hold what was asked of it."""


class LaunchError(MetraleError):
    """A kernel launch that was refused, or that failed while it ran."""


class CaptureError(MetraleError):
    """A capture of a stream into a graph that failed, or a call that a captured stream cannot serve."""


class KernelNotFound(MetraleError):
    """No module, or no entry point in it, of the name asked for."""


class CompileError(MetraleError):
    """Kernel source that does not compile. `log` is the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message, log)
        self.message = message
        self.log = log

    def __str__(self) -> str:
        return f"{self.message}\n{self.log}" if self.log else self.message


class CudaError(MetraleError):
    """A driver call that failed: its `code`, the `name` of that code, and `what` was being done."""

    def __init__(self, code: int, name: str, what: str) -> None:
        super().__init__(code, name, what)
        self.code = code
        self.name = name
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}: {self.name} ({self.code})"


class OutOfMemoryError(CudaError):
    """An allocation that the device could not serve: bytes `asked`, `free` and `total`, and the largest
    `holders` (allocations of the ledger)."""

    def __init__(self, kind: str, asked: int, free: int, total: int, holders: Sequence[object]) -> None:
        held = "; ".join(map(str, holders)) or "nothing of this backend's"
        room = f"{free:,} free of {total:,}; largest holders: {held}"
        what = f"allocating {asked:,} bytes of {kind} memory ({room})"
        super().__init__(2, "CUDA_ERROR_OUT_OF_MEMORY", what)
        self.kind = kind
        self.asked = asked
        self.free = free
        self.total = total
        self.holders = tuple(holders)

    def __reduce__(self) -> tuple[object, ...]:
        # To another process go the words of the holders: the allocations are this one's.
        return type(self), (self.kind, self.asked, self.free, self.total, tuple(map(str, self.holders)))


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise the `ArgumentError` that says which argument, what it was and what it may be."""
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python writes
        shown = object.__repr__(value)
    if len(shown) > LONGEST_VALUE:
        shown = f"{shown[:LONGEST_VALUE]}..."
    raise ArgumentError(f"{name}: got {shown}, allowed: {allowed}")


def malformed(path: str | os.PathLike[str], what: str, got: object, needed: str) -> NoReturn:
    """Raise the `FormatError` that says which file, which part of it, what that is and what was needed."""
    raise FormatError(f"{os.fspath(path)}: {what}: got {got}, needed: {needed}")
