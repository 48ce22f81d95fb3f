# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale kernels``."""

from collections.abc import Sequence

from metrale.gpu import cubin, sources

__all__ = ["build"]


def build(archs: Sequence[str], modules: Sequence[str]) -> int:
    """Compile ``modules`` (all if empty) for each of ``archs`` into the cache."""
    for arch in archs:
        for module in modules or sources.modules():
            code = cubin.cubin(sources.source_path(module), arch)
            print(f"{module:<16} {arch:<8} {len(code):>9,} bytes")
    return 0
