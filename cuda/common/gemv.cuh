// SPDX-License-Identifier: MIT OR Apache-2.0
//
// One bf16 row times a matrix on the tensor cores: out[n] = bf16(sum over k of W[n, k] * x[k]).
//
// A block does 16 rows at a time; warp v takes the spans v, v + 8, ... of 256 k. Within a span the lane with
// g = lane / 4, t = lane % 4 holds of its rows g and g + 8 the eight weights at k = 32 * step + 8t, 16 bytes
// a row, and feeds them to two mma in halves. x is column 0 of the right-hand side and is cut the same way,
// so each product meets its partner whatever k the instruction calls them. The two mma have an accumulator
// each; the two are added, then the warps' sums in order. The bits depend on nothing else: where the 16 bytes
// come from is the loader's business, a struct with
//
//     struct Span;                                        what a lane holds of its rows over 256 k
//     Span fetch(n, k);                                   first row and first k; zeros beyond the matrix
//     uint4 weights(const Span&, int step, int half);     eight bf16 of row n + g + 8 * half
#pragma once

#include "common/mma.cuh"
#include "common/vec8.cuh"
#include "common/warp.cuh"

namespace metrale {

constexpr uint32_t GEMV_ROWS = 16;
constexpr uint32_t GEMV_SPAN = 256;
constexpr int GEMV_STEPS = GEMV_SPAN / 32;
constexpr uint32_t GEMV_WARPS = 8;

// Grid: any number of blocks. Block: GEMV_WARPS warps.
template <bool WIDE, class Loader>
__device__ __forceinline__ void gemv(const __nv_bfloat16* __restrict__ x, const Loader& loader,
                                     __nv_bfloat16* __restrict__ out, uint32_t N, uint32_t K) {
    __shared__ float partial[GEMV_WARPS][GEMV_ROWS];
    const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    for (uint32_t n = blockIdx.x * GEMV_ROWS; n < N; n += gridDim.x * GEMV_ROWS) {
        float even[4] = {}, odd[4] = {};
        for (uint32_t k = warp * GEMV_SPAN; k < K; k += GEMV_WARPS * GEMV_SPAN) {
            const typename Loader::Span span = loader.fetch(n, k);
#pragma unroll
            for (int step = 0; step < GEMV_STEPS; ++step) {
                const uint4 a = loader.weights(span, step, 0), a8 = loader.weights(span, step, 1);
                uint4 b = {0, 0, 0, 0};
                if (g == 0)
                    b = load_bf16x8<WIDE>(x, k + 32 * step + 8 * t, K);
                mma_m16n8k16_bf16(even, {a.x, a8.x, a.y, a8.y}, {b.x, b.y});
                mma_m16n8k16_bf16(odd, {a.z, a8.z, a.w, a8.w}, {b.z, b.w});
            }
        }
        if (t == 0) { // column 0
            partial[warp][g] = even[0] + odd[0];
            partial[warp][g + 8] = even[2] + odd[2];
        }
        __syncthreads();
        if (threadIdx.x < GEMV_ROWS && n + threadIdx.x < N) {
            float sum = 0.0f;
            for (uint32_t v = 0; v < GEMV_WARPS; ++v)
                sum += partial[v][threadIdx.x];
            out[n + threadIdx.x] = __float2bfloat16_rn(sum);
        }
        __syncthreads();
    }
}

// Weights in bf16, row-major.
template <bool WIDE>
struct Bf16Loader {
    const __nv_bfloat16* W;
    uint32_t N, K;

    struct Span {
        uint4 rows[2][GEMV_STEPS];
    };

    __device__ __forceinline__ Span fetch(uint32_t n, uint32_t k) const {
        const uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        Span span = {};
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t row = n + g + 8 * half;
            if (row >= N)
                continue;
            const __nv_bfloat16* p = W + static_cast<uint64_t>(row) * K;
#pragma unroll
            for (int step = 0; step < GEMV_STEPS; ++step)
                span.rows[half][step] = load_bf16x8<WIDE>(p, k + 32 * step + 8 * t, K);
        }
        return span;
    }

    __device__ __forceinline__ uint4 weights(const Span& span, int step, int half) const {
        return span.rows[half][step];
    }
};

} // namespace metrale
