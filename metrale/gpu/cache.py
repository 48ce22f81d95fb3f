# SPDX-License-Identifier: MIT OR Apache-2.0
"""A folder of compiled kernels: written atomically, checked when read, trusted only if it is the user's own."""

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from metrale.errors import MetraleError

__all__ = ["file", "folder", "get", "put", "reserve", "usage"]

# What follows an entry's payload. Behind it, not before: the loader takes a library as it is, and ignores the rest.
_MAGIC = b"metrale\x02"
_SEAL_BYTES = len(_MAGIC) + hashlib.sha256().digest_size


def folder() -> Path:
    """The cache folder: ``METRALE_CACHE_DIR``, else ``metrale`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    It is created when missing. One that another user owns or may write to is refused: what it holds is run.
    """
    base = os.environ.get("METRALE_CACHE_DIR")
    if base:
        path = Path(base)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metrale"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise MetraleError(
            f"cache folder {path}: got owner {info.st_uid} and mode {stat.S_IMODE(info.st_mode):o}, "
            f"allowed: owned by user {os.getuid()} and writable by nobody else (METRALE_CACHE_DIR names another)"
        )
    return path


def get(name: str) -> bytes | None:
    """The entry ``name``, or None if there is none or it cannot be read or is damaged."""
    try:
        data = (folder() / name).read_bytes()
    except OSError:
        return None
    payload = data[:-_SEAL_BYTES]
    return payload if data[-_SEAL_BYTES:] == _seal(payload) else None


def file(name: str) -> Path | None:
    """Where the entry ``name`` lies, for what is loaded by path; None as in ``get``."""
    return None if get(name) is None else folder() / name


def put(name: str, payload: bytes) -> None:
    """Write the entry ``name``; a reader sees all of it or nothing.

    A cache that cannot be written (a full disk, a read-only one) is a warning: what it would keep is at hand.
    """
    try:
        with reserve(name) as path:
            path.write_bytes(payload)
    except OSError as error:
        warnings.warn(f"the cache does not keep {name}, which will be made again: {error}", stacklevel=2)


@contextlib.contextmanager
def reserve(name: str) -> Iterator[Path]:
    """A temporary path beside the entry ``name``; what the block has written there, if it ends well, is the entry."""
    home = folder()
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=home)
    os.close(handle)
    path = Path(temporary)
    try:
        yield path
        seal = _seal(path.read_bytes())
        with path.open("ab") as entry:
            entry.write(seal)
        path.replace(home / name)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def usage() -> tuple[int, int]:
    """Number of entries and their bytes."""
    sizes = [entry.stat().st_size for entry in folder().iterdir() if entry.is_file() and entry.name[0] != "."]
    return len(sizes), sum(sizes)


def _seal(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).digest()
