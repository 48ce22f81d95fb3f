# SPDX-License-Identifier: MIT OR Apache-2.0
"""``y += a * x`` on the device: a package of its own that launches its kernel through metrale."""

from pathlib import Path

from saxpy_demo.launcher import RunningSum, repeat, saxpy, saxpy_rows

__all__ = ["RunningSum", "kernel", "repeat", "saxpy", "saxpy_rows"]


def kernel(gpu):
    """The kernel, on the backend ``gpu``."""
    if not gpu.has_module("saxpy"):
        gpu.add_module(Path(__file__).with_name("saxpy.cu"))
    return gpu.kernel("saxpy", "saxpy")
