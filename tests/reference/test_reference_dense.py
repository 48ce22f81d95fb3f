# SPDX-License-Identifier: MIT OR Apache-2.0
import numpy as np

from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.dense import dense_gemm, dense_gemv


def test_gemm_multiplies_rows_by_rows():
    rng = np.random.default_rng(1)
    a, b = bf16_bits(rng.standard_normal((3, 8))), bf16_bits(rng.standard_normal((5, 8)))
    c = dense_gemm(a, b)
    for m in range(3):
        for n in range(5):
            terms = [float(x) * float(y) for x, y in zip(bf16_values(a)[m], bf16_values(b)[n], strict=True)]
            np.testing.assert_allclose(c[m, n], sum(terms), rtol=1e-12, atol=1e-12)


def test_gemv_is_gemm_of_one_row():
    rng = np.random.default_rng(2)
    a, b = bf16_bits(rng.standard_normal(8)), bf16_bits(rng.standard_normal((5, 8)))
    np.testing.assert_allclose(dense_gemv(a, b), dense_gemm(a[None], b)[0], rtol=1e-12)
