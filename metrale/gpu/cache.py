# SPDX-License-Identifier: MIT OR Apache-2.0
"""A folder of compiled kernels: written atomically, checked when read, trusted only if it is the user's own."""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from metrale.errors import MetraleError

__all__ = ["folder", "get", "put", "reserve", "usage"]

_MAGIC = b"metrale\x01"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size


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
    """The entry ``name``, or None if there is none or it is damaged."""
    try:
        data = (folder() / name).read_bytes()
    except FileNotFoundError:
        return None
    payload = data[_HEAD:]
    whole = data[:_HEAD] == _MAGIC + hashlib.sha256(payload).digest()
    return payload if whole else None


def put(name: str, payload: bytes) -> None:
    """Write the entry ``name``; a reader sees all of it or nothing."""
    with reserve(name) as path:
        path.write_bytes(_MAGIC + hashlib.sha256(payload).digest() + payload)


@contextlib.contextmanager
def reserve(name: str) -> Iterator[Path]:
    """A temporary path beside the entry ``name``, which becomes the entry when the block ends well."""
    home = folder()
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=home)
    os.close(handle)
    try:
        yield Path(temporary)
        os.replace(temporary, home / name)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def usage() -> tuple[int, int]:
    """Number of entries and their bytes."""
    sizes = [entry.stat().st_size for entry in folder().iterdir() if entry.is_file() and entry.name[0] != "."]
    return len(sizes), sum(sizes)
