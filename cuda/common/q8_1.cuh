// SPDX-License-Identifier: MIT OR Apache-2.0
//
// q8_1: 32 values in 36 bytes, {f16 d; f16 sum of the inputs; int8 q[32]}, value = d * q.
#pragma once

#include <cuda_fp16.h>

#include "common/math.cuh"
#include "common/warp.cuh"

namespace metrale {

constexpr uint32_t Q8_1_VALUES = 32;
constexpr uint32_t Q8_1_BYTES = 36;

__device__ __forceinline__ float f32_from_f16(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

__device__ __forceinline__ float q8_1_scale(const uint8_t* block) {
    return f32_from_f16(*reinterpret_cast<const uint16_t*>(block));
}

// Four ints, values 4 * word .. + 3.
__device__ __forceinline__ int q8_1_ints(const uint8_t* block, uint32_t word) {
    return *reinterpret_cast<const int32_t*>(block + 4 + 4 * word);
}

// A warp quantises one block, lane l holding value l. d = amax / 127, q = round(x / d), half away from zero;
// a block with a NaN or an infinity gets d = NaN and zeros, one of zeros (of either sign) 36 zero bytes.
__device__ __forceinline__ void q8_1_store(float x, uint8_t* block) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t amax_bits =
        warp_max(bits_from_float(x) & 0x7fffffffu); // as integers, NaN > infinity > finite
    const float added = warp_sum(x);
    const bool finite = amax_bits < F32_INF_BITS;
    const float d = finite ? float_from_bits(amax_bits) / 127.0f : float_from_bits(F32_NAN_BITS);
    const bool zeros = !finite || amax_bits == 0;
    const float q = zeros ? 0.0f : roundf(x / d);
    reinterpret_cast<int8_t*>(block)[4 + lane] = static_cast<int8_t>(q);
    if (lane == 0) {
        const uint32_t d_bits = __half_as_ushort(__float2half_rn(d));
        const uint32_t sum_bits = __half_as_ushort(__float2half_rn(amax_bits == 0 ? 0.0f : added));
        *reinterpret_cast<uint32_t*>(block) = d_bits | sum_bits << 16;
    }
}

} // namespace metrale
