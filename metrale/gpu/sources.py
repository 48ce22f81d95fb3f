# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernel sources that come with the package, and the parameters that were parsed from them."""

import difflib
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from metrale.errors import KernelNotFound

__all__ = ["CUDA_DIR", "digests", "modules", "not_found", "signatures", "source_path"]

_PACKAGE = Path(__file__).resolve().parent.parent
# Installed, the sources lie inside the package; in an editable install, beside it.
CUDA_DIR = _PACKAGE / "cuda" if (_PACKAGE / "cuda").is_dir() else _PACKAGE.parent / "cuda"

# Looked for in comments and strings too: a header too many in a key does no harm.
_SPACE = rb"(?:[ \t]|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
_INCLUDE = re.compile(rb"include(?:_next)?" + _SPACE + rb"\(?" + _SPACE + rb'(?:"([^"\n]+)"|<([^>\n]+)>)')
_MACRO_INCLUDE = re.compile(rb"[#:]" + _SPACE + rb"include(?:_next)?\b" + _SPACE + rb"[A-Za-z_]")  # or %:include
_SPLICE = re.compile(rb"\\\r?\n")

Signature = tuple[tuple[str, str], ...]


def signatures() -> dict[str, dict[str, Signature]]:
    """``{module: {kernel: ((parameter, kind), ...)}}`` for the package's kernels."""
    from metrale.gpu._signatures import KERNELS

    return KERNELS


def modules() -> list[str]:
    """The package's kernel modules, sorted."""
    return sorted(signatures())


def source_path(module: str) -> Path:
    """The ``.cu`` file of one of the package's modules."""
    if module not in signatures():
        raise not_found(module, None, signatures())
    return CUDA_DIR / f"{module}.cu"


def digests(path: Path, roots: Sequence[Path]) -> dict[str, str] | None:
    """SHA-256 of the file at ``path`` and of every header that it, or one of those, names and that is found in
    ``roots`` or beside the file that names it. None if one of them names a header by a macro."""
    digest, names = _scanned(path)
    found = {path.name: digest}
    pending = [(names, path.resolve().parent)]
    while pending:
        names, here = pending.pop()
        if names is None:
            return None
        for name in names:
            header = next((root / name for root in (here, *roots) if os.path.isfile(root / name)), None)
            if header is None:
                continue
            folder = header.parent.resolve()  # as it is spelled, a cycle through ".." would not end
            header = folder / header.name
            if str(header) not in found:
                found[str(header)], names = _scanned(header)
                pending.append((names, folder))
    return found


def _scanned(path: Path) -> tuple[str, frozenset[str] | None]:
    """The SHA-256 of a file and the names of the headers that it includes, None if one is named by a macro."""
    stat = path.stat()
    return _scan(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)  # modules have most of their headers in common
def _scan(path: Path, _size: int, _mtime_ns: int) -> tuple[str, frozenset[str] | None]:
    data = path.read_bytes()
    text = _SPLICE.sub(b"", data)
    names = frozenset(os.fsdecode(quoted or angled) for quoted, angled in _INCLUDE.findall(text))
    return hashlib.sha256(data).hexdigest(), None if _MACRO_INCLUDE.search(text) else names


def not_found(module: str, name: str | None, known: Mapping[str, Iterable[str]]) -> KernelNotFound:
    """The error for a module or kernel that is not there, with the nearest names that are."""
    if module in known:
        what, wanted, choices = f"kernel {name!r} in module {module!r}", name or "", list(known[module])
    else:
        what, wanted, choices = f"kernel module {module!r}", module, list(known)
    near = difflib.get_close_matches(wanted, choices, n=3, cutoff=0.5) or sorted(choices)[:3]
    return KernelNotFound(f"no {what}; nearest: {', '.join(near) if near else 'none'}")
