// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Reductions over a warp, in one order for all kernels, and loops over rows that the compiler can unroll.
#pragma once

#include "common/types.cuh"

namespace metrale {

constexpr uint32_t WARP = 32;
constexpr uint32_t FULL_WARP = 0xffffffffu;

// Sum over the lanes by the xor tree 16, 8, 4, 2, 1; every lane gets it.
__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_WARP, x, offset);
        x = other > x ? other : x;
    }
    return x;
}

// A number of activation rows, as a type.
template <int N>
struct Rows {
    static constexpr int value = N;
};

// body(Rows<M>()) for M in 1..8, the rows that share a pass over the weights of a GEMV: what is kept for each
// row then lives in registers.
template <class Body>
__device__ __forceinline__ void with_rows(uint32_t M, Body body) {
    switch (M) {
    case 1:
        return body(Rows<1>());
    case 2:
        return body(Rows<2>());
    case 3:
        return body(Rows<3>());
    case 4:
        return body(Rows<4>());
    case 5:
        return body(Rows<5>());
    case 6:
        return body(Rows<6>());
    case 7:
        return body(Rows<7>());
    case 8:
        return body(Rows<8>());
    }
}

} // namespace metrale
