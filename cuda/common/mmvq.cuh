// SPDX-License-Identifier: MIT OR Apache-2.0
//
// K-quant matrix times q8_1 rows, one warp a weight row:
//
//     out[m, n] = sum over k of W[n, k] * y[m, k],    W [N, K/256] blocks, y [M, K/32] q8_1 blocks, M in 1..8
//
// Half-warp h takes the blocks h, h + 2, ... Products and sums of ints are exact; a thread adds its blocks in
// order, then the lanes add by the xor tree. Nothing in that order depends on M, on the warps of a block or
// on the grid.
#pragma once

#include <cuda_bf16.h>

#include "common/kquant.cuh"

namespace metrale {

__device__ __forceinline__ void store_result(float* p, float x) { *p = x; }

__device__ __forceinline__ void store_result(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }

// Rows 0 .. of y, or those that `rows` lists.
struct RowsInOrder {
    __device__ __forceinline__ uint32_t operator()(uint32_t m) const { return m; }
};

struct RowsListed {
    const uint32_t* rows;
    __device__ __forceinline__ uint32_t operator()(uint32_t m) const { return rows[m]; }
};

// acc[m] += the lane's share of sum(row[k] * y[row_of(m), k]).
template <class Format, int M, class RowOf>
__device__ __forceinline__ void mmvq_row(const uint8_t* __restrict__ row, const uint8_t* __restrict__ y,
                                         uint32_t K, RowOf row_of, float (&acc)[M]) {
    const uint32_t lane = threadIdx.x % WARP, w = lane % KQUANT_THREADS;
    const uint8_t* y_row[M];
#pragma unroll
    for (int m = 0; m < M; ++m)
        y_row[m] = y + static_cast<uint64_t>(row_of(m)) * (K / Q8_1_VALUES * Q8_1_BYTES);
#pragma unroll(M <= 2 ? 2 : 1) // more loads in flight
    for (uint32_t b = lane / KQUANT_THREADS; b < K / KQUANT_VALUES; b += WARP / KQUANT_THREADS) {
        const typename Format::Share share = Format::load(row + static_cast<uint64_t>(b) * Format::BYTES, w);
        float scaled[M] = {}, mins[M] = {};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const QuantPart part = Format::part(share, s);
            const uint32_t at = (b * KQUANT_VALUES + kquant_first(w, s)) / Q8_1_VALUES * Q8_1_BYTES;
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const uint8_t* block = y_row[m] + at;
                const int q8 = q8_1_ints(block, w % 8);
                const float d8 = q8_1_scale(block);
                const int dot = __dp4a(static_cast<int>(part.q), q8, 0);
                scaled[m] = fmaf(d8, static_cast<float>(part.scale * dot), scaled[m]);
                if constexpr (Format::HAS_MIN) {
                    const int sum = __dp4a(0x01010101, q8, 0);
                    mins[m] = fmaf(d8, static_cast<float>(part.min * sum), mins[m]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            acc[m] = fmaf(share.d, scaled[m], acc[m]);
            if constexpr (Format::HAS_MIN)
                acc[m] = fmaf(-share.dmin, mins[m], acc[m]);
        }
    }
}

// Block x of the grid does the rows x * WARPS .. + WARPS - 1.
template <class Format, int WARPS, class Out, class RowOf = RowsInOrder>
__device__ __forceinline__ void mmvq(const uint8_t* __restrict__ W, const uint8_t* __restrict__ y,
                                     Out* __restrict__ out, uint32_t K, uint32_t N, uint32_t M,
                                     RowOf row_of = {}) {
    const uint32_t n = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (n >= N)
        return;
    const uint8_t* row = W + static_cast<uint64_t>(n) * (K / KQUANT_VALUES) * Format::BYTES;
    with_rows(M, [&](auto rows) {
        constexpr int ROWS = decltype(rows)::value;
        float acc[ROWS] = {};
        mmvq_row<Format>(row, y, K, row_of, acc);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const float sum = warp_sum(acc[m]);
            if (threadIdx.x % WARP == 0)
                store_result(out + static_cast<uint64_t>(m) * N + n, sum);
        }
    });
}

} // namespace metrale
