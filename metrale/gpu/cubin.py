# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernel sources to machine code: NVRTC through ``cuda.core``, behind the cache.

A cache hit imports neither ``cuda.core`` nor NVRTC. The key covers the source, every header it includes, the
options, the architecture, and the NVRTC library that this process would load.
"""

import hashlib
import json
import re
from pathlib import Path

from metrale.errors import CompileError, MetraleError, refuse
from metrale.gpu import cache, sources
from metrale.gpu.toolkit import NVRTC_HEADERS, HeadersMissing, include_folders, nvrtc_library

__all__ = ["OPTIONS", "architecture", "compile_cubin", "cubin", "include_dirs", "nvrtc_library"]

# FMAs are written where they are wanted, so that the host build and every architecture round alike. NVRTC 13.0 takes
# a generic lambda of device code for a host function unless told otherwise.
OPTIONS = {"std": "c++17", "fma": False, "device_as_default_execution_space": True}
_FORMAT = 1
_ARCH = re.compile(r"sm_[1-9]\d{1,2}[af]?")
# Architectures whose full instruction set needs the suffixed target.
_ARCH_SPECIFIC = {(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}


def architecture(capability: tuple[int, int]) -> str:
    """The target for a compute capability: ``sm_90a`` for (9, 0)."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if capability in _ARCH_SPECIFIC else ''}"


def cubin(path: Path, arch: str) -> bytes:
    """Machine code of the ``.cu`` file at ``path`` for ``arch`` (such as ``sm_90a``), from the cache if it is there.

    Errors: ``ArgumentError`` for an architecture name, ``CompileError`` with NVRTC's log. A source whose headers
    cannot be told without a preprocessor (``#include MACRO``) is compiled each time.
    """
    if not _ARCH.fullmatch(arch):
        refuse("arch", arch, "a name like sm_80, sm_90a or sm_120a")
    key = _key(path, arch)
    if key is None:
        return compile_cubin(path, arch)[0]
    entry = f"{path.stem}-{arch}-{key}.cubin"
    code = cache.get(entry)
    if code is None:
        code, _ = compile_cubin(path, arch)
        cache.put(entry, code)
    return code


def compile_cubin(path: Path, arch: str, *, resource_report: bool = False) -> tuple[bytes, str]:
    """Compile without the cache; returns the code and the compiler's log (with registers and spills if asked)."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        name=str(path),
        include_path=[str(d) for d in include_dirs(path)],
        ptxas_options=["-v"] if resource_report else None,
        **OPTIONS,
    )
    from io import StringIO

    log = StringIO()
    try:
        program = Program(path.read_text(), "c++", options)
        code = program.compile("cubin", logs=log).code
    except Exception as error:
        raise CompileError(f"{path.name} for {arch} does not compile", f"{error}\n{log.getvalue()}") from error
    return bytes(code), log.getvalue()


def include_dirs(path: Path) -> list[Path]:
    """Where ``path`` finds its headers: its own folder, the package's ``cuda/``, CUDA's own."""
    try:
        return [path.resolve().parent, sources.CUDA_DIR, *include_folders(NVRTC_HEADERS)]
    except HeadersMissing as error:
        raise MetraleError(str(error)) from None


def _key(path: Path, arch: str) -> str | None:
    files = sources.digests(path, include_dirs(path))
    if files is None:
        return None
    library = nvrtc_library()
    stat = library.stat() if library else None
    parts = {
        "format": _FORMAT,
        "arch": arch,
        "options": OPTIONS,
        "nvrtc": [str(library.resolve()), stat.st_size, stat.st_mtime_ns] if library and stat else None,
        "files": sorted(files.items()),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
