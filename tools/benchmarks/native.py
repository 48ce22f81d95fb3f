# SPDX-License-Identifier: MIT OR Apache-2.0
"""The compiled parts of the benchmarks: loops around driver calls, and a launcher in Cython."""

import ctypes
import functools
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["alloc_loop", "c_loop", "embedded"]

HERE = Path(__file__).resolve().parent


def c_loop(launch: Any, function: int, block: int, stream: int, values: Sequence[Any]) -> Callable[[int], float]:
    """A function of n that calls ``launch``, the driver's cuLaunchKernel, n times and returns nanoseconds a call.

    ``values`` are the kernel's arguments as ctypes values. RuntimeError, if the driver refuses the launch.
    """
    pointers = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(value) for value in values])
    head = launch, ctypes.c_void_p(function), ctypes.c_uint(block), ctypes.c_void_p(stream), pointers
    loop = _driver_loops().driver_loop
    loop.restype = ctypes.c_double

    def run(n: int, _alive: object = values) -> float:
        ns: float = loop(*head, n)
        if ns < 0:
            raise RuntimeError(f"cuLaunchKernel: driver error {-ns:.0f}")
        return ns

    return run


def alloc_loop(alloc: Any, free: Any, nbytes: int, n: int) -> tuple[float, float]:
    """Nanoseconds of an allocation of ``nbytes`` and of its free, by the driver's cuMemAlloc and cuMemFree, ``n`` of
    each. RuntimeError, if the driver refuses one."""
    ptrs, ns = (ctypes.c_ulonglong * n)(), (ctypes.c_double * 2)()
    error = _driver_loops().alloc_loop(alloc, free, ctypes.c_size_t(nbytes), ptrs, n, ns)
    if error:
        raise RuntimeError(f"cuMemAlloc or cuMemFree: driver error {error}")
    return ns[0], ns[1]


@functools.cache
def embedded() -> ModuleType:
    """``embedded.pyx``, compiled against the installed metrale."""
    with tempfile.TemporaryDirectory() as folder:
        unit, library = Path(folder) / "embedded.cpp", Path(folder) / "embedded.so"
        # From there, so that an installed metrale is cimported and not the sources of the current folder.
        _run(sys.executable, "-m", "cython", "--cplus", HERE / "embedded.pyx", "-o", unit, cwd=folder)
        _compile(unit, library, f"-I{sysconfig.get_path('include')}")
        spec = importlib.util.spec_from_file_location("embedded", library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@functools.cache
def _driver_loops() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "driver_loop.so"
        _compile(HERE / "driver_loop.cpp", library)
        return ctypes.CDLL(str(library))


def _compile(source: Path, library: Path, *flags: str) -> None:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    _run(*compiler, "-std=c++17", "-O2", "-shared", "-fPIC", *flags, source, "-o", library)


def _run(*command: str | Path, cwd: str | None = None) -> None:
    """RuntimeError with the last of what a command says that fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{command[0]} failed: {said[-1] if said else f'exit status {done.returncode}'}")
