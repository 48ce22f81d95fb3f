// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The gated delta rule over K tokens of a sequence, for every kernel that evaluates it. Of head vh, with
// kh = vh / (num_v_heads / num_k_heads) and g = clamp(gate, 1e-6, 1 - 1e-6), NaN 1e-6, token t does
//
//     H <- g H;  d = beta (v - H^T k);  H <- H + k d^T;  out = bf16(k_dim^-0.5 * H^T q)
//
// H [k_dim, v_dim], f32, or f16: then it is rounded after each token, and so kept, multiplied and stored. Of
// sequence b, token t: query, key (b * K + t) * qk_stride + kh * k_dim, value (b * K + t) * v_stride + vh *
// v_dim, gate, beta (b * K + t) * gb_stride + vh, output, corrections (d) ((b * K + t) * num_v_heads + vh) *
// v_dim. k_dim a multiple of 4 up to 128, v_dim up to 128, K up to 17.
//
// A column of H does not depend on the others, and a warp keeps some of them for all tokens, as
// gated_delta_state.cuh says. H_t^T q_t and H_t^T k_(t + 1) are summed together, by a tree over the lanes.
// Block of 1 to GDN_WARPS warps; the bits do not depend on how many.
#pragma once

#include <cuda_bf16.h>

#include "common/gated_delta_state.cuh"
#include "common/math.cuh"

namespace metrale {

constexpr uint32_t GDN_TOKENS = 17;
constexpr float GDN_DECAY_MIN = 1e-6f, GDN_DECAY_MAX = 1.0f - 1e-6f;
constexpr float GDN_UNIT_EPS = 1e-6f;

// With a_log, gate and beta are raw: g = exp(-exp(a_log) * softplus(gate + dt_bias)), beta = sigmoid(beta),
// both parameters [num_v_heads]. With unit_rows, q and k are divided by sqrt(sum(x^2) + 1e-6).
struct GdnRaw {
    const float* a_log;
    const float* dt_bias;
    bool unit_rows;
};

// What the tokens bring, in f32.
struct GdnStaged {
    float4 key[GDN_TOKENS][GDN_DIM / 4];
    float4 query[GDN_TOKENS][GDN_DIM / 4];
    float columns[GDN_WARPS][GDN_TOKENS][GDN_WARP_COLUMNS]; // of each warp: v, or d
    float decay[GDN_TOKENS];
    float beta[GDN_TOKENS];
};

__device__ __forceinline__ float gdn_float(float x) { return x; }
__device__ __forceinline__ float gdn_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float gdn_decay(float gate) {
    return gate >= GDN_DECAY_MIN ? (gate > GDN_DECAY_MAX ? GDN_DECAY_MAX : gate)
                                 : GDN_DECAY_MIN; // NaN: the least
}

__device__ __forceinline__ float gdn_raw_gate(float a, float a_log, float dt_bias) {
    const float x = a + dt_bias;
    return exp_f32(-exp_f32(a_log) * (x > 20.0f ? x : log1p_f32(exp_f32(x))));
}

// Four values of a row of q or k: their bits, and f32.
template <bool WIDE>
__device__ __forceinline__ uint2 gdn_quad(const __nv_bfloat16* p) {
    if constexpr (WIDE)
        return *reinterpret_cast<const uint2*>(p);
    const auto bits = [&](uint32_t i) { return static_cast<uint32_t>(__bfloat16_as_ushort(p[i])); };
    return {bits(0) | bits(1) << 16, bits(2) | bits(3) << 16};
}
__device__ __forceinline__ float4 gdn_quad_values(const uint2& bits, bool exists) {
    constexpr uint32_t HIGH = 0xffff0000u;
    return {float_from_bits(exists ? bits.x << 16 : 0), float_from_bits(exists ? bits.x & HIGH : 0),
            float_from_bits(exists ? bits.y << 16 : 0), float_from_bits(exists ? bits.y & HIGH : 0)};
}

// Rows of the first `count` tokens, a warp each, several under way at once; of key only if not QUERY.
template <bool QUERY, bool WIDE>
__device__ __forceinline__ void gdn_stage_rows(GdnStaged& staged, const __nv_bfloat16* key,
                                               const __nv_bfloat16* query, uint32_t count, const GdnPlace& at,
                                               const GdnSizes& s) {
    constexpr uint32_t ROUND = WIDE ? 4 : 1;
    const uint32_t warps = blockDim.x / WARP;
    const bool exists = 4 * at.lane < s.k_dim;
    const uint64_t column = static_cast<uint64_t>(at.kh) * s.k_dim + (exists ? 4 * at.lane : 0);
#pragma unroll 1
    for (uint32_t first = at.warp; first < count; first += ROUND * warps) {
        uint2 k[ROUND], q[ROUND] = {};
#pragma unroll
        for (uint32_t u = 0; u < ROUND; ++u) {
            const uint32_t t = first + u * warps;
            const uint64_t i = at.token(s, t < count ? t : first) * s.qk_stride + column;
            k[u] = gdn_quad<WIDE>(key + i);
            if constexpr (QUERY)
                q[u] = gdn_quad<WIDE>(query + i);
        }
#pragma unroll
        for (uint32_t u = 0; u < ROUND; ++u) {
            const uint32_t t = first + u * warps;
            if (t < count) {
                staged.key[t][at.lane] = gdn_quad_values(k[u], exists);
                if constexpr (QUERY)
                    staged.query[t][at.lane] = gdn_quad_values(q[u], exists);
            }
        }
    }
}

// Rows that the same warp has staged, divided by their lengths.
__device__ __forceinline__ void gdn_unit_rows(float4 (*rows)[GDN_DIM / 4], uint32_t count,
                                              const GdnPlace& at) {
#pragma unroll 1
    for (uint32_t t = at.warp; t < count; t += blockDim.x / WARP) {
        const float4 x = rows[t][at.lane];
        const float squares = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, x.x * x.x)));
        const float length = 1.0f / sqrtf(warp_sum(squares) + GDN_UNIT_EPS);
        rows[t][at.lane] = {x.x * length, x.y * length, x.z * length, x.w * length};
    }
}

// All that the first `count` tokens bring; without QUERY not query and beta, which are null. All reads are
// under way before anything waits for one, or a small batch would wait several times. column(t, i): the value
// of token t in column i, of bf16 or f32.
template <bool QUERY, class Column>
__device__ __forceinline__ void gdn_stage(GdnStaged& staged, const __nv_bfloat16* key,
                                          const __nv_bfloat16* query, const float* gate, const float* beta,
                                          uint32_t count, const GdnPlace& at, const GdnSizes& s,
                                          const GdnRaw& raw, Column column) {
    constexpr uint32_t TOKENS_A_ROUND = WARP / GDN_WARP_COLUMNS;
    constexpr uint32_t ROUNDS = (GDN_TOKENS + TOKENS_A_ROUND - 1) / TOKENS_A_ROUND;
    const uint32_t own = threadIdx.x < count ? threadIdx.x : 0;
    const uint64_t gates = at.token(s, own) * s.gb_stride + at.vh;
    const float g = gate[gates], b = QUERY ? beta[gates] : 0.0f;

    const uint32_t i = at.lane % GDN_WARP_COLUMNS, first = at.lane / GDN_WARP_COLUMNS;
    const uint32_t wanted = at.column - at.lane % 4 * 4 + i;
    decltype(column(0u, 0u)) values[ROUNDS];
#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; ++r) {
        const uint32_t t = r * TOKENS_A_ROUND + first;
        values[r] = column(t < count ? t : 0, wanted < s.v_dim ? wanted : 0);
    }
    const bool wide = s.qk_stride % 4 == 0 && reinterpret_cast<uint64_t>(key) % 8 == 0 &&
                      reinterpret_cast<uint64_t>(query) % 8 == 0;
    if (wide)
        gdn_stage_rows<QUERY, true>(staged, key, query, count, at, s);
    else
        gdn_stage_rows<QUERY, false>(staged, key, query, count, at, s);
#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; ++r) {
        const uint32_t t = r * TOKENS_A_ROUND + first;
        if (t < count)
            staged.columns[at.warp][t][i] = gdn_float(values[r]);
    }
    if (threadIdx.x < count) {
        staged.decay[own] = gdn_decay(raw.a_log ? gdn_raw_gate(g, raw.a_log[at.vh], raw.dt_bias[at.vh]) : g);
        staged.beta[own] = raw.a_log ? 1.0f / (1.0f + exp_f32(-b)) : b;
    }
    if (raw.unit_rows) {
        gdn_unit_rows(staged.key, count, at);
        if constexpr (QUERY)
            gdn_unit_rows(staged.query, count, at);
    }
    __syncthreads();
}

// H <- g H + k d^T: the only place that changes a state.
template <class T>
__device__ __forceinline__ void gdn_update(GdnTile& tile, const float4* key, float g, const float (&d)[4],
                                           const GdnPlace& at) {
#pragma unroll
    for (uint32_t j = 0; j < GDN_QUADS; ++j) {
        const float4 quad = key[(j * WARP + at.row) / 4];
        const float k[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
            for (uint32_t c = 0; c < 4; ++c)
                tile.h[j][i][c] = gdn_kept<T>(fmaf(k[i], d[c], g * tile.h[j][i][c]));
    }
}

// sums += the lane's part of H^T x.
__device__ __forceinline__ void gdn_dot(float (&sums)[4], const GdnTile& tile, const float4* x,
                                        const GdnPlace& at) {
#pragma unroll
    for (uint32_t j = 0; j < GDN_QUADS; ++j) {
        const float4 quad = x[(j * WARP + at.row) / 4];
        const float v[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
            for (uint32_t c = 0; c < 4; ++c)
                sums[c] = fmaf(tile.h[j][i][c], v[i], sums[c]);
    }
}

// Sums over the eight lanes of each column, in three steps that halve what a lane is left with: the total of
// column at.mine, of `query` with at.sums_query(), else of `key`.
__device__ __forceinline__ float gdn_sum(const float (&key)[4], const float (&query)[4], const GdnPlace& at) {
    const bool upper = at.sums_query(), pair = at.lane / 8 % 2, odd = at.lane / 4 % 2;
    float x[4], y[2];
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c)
        x[c] = (upper ? query[c] : key[c]) + __shfl_xor_sync(FULL_WARP, upper ? key[c] : query[c], 16);
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c)
        y[c] = (pair ? x[2 + c] : x[c]) + __shfl_xor_sync(FULL_WARP, pair ? x[c] : x[2 + c], 8);
    return (odd ? y[1] : y[0]) + __shfl_xor_sync(FULL_WARP, odd ? y[0] : y[1], 4);
}

// The tokens of one sequence through one head, from `state` on. each(t, d, tile): after token t, with the d
// of the column at.mine in the lanes without at.sums_query().
template <class T, class Each>
__device__ __forceinline__ void
gdn_tokens(const T* state, const __nv_bfloat16* query, const __nv_bfloat16* key, const __nv_bfloat16* value,
           const float* gate, const float* beta, __nv_bfloat16* output, const GdnPlace& at, const GdnSizes& s,
           const GdnRaw& raw, Each each) {
    __shared__ GdnStaged staged;
    const GdnFetched<T> fetched(state, at, s);
    gdn_stage<true>(staged, key, query, gate, beta, s.tokens, at, s, raw, [&](uint32_t t, uint32_t c) {
        return value[at.token(s, t) * s.v_stride + static_cast<uint64_t>(at.vh) * s.v_dim + c];
    });
    const uint32_t first = at.column - at.lane % 4 * 4;
    if (first >= s.v_dim)
        return;

    GdnTile tile = fetched.tile(at, s);
    const float scale = 1.0f / sqrtf(static_cast<float>(s.k_dim));
    float zero[4] = {}, sums[4] = {};
    gdn_dot(sums, tile, staged.key[0], at);
    float sum = gdn_sum(sums, zero, at);
#pragma unroll 1
    for (uint32_t t = 0; t < s.tokens; ++t) {
        const float g = staged.decay[t];
        const float v = staged.columns[at.warp][t][at.mine - first];
        const float d_mine = staged.beta[t] * fmaf(-g, sum, v);
        float d[4];
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c)
            d[c] = __shfl_sync(FULL_WARP, d_mine, static_cast<int>(c * 4 + at.lane % 4));
        gdn_update<T>(tile, staged.key[t], g, d, at);
        each(t, d_mine, tile);
        float next[4] = {}, now[4] = {};
        gdn_dot(next, tile, staged.key[t + 1 < s.tokens ? t + 1 : t], at);
        gdn_dot(now, tile, staged.query[t], at);
        sum = gdn_sum(next, now, at);
        if (at.sums_query() && at.mine < s.v_dim)
            output[at.result(s, t)] = __float2bfloat16_rn(scale * sum);
    }
}

// Where the states after all tokens but the last go, each token's with an argument of its own, or one behind
// the other, `stride` elements or entries apart.
template <class T>
struct GdnSeparate {
    T *first, *second, *third;
    bool is_table;
    __device__ __forceinline__ T* at(uint32_t t, uint32_t b, const GdnSizes& s) const {
        return gdn_sequence(t == 0 ? first : t == 1 ? second : third, is_table, b, s);
    }
};

template <class T>
struct GdnStrided {
    T* base;
    uint32_t stride;
    bool is_table;
    __device__ __forceinline__ T* at(uint32_t t, uint32_t b, const GdnSizes& s) const {
        const uint64_t offset = static_cast<uint64_t>(t) * stride;
        return is_table ? reinterpret_cast<T* const*>(base)[offset + b]
                        : gdn_sequence(base + offset, false, b, s);
    }
};

// The verify that keeps every state, the last in h.
template <class T, class Inter>
__device__ __forceinline__ void gdn_snapshot(T* h, const __nv_bfloat16* query, const __nv_bfloat16* key,
                                             const __nv_bfloat16* value, const float* gate, const float* beta,
                                             __nv_bfloat16* output, const GdnSizes& s, const Inter& inter) {
    const GdnPlace at(s);
    T* state = gdn_sequence(h, inter.is_table, at.b, s);
    T* next = inter.at(0, at.b, s); // read a token ahead: a table's entry takes its time
    gdn_tokens(state, query, key, value, gate, beta, output, at, s, GdnRaw{},
               [&](uint32_t t, float, const GdnTile& tile) {
                   T* now = next;
                   next = t + 2 < s.tokens ? inter.at(t + 1, at.b, s) : state;
                   gdn_store(tile, now, at, s);
               });
}

// What has a kernel for each number of tokens is called, and takes what it takes by value: compiled once for
// all, and without a stack.

// The verify that keeps the corrections only.
template <class T>
METRALE_CALLED void gdn_verify(const T* h, const __nv_bfloat16* query, const __nv_bfloat16* key,
                               const __nv_bfloat16* value, const float* gate, const float* beta,
                               __nv_bfloat16* output, float* corrections, const GdnSizes s, const GdnRaw raw,
                               bool is_table) {
    const GdnPlace at(s);
    gdn_tokens(gdn_sequence(h, is_table, at.b, s), query, key, value, gate, beta, output, at, s, raw,
               [&](uint32_t t, float d, const GdnTile&) {
                   if (!at.sums_query() && at.mine < s.v_dim)
                       corrections[at.result(s, t)] = d;
               });
}

// The first accepted[b] of the tokens onto h, from their corrections. 0 and less: nothing is touched.
template <class T>
METRALE_CALLED void gdn_commit(T* h, const __nv_bfloat16* key, const float* gate, const float* corrections,
                               const int32_t* accepted, const GdnSizes s, const GdnRaw raw, bool is_table) {
    __shared__ GdnStaged staged;
    const GdnPlace at(s);
    const int32_t wanted = accepted[at.b];
    if (wanted <= 0)
        return;
    const uint32_t count =
        static_cast<uint32_t>(wanted) < s.tokens ? static_cast<uint32_t>(wanted) : s.tokens;
    T* state = gdn_sequence(h, is_table, at.b, s);
    const GdnFetched<T> fetched(state, at, s);
    gdn_stage<false>(staged, key, nullptr, gate, nullptr, count, at, s, raw, [&](uint32_t t, uint32_t c) {
        return corrections[(at.token(s, t) * s.num_v_heads + at.vh) * s.v_dim + c];
    });
    const uint32_t first = at.column - at.lane % 4 * 4;
    if (first >= s.v_dim)
        return;
    GdnTile tile = fetched.tile(at, s);
#pragma unroll 1
    for (uint32_t t = 0; t < count; ++t) {
        float d[4];
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c)
            d[c] = staged.columns[at.warp][t][at.lane % 4 * 4 + c];
        gdn_update<T>(tile, staged.key[t], staged.decay[t], d, at);
    }
    gdn_store(tile, state, at, s);
}

} // namespace metrale
