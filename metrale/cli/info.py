# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale info``."""

import platform
from importlib import metadata
from typing import Any

import metrale
from metrale.cli.json_text import print_json
from metrale.errors import MetraleError
from metrale.gpu import cache, cubin, sources

__all__ = ["info"]

PACKAGES = ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "numpy")


def info(*, as_json: bool) -> int:
    """Print what there is to run on."""
    facts = _facts()
    if as_json:
        print_json(facts)
        return 0
    print(f"metrale {facts['metrale']}, Python {facts['python']}, {facts['platform']}")
    for backend in facts["backends"]:
        print(f"{backend.pop('kind'):<9}{', '.join(f'{k} {v}' if k != 'name' else v for k, v in backend.items())}")
    print(f"packages {', '.join(f'{k} {v}' for k, v in facts['packages'].items())}")
    print(f"nvrtc    {facts['nvrtc'] or 'not found'}")
    print(f"modules  {', '.join(facts['modules'])}")
    print(f"cache    {facts['cache']}")
    return 0


def _facts() -> dict[str, Any]:
    return {
        "metrale": metrale.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backends": [*_cuda_devices(), _host()],
        "packages": {name: _version(name) for name in PACKAGES},
        "nvrtc": str(cubin.nvrtc_library() or ""),
        "modules": sources.modules(),
        "cache": _cache(),
    }


def _cuda_devices() -> list[dict[str, Any]]:
    try:
        from metrale.gpu.cuda import CudaBackend, device_count

        devices = []
        for ordinal in range(device_count()):
            with CudaBackend(ordinal) as gpu:
                driver = f"{gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}"
                memory = f"{gpu.free_memory / 2**30:.1f} of {gpu.total_memory / 2**30:.1f} GiB free"
                devices.append(
                    {
                        "kind": "cuda",
                        "name": gpu.name,
                        "device": ordinal,
                        "arch": gpu.arch,
                        "SMs": gpu.sm_count,
                    }
                    | {"driver API": driver, "memory": memory}
                )
        return devices or [{"kind": "cuda", "name": "no device"}]
    except (ImportError, MetraleError) as error:
        return [{"kind": "cuda", "name": f"not usable: {error}"}]


def _host() -> dict[str, Any]:
    try:
        with metrale.open("host") as gpu:
            return {"kind": "host", "name": gpu.name}
    except (ImportError, MetraleError) as error:
        return {"kind": "host", "name": f"not usable: {error}"}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cache() -> str:
    try:
        count, nbytes = cache.usage()
        return f"{cache.folder()}: {count} entries, {nbytes:,} bytes"
    except (MetraleError, OSError) as error:
        return f"not usable: {error}"
