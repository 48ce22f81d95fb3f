// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What CUDA's half and bfloat16 headers declare for its own compilers only. The rest works under any.
#pragma once

#include "intrinsics.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// In double the product is exact, and the sum rounded far below the result's last bit.
inline __half __hfma(__half a, __half b, __half c) {
    return __double2half(double(__half2float(a)) * __half2float(b) + __half2float(c));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16(double(__bfloat162float(a)) * __bfloat162float(b) + __bfloat162float(c));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

inline __half hexp(__half x) { return __float2half_rn(expf(__half2float(x))); }
inline __half hrsqrt(__half x) { return __float2half_rn(1.0f / sqrtf(__half2float(x))); }
inline __nv_bfloat16 hexp(__nv_bfloat16 x) { return __float2bfloat16_rn(expf(__bfloat162float(x))); }
inline __nv_bfloat16 hrsqrt(__nv_bfloat16 x) {
    return __float2bfloat16_rn(1.0f / sqrtf(__bfloat162float(x)));
}

inline int __half2int_rn(__half x) { return __float2int_rn(__half2float(x)); }
