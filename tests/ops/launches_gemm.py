# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernels of module gemm as functions of NumPy arrays, as in launches.py."""

import numpy as np
from launches import BF16, Arrays

from metrale import ops

KERNELS = {"dense_gemm_bf16": BF16, "dense_gemm_bf16_tc_f32out": np.float32, "dense_gemm_bf16_f32out": np.float32}
"""And the dtype of each one's output."""


def dense_gemm(gpu, form, x, weight, shift=0):
    """`[M, N]` of bf16 `[M, K]` and `[N, K]`."""
    (m, k), n = x.shape, len(weight)
    with Arrays(gpu) as a:
        out = a.output((m, n), KERNELS[form], shift * (1 if KERNELS[form] is BF16 else 2))
        kernel = gpu.kernel("gemm", form)
        ops.dense_gemm(gpu, kernel, a.input(x, shift), a.input(weight, shift), out, m, n, k, None)
        return out.read()
