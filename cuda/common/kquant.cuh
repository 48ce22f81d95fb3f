// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The K-quant super-blocks of GGUF: 256 weights in 16 groups of 16, each group with a small integer scale
// (and, in Q2_K, a minimum):
//
//     weight = (d * scale) * q - dmin * min
//
// All three formats keep in one byte weights that are 32 apart, so one split of the work serves them: 16
// threads a block, thread w holds one 4-byte word of the packed quants and gets from it four parts s of four
// weights,
//
//     k     = 128 * (w / 8) + 32 * s + 4 * (w % 8) + {0, 1, 2, 3}
//     group =   8 * (w / 8) +  2 * s +     (w % 8) / 4             (= k / 16)
//
// A format is a struct with load(block, w), the thread's share of a block in registers, and part(share, s).
#pragma once

#include "common/q8_1.cuh"

namespace metrale {

constexpr uint32_t KQUANT_VALUES = 256;
constexpr uint32_t KQUANT_THREADS = 16; // share a block

struct QuantPart {
    uint32_t q; // four int8
    int scale, min;
};

__device__ __forceinline__ uint32_t kquant_first(uint32_t w, uint32_t s) {
    return 128 * (w / 8) + 32 * s + 4 * (w % 8);
}

__device__ __forceinline__ uint32_t load_u16(const uint8_t* p) {
    return *reinterpret_cast<const uint16_t*>(p);
}

__device__ __forceinline__ uint32_t load_u32(const uint8_t* p) {
    return *reinterpret_cast<const uint32_t*>(p);
}

// For blocks of Q3_K and Q6_K, which lie on even addresses.
__device__ __forceinline__ uint32_t load_u32_even(const uint8_t* p) {
    return load_u16(p) | load_u16(p + 2) << 16;
}

// x - offset in each byte, for bytes and an offset under 128.
__device__ __forceinline__ uint32_t subtract_bytes(uint32_t x, uint32_t offset) {
    return ((x | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
}

// {u8 scales[16]; u8 qs[64]; f16 d; f16 dmin}: scales hold the group's scale (low) and minimum (high nibble).
struct Q2K {
    static constexpr uint32_t BYTES = 84;
    static constexpr bool HAS_MIN = true;

    struct Share {
        uint32_t q, scales[2]; // scales[s / 2] has part s in its byte 2 * (s % 2)
        float d, dmin;
    };

    static __device__ __forceinline__ Share load(const uint8_t* block, uint32_t w) {
        const uint32_t half = w / 8, odd = w % 8 / 4;
        const uint32_t d_dmin = load_u32(block + 80);
        return {load_u32(block + 16 + 4 * w),
                {load_u32(block + 8 * half) >> 8 * odd, load_u32(block + 8 * half + 4) >> 8 * odd},
                f32_from_f16(d_dmin & 0xffff),
                f32_from_f16(d_dmin >> 16)};
    }

    static __device__ __forceinline__ QuantPart part(const Share& share, int s) {
        const uint32_t scale = share.scales[s / 2] >> 16 * (s % 2);
        return {share.q >> 2 * s & 0x03030303u, static_cast<int>(scale & 15),
                static_cast<int>(scale >> 4 & 15)};
    }
};

// {u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d}: q = two bits of qs + 4 * one bit of hmask - 4. Six-bit
// scales, offset 32: group g has its low nibble in scales[g % 8] and its high bits in scales[8 + g % 4].
struct Q3K {
    static constexpr uint32_t BYTES = 110;
    static constexpr bool HAS_MIN = false;

    struct Share {
        uint32_t q, high, low_scales[2], high_scales; // all shifted so that part() need not know the thread
        float d;
    };

    static __device__ __forceinline__ Share load(const uint8_t* block, uint32_t w) {
        const uint32_t half = w / 8, shift = 8 * (w % 8 / 4) + 4 * half;
        return {load_u32_even(block + 32 + 4 * w),
                load_u32_even(block + 4 * (w % 8)) >> 4 * half,
                {load_u32_even(block + 96) >> shift, load_u32_even(block + 100) >> shift},
                load_u32_even(block + 104) >> shift,
                f32_from_f16(load_u16(block + 108))};
    }

    // The four weights' q + 4, and their scale.
    static __device__ __forceinline__ uint32_t raised(const Share& share, int s) {
        return (share.q >> 2 * s & 0x03030303u) | (share.high >> s & 0x01010101u) << 2;
    }

    static __device__ __forceinline__ int scale(const Share& share, int s) {
        const uint32_t low = share.low_scales[s / 2] >> 16 * (s % 2) & 15;
        const uint32_t high = share.high_scales >> (16 * (s % 2) + 2 * (s / 2)) & 3;
        return static_cast<int>(low | high << 4) - 32;
    }

    static __device__ __forceinline__ QuantPart part(const Share& share, int s) {
        return {subtract_bytes(raised(share, s), 4), scale(share, s), 0};
    }
};

// {u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d}: q = four bits of ql + 16 * two bits of qh - 32.
struct Q6K {
    static constexpr uint32_t BYTES = 210;
    static constexpr bool HAS_MIN = false;

    struct Share {
        uint32_t low[2], high, scales[2]; // low[s % 2] serves parts s; scales as in Q2_K
        float d;
    };

    static __device__ __forceinline__ Share load(const uint8_t* block, uint32_t w) {
        const uint32_t half = w / 8, word = w % 8, odd = word / 4;
        const uint8_t* low = block + 64 * half + 4 * word;
        const uint8_t* scales = block + 192 + 8 * half;
        return {{load_u32_even(low), load_u32_even(low + 32)},
                load_u32_even(block + 128 + 4 * w),
                {load_u32_even(scales) >> 8 * odd, load_u32_even(scales + 4) >> 8 * odd},
                f32_from_f16(load_u16(block + 208))};
    }

    static __device__ __forceinline__ QuantPart part(const Share& share, int s) {
        const uint32_t low = share.low[s % 2] >> 4 * (s / 2) & 0x0f0f0f0fu;
        const uint32_t high = share.high >> 2 * s & 0x03030303u;
        const uint32_t scale = share.scales[s / 2] >> 16 * (s % 2);
        return {subtract_bytes(low | high << 4, 32), static_cast<int8_t>(scale & 0xff), 0};
    }
};

// Weight i of a part, with ggml's order of operations.
template <class Format>
__device__ __forceinline__ float kquant_value(const typename Format::Share& share, const QuantPart& part,
                                              int i) {
    const float q = static_cast<float>(static_cast<int8_t>(part.q >> 8 * i & 0xff));
    const float x = share.d * static_cast<float>(part.scale) * q;
    if constexpr (Format::HAS_MIN)
        return x - share.dmin * static_cast<float>(part.min);
    return x;
}

} // namespace metrale
