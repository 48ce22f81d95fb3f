// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Activations for products on the int8 tensor cores: blocks of 128 values in 144 bytes, a 16-byte header and
// int8 q[128], value = d * q.
//
//     D4     {f32 d[4]}               a scale for each 32 values
//     D2S6   {f16 d[2]; f16 sum[6]}   a scale for each 64, and d * sum(q) of the first six groups of 16
//
// The blocks of M rows of K values lie [ceil256(K) / 128][ceil128(M)]; values beyond K and rows beyond M are
// 0.
#pragma once

#include <cuda_bf16.h>

#include "common/q8_1.cuh"

namespace metrale {

constexpr uint32_t MMQ_VALUES = 128;
constexpr uint32_t MMQ_BYTES = 144;
constexpr uint32_t MMQ_HEADER = 16;
constexpr uint32_t MMQ_ROWS = 128; // what rows are padded to

__device__ __forceinline__ uint64_t mmq_padded(uint32_t rows) {
    return (static_cast<uint64_t>(rows) + MMQ_ROWS - 1) / MMQ_ROWS * MMQ_ROWS;
}

// The most of a value among `lanes` neighbours.
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_WARP, x, offset);
        x = other > x ? other : x;
    }
    return x;
}

// A warp quantises one block, lane l holding the values 4 * l .. + 3, `LANES` lanes sharing a scale. Returns
// that scale in f32; the lane's four ints go to the block. Rounding and what is not finite as in q8_1.
template <int LANES>
__device__ __forceinline__ float mmq_quantise(const float (&x)[4], uint8_t* block, uint32_t& packed) {
    uint32_t amax_bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t bits = bits_from_float(x[i]) & 0x7fffffffu; // as integers, NaN > infinity > finite
        amax_bits = bits > amax_bits ? bits : amax_bits;
    }
    amax_bits = max_of_lanes(amax_bits, LANES);
    const bool finite = amax_bits < F32_INF_BITS;
    const float d = finite ? float_from_bits(amax_bits) / 127.0f : float_from_bits(F32_NAN_BITS);
    packed = 0;
    if (finite && amax_bits != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            packed |= (static_cast<uint32_t>(static_cast<int>(roundf(x[i] / d))) & 0xffu) << 8 * i;
    }
    reinterpret_cast<uint32_t*>(block + MMQ_HEADER)[threadIdx.x % WARP] = packed;
    return d;
}

__device__ __forceinline__ void mmq_store_d4(const float (&x)[4], uint8_t* block) {
    uint32_t packed;
    const float d = mmq_quantise<8>(x, block, packed);
    const uint32_t lane = threadIdx.x % WARP;
    if (lane % 8 == 0)
        reinterpret_cast<float*>(block)[lane / 8] = d;
}

// d * sum(q) of a group of 16, with the scale as it is stored.
__device__ __forceinline__ __half mmq_group_sum(__half d, int sum) {
    return __float2half_rn(__half2float(d) * static_cast<float>(sum));
}

__device__ __forceinline__ void mmq_store_d2s6(const float (&x)[4], uint8_t* block) {
    uint32_t packed;
    const __half d = __float2half_rn(mmq_quantise<16>(x, block, packed));
    const uint32_t lane = threadIdx.x % WARP;
    int sum = __dp4a(0x01010101, static_cast<int>(packed), 0);
    for (int offset = 2; offset > 0; offset /= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    __half* const header = reinterpret_cast<__half*>(block);
    if (lane % 16 == 0)
        header[lane / 16] = d;
    if (lane % 4 == 0 && lane / 4 < 6)
        header[2 + lane / 4] = mmq_group_sum(d, sum);
}

} // namespace metrale
