# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dense products of bf16 matrices."""

import numpy as np
import numpy.typing as npt

from metrale.reference.bf16 import bf16_values

__all__ = ["dense_gemm", "dense_gemv"]

Bits = npt.NDArray[np.uint16]


def dense_gemm(a: Bits, b: Bits) -> npt.NDArray[np.float64]:
    """`C[m, n] = sum_k A[m, k] * B[n, k]` for bf16 bits `a` `[M, K]` and `b` `[N, K]`; float64 `[M, N]`."""
    return bf16_values(a) @ bf16_values(b).T


def dense_gemv(a: Bits, b: Bits) -> npt.NDArray[np.float64]:
    """`C[n] = sum_k A[k] * B[n, k]` for bf16 bits `a` `[K]` and `b` `[N, K]`; float64 `[N]`."""
    return bf16_values(b) @ bf16_values(a)
