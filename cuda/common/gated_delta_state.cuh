// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A state of the gated delta rule, H [k_dim, v_dim] of f32 or f16, in the registers of a block's warps: a
// warp has GDN_WARP_COLUMNS columns, of which lane 4 * r + c holds 4 * c .. + 3 in the rows 32 * j + 4 * r +
// i. Grid (column blocks, num_v_heads, batch). Memory is read and written 16 bytes (f16: 8) a lane where the
// head lies on such a boundary and v_dim is a multiple of 4.
#pragma once

#include <cuda_fp16.h>

#include "common/warp.cuh"

namespace metrale {

constexpr uint32_t GDN_DIM = 128, GDN_WARPS = 4;
constexpr uint32_t GDN_BLOCKS = 4;             // of GDN_WARPS on an SM: 128 registers a thread
constexpr uint32_t GDN_QUADS = GDN_DIM / WARP; // of rows, that a lane holds
constexpr uint32_t GDN_WARP_COLUMNS = 16;

struct GdnSizes {
    uint32_t tokens, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride;
};

// A warp's part of H.
struct GdnTile {
    float h[GDN_QUADS][4][4]; // [quad of rows][row][column]
};

// Where a warp and its lanes are.
struct GdnPlace {
    uint32_t b, vh, kh, warp, lane, row, column, mine;

    __device__ explicit GdnPlace(const GdnSizes& s) {
        b = blockIdx.z, vh = blockIdx.y, kh = vh / (s.num_v_heads / s.num_k_heads);
        warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        row = lane / 4 * 4; // of its first quad
        const uint32_t first = (blockIdx.x * (blockDim.x / WARP) + warp) * GDN_WARP_COLUMNS + lane % 4 * 4;
        column = first;                                 // the first of the lane's four
        mine = first + lane / 8 % 2 * 2 + lane / 4 % 2; // the one whose sum gdn_sum leaves with the lane
    }
    __device__ bool sums_query() const { return lane >= WARP / 2; }
    __device__ uint64_t head(const GdnSizes& s) const {
        return static_cast<uint64_t>(vh) * s.k_dim * s.v_dim;
    }
    __device__ uint64_t token(const GdnSizes& s, uint32_t t) const {
        return static_cast<uint64_t>(b) * s.tokens + t;
    }
    __device__ uint64_t result(const GdnSizes& s, uint32_t t) const { // of output and corrections
        return (token(s, t) * s.num_v_heads + vh) * s.v_dim + mine;
    }
};

// The state of sequence b: entry b of a table of pointers, or one of those that lie behind each other.
template <class T>
__device__ __forceinline__ T* gdn_sequence(T* states, bool is_table, uint32_t b, const GdnSizes& s) {
    return is_table ? reinterpret_cast<T* const*>(states)[b]
                    : states + static_cast<uint64_t>(b) * s.num_v_heads * s.k_dim * s.v_dim;
}

__device__ __forceinline__ void gdn_put(float* p, float x) { *p = x; }
__device__ __forceinline__ void gdn_put(__half* p, float x) { *p = __float2half_rn(x); }

// What the state's type keeps of x.
template <class T>
__device__ __forceinline__ float gdn_kept(float x) {
    return sizeof(T) == 2 ? __half2float(__float2half_rn(x)) : x;
}

// Four columns of a row as they lie in memory.
template <class T>
struct GdnFour;
template <>
struct GdnFour<float> {
    using Bits = float4;
    static __device__ __forceinline__ float4 narrow(const float* p, uint32_t valid) {
        return {p[0], p[valid > 1 ? 1 : 0], p[valid > 2 ? 2 : 0], p[valid > 3 ? 3 : 0]};
    }
    static __device__ __forceinline__ float4 values(const float4& bits) { return bits; }
};
template <>
struct GdnFour<__half> {
    using Bits = uint2;
    static __device__ __forceinline__ uint32_t bits(const __half* p, uint32_t i) {
        return __half_as_ushort(p[i]);
    }
    static __device__ __forceinline__ uint2 narrow(const __half* p, uint32_t valid) {
        return {bits(p, 0) | bits(p, valid > 1 ? 1 : 0) << 16,
                bits(p, valid > 2 ? 2 : 0) | bits(p, valid > 3 ? 3 : 0) << 16};
    }
    static __device__ __forceinline__ float4 values(const uint2& bits) {
        const float2 lo = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
        const float2 hi = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
        return {lo.x, lo.y, hi.x, hi.y};
    }
};

// States pass the caches by: nothing reads one again soon.
__device__ __forceinline__ void gdn_store4(float* p, const float (&x)[4]) {
    __stcs(reinterpret_cast<float4*>(p), float4{x[0], x[1], x[2], x[3]});
}
__device__ __forceinline__ void gdn_store4(__half* p, const float (&x)[4]) {
    const __half2 lo = __floats2half2_rn(x[0], x[1]), hi = __floats2half2_rn(x[2], x[3]);
    __stcs(reinterpret_cast<uint2*>(p),
           uint2{*reinterpret_cast<const uint32_t*>(&lo), *reinterpret_cast<const uint32_t*>(&hi)});
}

template <class T>
__device__ __forceinline__ bool gdn_wide(const T* base, const GdnSizes& s) {
    return s.v_dim % 4 == 0 && reinterpret_cast<uint64_t>(base) % (4 * sizeof(T)) == 0;
}

// A tile on its way: nothing here looks at what is read, so that other reads can follow at once. Rows and
// columns that there are not repeat some that there are.
template <class T>
struct GdnFetched {
    typename GdnFour<T>::Bits four[GDN_QUADS][4];

    __device__ __forceinline__ GdnFetched(const T* state, const GdnPlace& at, const GdnSizes& s) {
        const T* base = state + at.head(s);
        const uint32_t column = at.column < s.v_dim ? at.column : 0;
        if (gdn_wide(base, s))
            each_row(at, s, [&](uint32_t j, uint32_t i, uint64_t row) {
                using Bits = typename GdnFour<T>::Bits;
                four[j][i] = __ldcs(reinterpret_cast<const Bits*>(base + row * s.v_dim + column));
            });
        else
            each_row(at, s, [&](uint32_t j, uint32_t i, uint64_t row) {
                four[j][i] = GdnFour<T>::narrow(base + row * s.v_dim + column, s.v_dim - column);
            });
    }

    template <class Body>
    __device__ __forceinline__ void each_row(const GdnPlace& at, const GdnSizes& s, Body body) {
#pragma unroll
        for (uint32_t j = 0; j < GDN_QUADS; ++j) {
            const uint32_t row = j * WARP + at.row;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                body(j, i, (row < s.k_dim ? row : 0) + i);
        }
    }

    // The tile, with zeros in the rows that there are not.
    __device__ __forceinline__ GdnTile tile(const GdnPlace& at, const GdnSizes& s) const {
        GdnTile tile;
#pragma unroll
        for (uint32_t j = 0; j < GDN_QUADS; ++j) {
            const bool exists = j * WARP + at.row < s.k_dim;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float4 x = GdnFour<T>::values(four[j][i]);
                tile.h[j][i][0] = exists ? x.x : 0.0f, tile.h[j][i][1] = exists ? x.y : 0.0f;
                tile.h[j][i][2] = exists ? x.z : 0.0f, tile.h[j][i][3] = exists ? x.w : 0.0f;
            }
        }
        return tile;
    }
};

// body(j, i, address) for each row of a tile that the head at `base` has.
template <class T, class Body>
__device__ __forceinline__ void gdn_each_row(const GdnPlace& at, const GdnSizes& s, T* base, Body body) {
#pragma unroll
    for (uint32_t j = 0; j < GDN_QUADS; ++j) {
        const uint32_t row = j * WARP + at.row;
        if (row < s.k_dim) { // a multiple of 4: all of the quad, or nothing
            T* p = base + static_cast<uint64_t>(row) * s.v_dim + at.column;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                body(j, i, p + i * s.v_dim);
        }
    }
}

template <class T>
__device__ __forceinline__ void gdn_store(const GdnTile& tile, T* state, const GdnPlace& at,
                                          const GdnSizes& s) {
    T* base = state + at.head(s);
    if (gdn_wide(base, s)) {
        if (at.column < s.v_dim)
            gdn_each_row(at, s, base, [&](uint32_t j, uint32_t i, T* p) { gdn_store4(p, tile.h[j][i]); });
        return;
    }
    gdn_each_row(at, s, base, [&](uint32_t j, uint32_t i, T* p) {
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c)
            if (at.column + c < s.v_dim)
                gdn_put(p + c, tile.h[j][i][c]);
    });
}

} // namespace metrale
