// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The engram memory: the rows that a token's n-grams gather from a table, their projection to keys and a
// value, and the gate that adds the value to each stream of the highway.
#include "common/engram.cuh"
#include "common/q2_k_bf16.cuh"
#include "common/q2_k_gemv.cuh"
#include "common/vec8.cuh"

using namespace metrale;

constexpr uint32_t GATE_WARPS = 8;

// Rows of 256 values that KQUANT_THREADS threads each write: row i of out bf16 [n_rows, 256], 8-byte aligned,
// is the row ids[i] of a table of Q2_K blocks [table_rows], one a row. An id outside it gives zeros and is
// told to outside().
template <class Outside>
__device__ __forceinline__ void
gather_rows(const int64_t* __restrict__ ids, const uint8_t* __restrict__ table, __nv_bfloat16* out,
            uint64_t thread, uint64_t threads, uint64_t n_rows, uint64_t table_rows, Outside outside) {
    const uint32_t w = thread % KQUANT_THREADS;
    for (uint64_t row = thread / KQUANT_THREADS; row < n_rows; row += threads / KQUANT_THREADS) {
        const uint64_t id = static_cast<uint64_t>(ids[row]); // a negative one is beyond every table
        __nv_bfloat16* to = out + row * KQUANT_VALUES;
        if (id < table_rows) {
            q2_k_block_to_bf16(table + id * Q2K::BYTES, w, to);
            continue;
        }
        for (int s = 0; s < 4; ++s)
            *reinterpret_cast<uint2*>(to + kquant_first(w, s)) = {0, 0};
        if (w == 0)
            outside();
    }
}

// C bf16 [N] = B * A, each weight of B rounded to bf16 first: the bits of dense_gemv_bf16 over the expanded
// B. A bf16 [K]; B Q2_K [N, K], 4-byte aligned; K a multiple of 256. Grid 1..ceil(N / 16), block 256,
// sizeof(Q2KGemvShared) + 2 * K bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 3)
    engram_v41_wkv_q2k_gemv(const __nv_bfloat16* __restrict__ A, const uint8_t* __restrict__ B,
                            __nv_bfloat16* __restrict__ C, uint32_t N, uint32_t K) {
    METRALE_DYNAMIC_SHARED(Q2KGemvShared, shared);
    const auto fill_x = [&]() {
        const bool wide = aligned16(A);
        for (uint32_t i = threadIdx.x; i < K / 8; i += blockDim.x)
            shared->x()[i] = wide ? load_bf16x8<true>(A, 8 * i, K) : load_bf16x8<false>(A, 8 * i, K);
    };
    q2_k_gemv_of_any_width(*shared, fill_x, B, C, N, K);
}

// The same with A gathered: its K / 256 rows are those of ids i64 [K / 256] in a table, as
// engram_v41_rows_gather has them.
extern "C" __global__ void __launch_bounds__(256, 3)
    engram_v41_wkv_q2k_gemv_gather(const int64_t* __restrict__ ids, const uint8_t* __restrict__ table,
                                   const uint8_t* __restrict__ B, __nv_bfloat16* __restrict__ C, uint32_t N,
                                   uint32_t K, uint64_t table_rows, uint32_t* __restrict__ flag) {
    METRALE_DYNAMIC_SHARED(Q2KGemvShared, shared);
    const auto fill_x = [&]() {
        gather_rows(ids, table, reinterpret_cast<__nv_bfloat16*>(shared->x()), threadIdx.x, blockDim.x,
                    K / KQUANT_VALUES, table_rows, [&]() {
                        if (blockIdx.x == 0)
                            atomicOr(flag, 1u);
                    });
    };
    q2_k_gemv_of_any_width(*shared, fill_x, B, C, N, K);
}

// Sum over the block of each of three values, for every thread.
__device__ __forceinline__ void block_sums(float (&x)[3]) {
    __shared__ float partial[GATE_WARPS][3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        x[i] = warp_sum(x[i]);
        if (threadIdx.x % WARP == 0)
            partial[threadIdx.x / WARP][i] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        x[i] = 0.0f;
        for (uint32_t warp = 0; warp < GATE_WARPS; ++warp)
            x[i] += partial[warp][i];
    }
}

// For token t and stream c, h = streams[t, c], key = kv[t, c], value = kv[t, hc]:
//     dot = sum(h * qk[c] * key) * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) * dim^-0.5
//     h  += sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) * value
// streams f32 [T, hc, dim], kv bf16 [T, hc + 1, dim], qk f32 [hc, dim]. Grid (T, hc), block 256.
extern "C" __global__ void engram_v41_gate(float* __restrict__ streams, const __nv_bfloat16* __restrict__ kv,
                                           const float* __restrict__ qk, uint32_t dim, uint32_t hc,
                                           float eps) {
    const uint64_t t = blockIdx.x, c = blockIdx.y;
    float* h = streams + (t * hc + c) * dim;
    const __nv_bfloat16* key = kv + (t * (hc + 1) + c) * dim;
    const __nv_bfloat16* value = kv + (t * (hc + 1) + hc) * dim;
    const float* weight = qk + c * dim;

    float sums[3] = {};
    for (uint32_t i = threadIdx.x * 8; i < dim; i += blockDim.x * 8) {
        const F32x8 x = load8(h, i, dim), y = load8(key, i, dim), w = load8(weight, i, dim);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sums[0] = fmaf(x.v[j] * w.v[j], y.v[j], sums[0]);
            sums[1] = fmaf(x.v[j], x.v[j], sums[1]);
            sums[2] = fmaf(y.v[j], y.v[j], sums[2]);
        }
    }
    block_sums(sums);
    const float n = static_cast<float>(dim);
    const float dot = sums[0] / sqrtf(sums[1] / n + eps) / sqrtf(sums[2] / n + eps) / sqrtf(n);
    const float size = fabsf(dot);
    const float g = copysignf(sqrtf(size < 1e-6f ? 1e-6f : size), dot); // a NaN stays one
    const float open = 1.0f / (1.0f + exp_f32(-g));
    for (uint32_t i = threadIdx.x * 8; i < dim; i += blockDim.x * 8) {
        F32x8 x = load8(h, i, dim);
        const F32x8 v = load8(value, i, dim);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            x.v[j] = fmaf(open, v.v[j], x.v[j]);
        store8(h, i, dim, x);
    }
}

// out bf16 [n_rows, 256] = the rows ids i64 [n_rows] of a table of Q2_K blocks [table_rows], one a row; zeros
// for an id outside it, which also sets bit 0 of *flag. table 4-byte, out 8-byte aligned. Grid ceil(n_rows /
// 16), block 256.
extern "C" __global__ void engram_v41_rows_gather(const int64_t* __restrict__ ids,
                                                  const uint8_t* __restrict__ table,
                                                  __nv_bfloat16* __restrict__ out, uint32_t n_rows,
                                                  uint64_t table_rows, uint32_t* __restrict__ flag) {
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    gather_rows(ids, table, out, thread, static_cast<uint64_t>(gridDim.x) * blockDim.x, n_rows, table_rows,
                [&]() { atomicOr(flag, 1u); });
}

// out i64 [sites, tokens, cols], cols = (ngram - 1) * heads: the ids of positions start .. start + tokens, as
// in common/engram.cuh, 2-grams first. compressed i32 [start + tokens]; multipliers u64 [sites, ngram];
// primes and offsets i64 [sites, cols]. Grid (ceil(tokens * cols / 256), sites), block 256.
extern "C" __global__ void engram_v41_hash(const int32_t* __restrict__ compressed, int64_t* __restrict__ out,
                                           uint32_t tokens, uint32_t start,
                                           const uint64_t* __restrict__ multipliers,
                                           const int64_t* __restrict__ primes,
                                           const int64_t* __restrict__ offsets, uint32_t sites,
                                           uint32_t ngram, uint32_t heads, uint32_t pad) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t cols = static_cast<uint64_t>(ngram - 1) * heads, site = blockIdx.y;
    const uint64_t token = i / cols, col = i % cols;
    if (token >= tokens || site >= sites)
        return;
    const int64_t roll = engram_roll(compressed, start + token, static_cast<uint32_t>(col / heads) + 2,
                                     multipliers + site * ngram, static_cast<int32_t>(pad));
    out[(site * tokens + token) * cols + col] =
        engram_id(roll, primes[site * cols + col], offsets[site * cols + col]);
}
