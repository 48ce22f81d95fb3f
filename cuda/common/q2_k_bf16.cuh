// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Q2_K weights rounded to bf16: bf16 of ggml's f32 value. A group of 16 has only four values, one for each q,
// and the products d * scale * q and dmin * min are exact in f32: a value is rounded in the subtraction and
// then to bf16.
#pragma once

#include <cuda_bf16.h>

#include "common/kquant.cuh"

namespace metrale {

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return __bfloat16_as_ushort(pair.x) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
}

// The four values of a group, as bf16: those of q = 0, 1 in x, of q = 2, 3 in y.
__device__ __forceinline__ uint2 q2_k_values(float d, float dmin, float scale, float min) {
    const float x = d * scale, z = dmin * min;
    return {bf16_pair(fmaf(x, 0.0f, -z), x - z), bf16_pair(fmaf(x, 2.0f, -z), fmaf(x, 3.0f, -z))};
}

// Bytes of y:x by the nibbles of a selector of which bit 3 is 0. __byte_perm would spend an instruction on
// that bit.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
#ifdef METRALE_HOST
    return __byte_perm(x, y, selector);
#else
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
    return bytes;
#endif
}

// The values of four weights, q in the low bits of each byte: a permutation of the group's bytes.
__device__ __forceinline__ uint2 q2_k_pick(const uint2& values, uint32_t q) {
    constexpr uint64_t EACH = 0x22, BASE = 0x10101010; // for each q the bytes 2 * q and 2 * q + 1
    const uint32_t low = q * EACH + BASE;
    // The upper half by a multiplication too, which leaves the pipe of shifts and permutations free.
    const uint32_t high = (q * (EACH << 16) + (BASE << 16)) >> 32;
    return {permute_bytes(values.x, values.y, low), permute_bytes(values.x, values.y, high)};
}

// Thread w of the KQUANT_THREADS of a block: its 16 weights to out bf16 [256], 8-byte aligned.
__device__ __forceinline__ void q2_k_block_to_bf16(const uint8_t* block, uint32_t w, __nv_bfloat16* out) {
    const Q2K::Share share = Q2K::load(block, w);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const QuantPart part = Q2K::part(share, s);
        const uint2 values =
            q2_k_values(share.d, share.dmin, static_cast<float>(part.scale), static_cast<float>(part.min));
        *reinterpret_cast<uint2*>(out + kquant_first(w, s)) = q2_k_pick(values, part.q);
    }
}

} // namespace metrale
