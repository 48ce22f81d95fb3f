# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where CUDA's headers and NVRTC lie: NVIDIA's wheels, then conda's packages, then a toolkit.

It imports nothing of the package, since cuda/host/build.py uses it before there is one, and nothing that is slow:
a kernel that comes from the cache needs it too.
"""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["HOST_HEADERS", "NVRTC_HEADERS", "HeadersMissing", "include_folders", "nvrtc_library"]

# A header that sources need, and the wheel that has it. NVRTC brings nv/target along.
NVRTC_HEADERS = {"cuda_bf16.h": "nvidia-cuda-runtime", "crt/host_defines.h": "nvidia-cuda-crt"}
HOST_HEADERS = {**NVRTC_HEADERS, "nv/target": "nvidia-cuda-cccl"}


class HeadersMissing(Exception):
    """No place has all the headers asked for; the message says what to install."""


def include_folders(headers: Mapping[str, str], given: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders of CUDA's headers: the one given, else those of the first place that has all of ``headers``."""
    candidates = [Path(given)] if given else [root / "include" for root in _roots()]
    incomplete = []
    for folder in candidates:
        folders = [folder, folder / "cccl"] if (folder / "cccl").is_dir() else [folder]
        absent = [header for header in headers if not any((path / header).is_file() for path in folders)]
        if not absent:
            return folders
        if (folder / "cuda_bf16.h").is_file():
            wheel = headers[absent[0]]
            incomplete.append(f"{folder} lacks {absent[0]}: pip install {wheel} (of the same CUDA version)")
    if incomplete:
        raise HeadersMissing("\n".join(incomplete))
    where = ", ".join(map(str, candidates)) or "no wheel on sys.path, and no toolkit"
    raise HeadersMissing(
        f"CUDA's headers are missing ({where}): pip install {' '.join(headers.values())}, or set CUDA_HOME"
    )


def nvrtc_library() -> Path | None:
    """The NVRTC library that ``cuda.core`` loads; None if it is in none of the usual places."""
    candidates = (root / folder / "libnvrtc.so.13" for root in _roots() for folder in ("lib", "lib64"))
    return next((path for path in candidates if path.exists()), None)


def _roots() -> Iterator[Path]:
    conda, machine = os.environ.get("CONDA_PREFIX"), platform.machine()
    target = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(machine, f"{machine}-linux")
    yield from (root for entry in sys.path if entry and (root := Path(entry) / "nvidia" / "cu13").is_dir())
    for name in (
        conda and f"{conda}/targets/{target}",
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        "/usr/local/cuda",
    ):
        if name and Path(name).is_dir():
            yield Path(name)
