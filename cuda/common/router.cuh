// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The router's order of summation, for every kernel that forms router logits, in f32:
//
//     C[m, n] = sum over k of A[m, k] * B[n, k]
//
// Lane l of a warp takes k = 256 * i + 8 * l + j, j inner, and adds one product at a time, rounded before it
// is added, so that products may be formed anywhere; then the xor tree over the lanes.
#pragma once

#include "common/vec8.cuh"
#include "common/warp.cuh"

namespace metrale {

constexpr uint32_t ROUTER_SPAN = 8 * WARP; // k a warp takes at a time

// acc[m] += the lane's share of row n of B times row m of A.
template <bool WIDE, int M>
__device__ __forceinline__ void router_row(const __nv_bfloat16* __restrict__ A,
                                           const __nv_bfloat16* __restrict__ row, uint32_t K,
                                           float (&acc)[M]) {
#pragma unroll(M <= 2 ? 4 : 1) // several 16-byte loads in flight
    for (uint32_t k = threadIdx.x % WARP * 8; k < K; k += ROUTER_SPAN) {
        const F32x8 b = unpack_bf16x8(load_bf16x8<WIDE>(row, k, K));
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const F32x8 a = unpack_bf16x8(load_bf16x8<WIDE>(A + static_cast<uint64_t>(m) * K, k, K));
#pragma unroll
            for (int j = 0; j < 8; ++j)
                acc[m] = acc[m] + a.v[j] * b.v[j];
        }
    }
}

// One warp: C[m, n] for all M rows.
template <bool WIDE>
__device__ __forceinline__ void router_output(const __nv_bfloat16* __restrict__ A,
                                              const __nv_bfloat16* __restrict__ B, float* __restrict__ C,
                                              uint32_t n, uint32_t M, uint32_t N, uint32_t K) {
    with_rows(M, [&](auto rows) {
        constexpr int ROWS = decltype(rows)::value;
        float acc[ROWS] = {};
        router_row<WIDE>(A, B + static_cast<uint64_t>(n) * K, K, acc);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const float sum = warp_sum(acc[m]);
            if (threadIdx.x % WARP == 0)
                C[static_cast<uint64_t>(m) * N + n] = sum;
        }
    });
}

constexpr uint32_t PRODUCTS_WARPS = 8;
constexpr uint32_t PRODUCTS_CHUNK = PRODUCTS_WARPS * ROUTER_SPAN; // k staged at a time

// One block of PRODUCTS_WARPS warps: the same, every warp multiplying, warp m adding for row m. products
// [M][PRODUCTS_CHUNK], shared: span i of the chunk keeps product j of lane l at [i][j][l].
template <bool WIDE>
__device__ __forceinline__ void router_output_staged(const __nv_bfloat16* __restrict__ A,
                                                     const __nv_bfloat16* __restrict__ B,
                                                     float* __restrict__ C, float* __restrict__ products,
                                                     uint32_t n, uint32_t M, uint32_t N, uint32_t K) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float acc = 0.0f;
    for (uint32_t first = 0; first < K; first += PRODUCTS_CHUNK) {
        const uint32_t k = first + warp * ROUTER_SPAN + lane * 8;
        const F32x8 b = unpack_bf16x8(load_bf16x8<WIDE>(B + static_cast<uint64_t>(n) * K, k, K));
        for (uint32_t m = 0; m < M; ++m) {
            const F32x8 a = unpack_bf16x8(load_bf16x8<WIDE>(A + static_cast<uint64_t>(m) * K, k, K));
            float* p = products + m * PRODUCTS_CHUNK + warp * ROUTER_SPAN + lane;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                p[j * WARP] = a.v[j] * b.v[j];
        }
        __syncthreads();
        if (warp < M) {
            const float* p = products + warp * PRODUCTS_CHUNK + lane;
#pragma unroll 8
            for (uint32_t i = 0; i < PRODUCTS_CHUNK; i += WARP)
                acc = acc + p[i];
        }
        __syncthreads();
    }
    const float sum = warp_sum(acc);
    if (warp < M && lane == 0)
        C[static_cast<uint64_t>(warp) * N + n] = sum;
}

} // namespace metrale
