# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernel sources to machine code: NVRTC through ``cuda.core``, behind the cache.

A cache hit imports neither ``cuda.core`` nor NVRTC. The key covers the source, every header it includes, the
options, the architecture, and the NVRTC library that this process would load.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from metrale.errors import CompileError, MetraleError, refuse
from metrale.gpu import cache, sources

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

    Errors: ``ArgumentError`` for an architecture name, ``CompileError`` with NVRTC's log.
    """
    if not _ARCH.fullmatch(arch):
        refuse("arch", arch, "a name like sm_80, sm_90a or sm_120a")
    entry = f"{path.stem}-{arch}-{_key(path, arch)}.cubin"
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
    return [path.resolve().parent, sources.CUDA_DIR, _cuda_include()]


def nvrtc_library() -> Path | None:
    """The NVRTC library that ``cuda.core`` would load, in the order it looks: wheels, then a toolkit."""
    candidates = [root / "lib" / "libnvrtc.so.13" for root in _wheel_roots()]
    candidates += [root / "lib64" / "libnvrtc.so.13" for root in _toolkit_roots()]
    return next((c for c in candidates if c.exists()), None)


def _key(path: Path, arch: str) -> str:
    library = nvrtc_library()
    stat = library.stat() if library else None
    parts = {
        "format": _FORMAT,
        "arch": arch,
        "options": OPTIONS,
        "nvrtc": [str(library.resolve()), stat.st_size, stat.st_mtime_ns] if library and stat else None,
        "files": sorted(sources.digests(path, include_dirs(path)).items()),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _cuda_include() -> Path:
    candidates = [root / "include" for root in (*_wheel_roots(), *_toolkit_roots())]
    for folder in candidates:
        if (folder / "cuda_bf16.h").exists():
            return folder
    raise MetraleError(
        "CUDA's headers were not found: install nvidia-cuda-runtime and nvidia-cuda-crt, or set CUDA_HOME "
        f"(looked in {', '.join(map(str, candidates)) or 'no folder'})"
    )


def _wheel_roots() -> Iterator[Path]:
    return (Path(p) / "nvidia" / "cu13" for p in sys.path if p and (Path(p) / "nvidia" / "cu13").is_dir())


def _toolkit_roots() -> Iterator[Path]:
    names = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return (Path(n) for n in names if n and Path(n).is_dir())
