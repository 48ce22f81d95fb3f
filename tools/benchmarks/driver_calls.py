# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls of ``cuda.bindings.driver``, which return their status first."""

from typing import Any

from cuda.bindings import driver

__all__ = ["check"]


def check(result: tuple[Any, ...]) -> Any:
    """The result's value, or RuntimeError for a status that is not success."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"driver: {result[0]}")
    return result[1] if len(result) > 1 else None
