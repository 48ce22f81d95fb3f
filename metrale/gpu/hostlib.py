# SPDX-License-Identifier: MIT OR Apache-2.0
"""Host kernel libraries: the package's own, and one made from a user's ``.cu`` file."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from metrale.errors import CompileError, MetraleError
from metrale.gpu import cache, sources

__all__ = ["build_tool", "compile", "default_library"]

LIBRARY_NAME = "libmetrale_host.so"


def default_library() -> str:
    """The library with the package's kernels; ``METRALE_HOST_LIBRARY`` names another, such as a sanitizer build."""
    override = os.environ.get("METRALE_HOST_LIBRARY")
    if override:
        return override
    from metrale.gpu import host  # it knows where compiled parts were put, also in an editable install

    path = Path(host.__file__).parent / LIBRARY_NAME
    if not path.exists():
        raise MetraleError(f"host kernels: {path} is missing: the installation is incomplete")
    return str(path)


def build_tool() -> ModuleType:
    """``cuda/host/build.py`` as a module: the only place that knows how host kernels are compiled."""
    path = sources.CUDA_DIR / "host" / "build.py"
    spec = importlib.util.spec_from_file_location("metrale_host_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile(path: str) -> str:
    """Compile a user's ``.cu`` file for the host, through the cache; returns the library's path."""
    tool, source = build_tool(), Path(path)
    source.stat()  # of a file that is not there, the error is the system's own
    options = {"include": [source.resolve().parent, sources.CUDA_DIR]}
    try:
        name = f"{source.stem}-host-{tool.fingerprint(source, **options)}.so"
        library = cache.file(name)
        if library is None:
            with cache.reserve(name) as temporary:
                tool.build([source], temporary, **options)
            library = cache.folder() / name
    except tool.BuildError as error:
        raise CompileError(f"{source.name} does not compile for the host", str(error)) from error
    return str(library)
