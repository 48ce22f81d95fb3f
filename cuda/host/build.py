#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiles CUDA kernel sources into one shared library that runs them on a CPU.

    python build.py -o libmetrale_host.so A.cu B.cu ...

The library holds the runtime too; abi.h is its interface, a source's file stem the module name of its
kernels. This is the only place that knows how: the wheel, the sanitizer builds and tests with kernels of their
own call it, as a program or as a module (`build`). It needs a C++17 compiler, CUDA's headers (no toolkit) and
nothing beyond the standard library.
"""

import argparse
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
RUNTIME = tuple(
    HERE / f"{name}.cpp" for name in ("block", "meetings", "combine", "fiber", "overflow", "shared", "launch")
)

FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a kernel's bits are those that it spells out
    "-fno-strict-aliasing",  # kernels load one type's bytes as another's, which CUDA's compilers allow
    "-fno-extern-tls-init",
    "-fstack-clash-protection",  # or a large frame would step over the guard at a stack's end
    "-Wall",
    "-Wno-unknown-pragmas",
)
# The library is never unloaded: its threads sleep in it.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,--build-id=none")


class BuildError(Exception):
    """What the build lacks, or what the compiler said."""


def build(
    sources: Iterable[str | os.PathLike],
    output: str | os.PathLike,
    *,
    cxx: str | None = None,
    cuda_include: str | os.PathLike | None = None,
    include: Iterable[str | os.PathLike] = (),
    sanitize: str = "",
    static_shared: bool = False,
    signatures: str | os.PathLike | None = None,
    depfile: str | os.PathLike | None = None,
    jobs: int | None = None,
) -> dict[str, dict[str, tuple[tuple[str, str], ...]]]:
    """Builds `output` from .cu files and returns `{module: {kernel: ((parameter, kind), ...)}}`.

    sanitize: a list for the compiler's -fsanitize. static_shared: shared memory is plain globals and one thread
    runs all blocks, for the address sanitizer, which does not watch thread-local arrays. signatures: a Python
    file to write with the returned value as KERNELS. depfile: a make file to write with what the library depends
    on.
    """
    units = {Path(source).stem: Path(source).resolve() for source in sources}
    compiler = find_compiler(cxx)
    flags = _flags(include, cuda_include, sanitize, static_shared)

    pool = ThreadPoolExecutor(jobs or os.cpu_count())
    with tempfile.TemporaryDirectory(prefix="metrale-") as folder, pool:
        scratch = Path(folder)

        def compile_unit(source: Path, origin: Path) -> Path:
            target = scratch / f"{source.stem}.o"
            _run(
                *(*compiler, *flags, "-c", source, "-o", target, "-MD", "-MF", target.with_suffix(".d")),
                # The library is the same wherever it is built.
                *(
                    f"-frandom-seed={source.stem}",
                    f"-ffile-prefix-map={scratch}/=",
                    f"-ffile-prefix-map={origin.parent}/=",
                ),
            )
            return target

        def compile_module(module: str, source: Path) -> tuple[Path, dict]:
            kernels = _kernels(compiler, flags, source)
            unit = scratch / f"{module}.host.cpp"
            unit.write_text(_unit(module, source, kernels))
            return compile_unit(unit, source), kernels

        modules = [pool.submit(compile_module, name, source) for name, source in units.items()]
        runtime = [pool.submit(compile_unit, source, source) for source in RUNTIME]
        try:
            compiled = [future.result() for future in modules]
            objects = [unit for unit, _ in compiled] + [future.result() for future in runtime]
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
        kernels = {name: parsed for name, (_, parsed) in zip(units, compiled, strict=True)}
        unfinished = scratch / "library"
        _run(*compiler, *flags, *LINK_FLAGS, *objects, "-o", unfinished)
        shutil.move(unfinished, output)
        if depfile:
            _write_depfile(Path(depfile), output, scratch)
    if signatures:
        Path(signatures).write_text(_signature_file(kernels))
    return kernels


def find_compiler(cxx: str | None = None) -> list[str]:
    """The compiler's command: the one given, else $CXX, else g++."""
    command = shlex.split(cxx or os.environ.get("CXX") or "g++")
    if not shutil.which(command[0]):
        raise BuildError(f"no C++ compiler: {command[0]!r} is not on the path (install g++, or give --cxx)")
    return command


def find_cuda_include(given: str | os.PathLike | None = None) -> list[Path]:
    """The folders of CUDA's headers: the one given, else the wheels', conda's or a toolkit's."""
    toolkit = _of_package("toolkit")
    try:
        return toolkit.include_folders(toolkit.HOST_HEADERS, given)
    except toolkit.HeadersMissing as error:
        raise BuildError(str(error)) from None


def fingerprint(source: str | os.PathLike, *, include: Iterable[str | os.PathLike] = ()) -> str:
    """Another one than before if `build` would make another library of a source: a digest of the text that the
    compiler sees, the compiler, this tool and the runtime."""
    compiler = find_compiler()
    digest = hashlib.sha256(shlex.join(compiler).encode() + _run(*compiler, "--version").encode())
    digest.update(_preprocess(compiler, _flags(include), Path(source)).encode())
    for path in (*sorted(path for path in HERE.iterdir() if path.is_file()), _package_path("signatures")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def sanitizer_environment(cxx: str | None = None) -> dict[str, str]:
    """What Python needs in its environment to load a library that is built with the address sanitizer."""
    compiler = find_compiler(cxx)
    # Preloaded, as Python is not built with it; and the C++ library, whose __cxa_throw it looks for as it starts.
    names = ("libasan.so", "libstdc++.so")
    libraries = (_run(*compiler, f"-print-file-name={name}").strip() for name in names)
    # Python leaks by intent; uses after return are found by moving variables off the stacks that are switched.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    return {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}


def _flags(
    include: Iterable[str | os.PathLike],
    cuda_include: str | os.PathLike | None = None,
    sanitize: str = "",
    static_shared: bool = False,
) -> list[str]:
    flags = [*FLAGS, *(("-O1", "-g", "-fno-omit-frame-pointer") if sanitize else ("-O2",))]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    if static_shared:
        flags.append("-DMETRALE_STATIC_SHARED")
    flags += [f"-I{path}" for path in (HERE.parent, HERE, *include)]
    return flags + [f"-isystem{path}" for path in find_cuda_include(cuda_include)]


def _preprocess(compiler: Sequence[str], flags: Sequence[str], source: Path) -> str:
    """A source with its headers and without its macros, but for those that its parameter lists are read by."""
    kept = ("-D__global__=__global__", "-DMETRALE_NULLABLE=METRALE_NULLABLE")
    options = ("-E", "-x", "c++", *kept, "-include", "metrale_host.h")
    return _run(*compiler, *flags, *options, source)


def _kernels(compiler: Sequence[str], flags: Sequence[str], source: Path) -> dict:
    signatures = _of_package("signatures")
    try:
        kernels = signatures.parse(_preprocess(compiler, flags, source))
    except signatures.SignatureError as error:
        raise BuildError(f"{source}: {error}") from None
    if not kernels:
        raise BuildError(f'{source} has no kernel (an extern "C" __global__ function)')
    return kernels


def _of_package(name: str) -> ModuleType:
    """A module of metrale/gpu, without importing the package, which need not be built."""
    spec = importlib.util.spec_from_file_location(f"metrale_{name}", _package_path(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _package_path(name: str) -> Path:
    for root in (HERE.parents[1] / "metrale", HERE.parents[1]):  # in the source tree; installed, the package holds us
        path = root / "gpu" / f"{name}.py"
        if path.is_file():
            return path
    raise BuildError(f"gpu/{name}.py of the package is not beside {HERE.parent}")


def _unit(module: str, source: Path, kernels: dict) -> str:
    """The translation unit of a module: its source as it stands, and its kernels' registration."""

    def listed(words: Iterable[str]) -> str:
        return "{" + ", ".join(f'"{word}"' for word in words) + "}"

    checks = entries = ""
    for kernel, parameters in kernels.items():
        kinds = listed(kind.removesuffix("?") for _, kind in parameters)
        names = listed(name for name, _ in parameters)
        checks += (
            f"static_assert(metrale::host::takes({kernel}, {kinds}),\n"
            f'              "{kernel}: its C++ signature differs from the parsed one");\n'
        )
        entries += f'    metrale::host::describe("{module}", "{kernel}", {kernel}, {names}),\n'
    return (
        f'#include "metrale_host.h"\n#include "registry.h"\n#include "{source}"\n\n{checks}\n'
        f"static const metrale::host::Registrar registrar({{\n{entries}}});\n"
    )


def _signature_file(kernels: dict) -> str:
    lines = [
        '"""Parameters of every kernel: {module: {kernel: ((name, kind), ...)}}. Written by cuda/host/build.py."""',
        "",
    ]
    lines.append("KERNELS = {")
    for module, entries in kernels.items():
        lines.append(f'    "{module}": {{')
        lines += [f'        "{name}": {parameters!r},' for name, parameters in entries.items()]
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def _write_depfile(depfile: Path, output: str | os.PathLike, scratch: Path) -> None:
    paths = set()
    for fragment in scratch.glob("*.d"):
        words = fragment.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        paths.update(word for word in words if not word.startswith(str(scratch)))
    depfile.write_text(f"{output}: " + " \\\n  ".join(sorted(paths)) + "\n")


def _run(*command: str | os.PathLike) -> str:
    words = [os.fspath(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(words)}\n{done.stderr.strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("sources", nargs="+", metavar="SOURCE.cu")
    parser.add_argument("-o", "--output", required=True, metavar="LIBRARY")
    parser.add_argument("--cxx", metavar="COMMAND", help="the C++ compiler (default: $CXX, else g++)")
    parser.add_argument("--cuda-include", metavar="DIR", help="CUDA's headers (default: the wheels', else a toolkit's)")
    parser.add_argument("-I", dest="include", action="append", default=[], metavar="DIR")
    parser.add_argument("--sanitize", default="", metavar="LIST", help="as in -fsanitize: address,undefined")
    parser.add_argument("--static-shared", action="store_true", help="for the address sanitizer")
    parser.add_argument("--signatures", metavar="FILE.py", help="write the kernels' parameters")
    parser.add_argument("--depfile", metavar="FILE", help="write what the library depends on")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: one a core)")
    try:
        build(**vars(parser.parse_args(arguments)))
    except BuildError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
