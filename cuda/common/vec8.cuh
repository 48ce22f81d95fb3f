// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Eight consecutive values of a row: one 16-byte access (two for f32) where alignment allows, else one by
// one. The values, and so the order of all arithmetic on them, are the same either way.
#pragma once

#include <cuda_bf16.h>

#include "common/math.cuh"

namespace metrale {

struct F32x8 {
    float v[8];
};

__device__ __forceinline__ bool aligned16(const void* p) { return reinterpret_cast<uint64_t>(p) % 16 == 0; }

// Whether rows of K values from base on can be read by load_bf16x8<true>.
__device__ __forceinline__ bool wide_rows(const __nv_bfloat16* base, uint32_t K) {
    return aligned16(base) && K % 8 == 0;
}

__device__ __forceinline__ uint32_t bf16_bits(const __nv_bfloat16* p, bool valid) {
    return valid ? __bfloat16_as_ushort(*p) : 0u;
}

// The bits of row[k .. k+8), zeros from K on.
template <bool WIDE>
__device__ __forceinline__ uint4 load_bf16x8(const __nv_bfloat16* row, uint32_t k, uint32_t K) {
    uint4 bits = {0, 0, 0, 0};
    if (k >= K)
        return bits;
    if constexpr (WIDE)
        return *reinterpret_cast<const uint4*>(row + k);
    const __nv_bfloat16* p = row + k;
    const uint32_t valid = K - k;
    bits.x = bf16_bits(p, true) | bf16_bits(p + 1, valid > 1) << 16;
    bits.y = bf16_bits(p + 2, valid > 2) | bf16_bits(p + 3, valid > 3) << 16;
    bits.z = bf16_bits(p + 4, valid > 4) | bf16_bits(p + 5, valid > 5) << 16;
    bits.w = bf16_bits(p + 6, valid > 6) | bf16_bits(p + 7, valid > 7) << 16;
    return bits;
}

__device__ __forceinline__ F32x8 unpack_bf16x8(const uint4& bits) {
    constexpr uint32_t HIGH = 0xffff0000u;
    return {{float_from_bits(bits.x << 16), float_from_bits(bits.x & HIGH), float_from_bits(bits.y << 16),
             float_from_bits(bits.y & HIGH), float_from_bits(bits.z << 16), float_from_bits(bits.z & HIGH),
             float_from_bits(bits.w << 16), float_from_bits(bits.w & HIGH)}};
}

// The same for arrays of n values that need not be rows: x[i .. i+8), zeros from n on.
__device__ __forceinline__ F32x8 load8(const __nv_bfloat16* x, uint32_t i, uint32_t n) {
    const bool wide = n - i >= 8 && aligned16(x + i);
    return unpack_bf16x8(wide ? load_bf16x8<true>(x, i, n) : load_bf16x8<false>(x, i, n));
}

__device__ __forceinline__ F32x8 load8(const float* x, uint32_t i, uint32_t n) {
    F32x8 r = {};
    if (n - i >= 8 && aligned16(x + i)) {
        const float4 lo = *reinterpret_cast<const float4*>(x + i),
                     hi = *reinterpret_cast<const float4*>(x + i + 4);
        return {{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
        if (i + j < n)
            r.v[j] = x[i + j];
    return r;
}

__device__ __forceinline__ void store8(__nv_bfloat16* x, uint32_t i, uint32_t n, const F32x8& r) {
    uint32_t bits[8];
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
        bits[j] = __bfloat16_as_ushort(__float2bfloat16_rn(r.v[j]));
    if (n - i >= 8 && aligned16(x + i)) {
        *reinterpret_cast<uint4*>(x + i) = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16,
                                            bits[4] | bits[5] << 16, bits[6] | bits[7] << 16};
        return;
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
        if (i + j < n)
            x[i + j] = __ushort_as_bfloat16(static_cast<uint16_t>(bits[j]));
}

__device__ __forceinline__ void store8(float* x, uint32_t i, uint32_t n, const F32x8& r) {
    if (n - i >= 8 && aligned16(x + i)) {
        *reinterpret_cast<float4*>(x + i) = {r.v[0], r.v[1], r.v[2], r.v[3]};
        *reinterpret_cast<float4*>(x + i + 4) = {r.v[4], r.v[5], r.v[6], r.v[7]};
        return;
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
        if (i + j < n)
            x[i + j] = r.v[j];
}

} // namespace metrale
