// SPDX-License-Identifier: MIT OR Apache-2.0
//
// f32 functions that give the same bits on a GPU, in the host kernels and in plain C++: every step is one
// IEEE operation or one fmaf. They rely on a build without floating-point contraction.
#pragma once

#include "common/types.cuh"

#ifdef __CUDACC__
#define METRALE_BOTH __host__ __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define METRALE_BOTH inline
#endif

namespace metrale {

METRALE_BOTH float float_from_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

METRALE_BOTH uint32_t bits_from_float(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

constexpr uint32_t F32_INF_BITS = 0x7f800000u, F32_NAN_BITS = 0x7fc00000u;

METRALE_BOTH bool is_finite(float x) { return (bits_from_float(x) & F32_INF_BITS) != F32_INF_BITS; }

// 2^n for a normal result.
METRALE_BOTH float exp2_int(int n) { return float_from_bits(static_cast<uint32_t>(127 + n) << 23); }

constexpr float LN2_HI = 0.693147182f, LN2_LO = -1.90465421e-9f; // their sum is ln 2 to 48 bits

// e^x within 1 ulp, subnormal results within 1 of their last place.
METRALE_BOTH float exp_f32(float x) {
    if (x != x)
        return x;
    x = x > 90.0f ? 90.0f : x < -105.0f ? -105.0f : x; // beyond these the result is infinity, or 0
    constexpr float ROUND = 12582912.0f;               // 1.5 * 2^23: adding it leaves no fraction bits
    const float n = (x * 1.44269504f + ROUND) - ROUND;
    const float r = fmaf(n, -LN2_LO, fmaf(n, -LN2_HI, x)); // |r| <= ln2 / 2
    float p = 1.0f / 5040;                                 // Taylor: the first term left out is under 2^-27
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    const int e = static_cast<int>(n), half = e / 2; // in two steps: 2^e alone may overflow or be subnormal
    return p * exp2_int(half) * exp2_int(e - half);
}

// log(1 + x) within 1.5 ulp for finite x >= 0: 1 + x = 2^e * (1 + f), and log(1 + f) = f - s * (f - tail)
// with s = f / (2 + f), from the series of 2 * atanh(s).
METRALE_BOTH float log1p_f32(float x) {
    constexpr uint32_t SQRT_HALF_BITS = 0x3f3504f3u; // 1 + f lies in [sqrt(1/2), sqrt(2))
    const int e = static_cast<int>((bits_from_float(1.0f + x) - SQRT_HALF_BITS) >> 23);
    const float f = fmaf(x, exp2_int(-e), exp2_int(-e) - 1.0f);
    const float s = f / (2.0f + f), z = s * s;
    float tail = 2.0f / 9;
    tail = fmaf(tail, z, 2.0f / 7);
    tail = fmaf(tail, z, 2.0f / 5);
    tail = fmaf(tail, z, 2.0f / 3);
    const float log1p_f = fmaf(-s, fmaf(-tail, z, f), f);
    const float n = static_cast<float>(e);
    return fmaf(n, LN2_HI, fmaf(n, LN2_LO, log1p_f));
}

METRALE_BOTH float silu(float x) { return x / (1.0f + exp_f32(-x)); }

} // namespace metrale
