// SPDX-License-Identifier: MIT OR Apache-2.0
//
// C[n] = bf16(sum over k of A[k] * B[n, k]): A [K], B [N, K] row-major, C [N], all bf16. Any N, K and
// alignment, with one order of summation (common/gemv.cuh). Grid 1..ceil(N / 16), block 256.
#include "common/gemv.cuh"

using namespace metrale;

extern "C" __global__ void dense_gemv_bf16(const __nv_bfloat16* __restrict__ A,
                                           const __nv_bfloat16* __restrict__ B, __nv_bfloat16* __restrict__ C,
                                           uint32_t N, uint32_t K) {
    if (aligned16(A) && wide_rows(B, K))
        gemv<true>(A, Bf16Loader<true>{B, N, K}, C, N, K);
    else
        gemv<false>(A, Bf16Loader<false>{B, N, K}, C, N, K);
}
