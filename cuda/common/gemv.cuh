// SPDX-License-Identifier: MIT OR Apache-2.0
//
// One bf16 row times a matrix on the tensor cores: out[n] = bf16(sum over k of W[n, k] * x[k]). What its
// forms have in common is the order of the sum, and so the bits.
//
// A block does 16 rows at a time; warp v takes the spans v, v + 8, ... of 256 k. A span has eight steps, two
// for each p in 0..3; in a step the lane with g = lane / 4, t = lane % 4 holds of its rows g and g + 8 the
// eight weights from gemv_k(step, t) on, and feeds them to two mma in halves. x is column 0 of the right-hand
// side and is cut the same way, so each product meets its partner whatever k the instruction calls them. The
// two mma have an accumulator each; the two are added, then the warps' sums in order.
//
// The 16 weights of a lane in two steps are a group of a Q2_K block, those of all steps the groups that share
// bytes.
#pragma once

#include "common/mma.cuh"
#include "common/vec8.cuh"
#include "common/warp.cuh"

namespace metrale {

constexpr uint32_t GEMV_ROWS = 16;
constexpr uint32_t GEMV_SPAN = 256;
constexpr int GEMV_STEPS = GEMV_SPAN / 32;
constexpr uint32_t GEMV_WARPS = 8;

// Of two steps the lanes of the upper half begin with the second eight, so that the four read from different
// banks.
__device__ __forceinline__ uint32_t gemv_k(uint32_t step, uint32_t t) {
    return 128 * (t / 2) + 32 * (step / 2) + 16 * (t % 2) + 8 * (step % 2 ^ t / 2);
}

// What a warp has summed of a column of 16 rows.
struct GemvSums {
    float even[4] = {}, odd[4] = {};

    // a, a8: eight weights of rows g and g + 8; b: the x that they meet, of which only the lanes of column 0
    // count.
    __device__ __forceinline__ void add(const uint4& a, const uint4& a8, const uint4& b) {
        mma_m16n8k16_bf16(even, {a.x, a8.x, a.y, a8.y}, {b.x, b.y});
        mma_m16n8k16_bf16(odd, {a.z, a8.z, a.w, a8.w}, {b.z, b.w});
    }

    // The warps' sums, added in order, to out[n .. n + 16). All warps of the block, which meet again before
    // the next.
    __device__ __forceinline__ void store(float (&partial)[GEMV_WARPS][GEMV_ROWS],
                                          __nv_bfloat16* __restrict__ out, uint32_t n, uint32_t N) const {
        const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
        if (threadIdx.x % 4 == 0) { // column 0
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
    }
};

} // namespace metrale
