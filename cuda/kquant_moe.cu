// SPDX-License-Identifier: MIT OR Apache-2.0
//
// K-quant experts: activations to q8_1, and products of GGUF blocks with them. K is a multiple of 256, for
// the quantisers of 32. q8_1 rows and Q2_K matrices are 4-byte aligned, Q3_K and Q6_K matrices 2-byte.
#include "common/mmvq.cuh"
#include "common/swiglu.cuh"

using namespace metrale;

constexpr uint32_t QUANTISE_WARPS = 8; // a block of threads; a warp does one q8_1 block

// x bf16 [M, K] -> y q8_1 [M, K/32]. Grid ceil(M * K/32 / 8), block 256.
extern "C" __global__ void kquant_q8_1_rows_bf16(const __nv_bfloat16* __restrict__ x, uint8_t* __restrict__ y,
                                                 uint32_t K, uint32_t M) {
    const uint64_t block = static_cast<uint64_t>(blockIdx.x) * QUANTISE_WARPS + threadIdx.x / WARP;
    if (block >= static_cast<uint64_t>(K / Q8_1_VALUES) * M)
        return;
    q8_1_store(__bfloat162float(x[block * Q8_1_VALUES + threadIdx.x % WARP]), y + block * Q8_1_BYTES);
}

// moe_v41_swiglu, then kquant_q8_1_rows_bf16 of its result, with the bits of the two:
// gate, up bf16 [rows, inter], w f32 [rows] or null -> h bf16 [rows, inter], y q8_1 [rows, inter/32].
// Grid ceil(rows * inter/32 / 8), block 256.
extern "C" __global__ void
kquant_swiglu_q8_1_rows_bf16(const __nv_bfloat16* __restrict__ gate, const __nv_bfloat16* __restrict__ up,
                             const float* __restrict__ METRALE_NULLABLE w, __nv_bfloat16* __restrict__ h,
                             uint8_t* __restrict__ y, uint32_t rows, uint32_t inter, float limit) {
    const uint32_t blocks_per_row = inter / Q8_1_VALUES;
    const uint64_t block = static_cast<uint64_t>(blockIdx.x) * QUANTISE_WARPS + threadIdx.x / WARP;
    if (block >= static_cast<uint64_t>(blocks_per_row) * rows)
        return;
    const uint64_t i = block * Q8_1_VALUES + threadIdx.x % WARP;
    const float weight = w ? w[block / blocks_per_row] : 1.0f;
    const __nv_bfloat16 x =
        __float2bfloat16_rn(swiglu(__bfloat162float(gate[i]), __bfloat162float(up[i]), weight, limit));
    h[i] = x;
    q8_1_store(__bfloat162float(x), y + block * Q8_1_BYTES);
}

// out bf16 [M, N] = y q8_1 [M, K/32] * (w [N, K/256] blocks)^T, M in 1..8. Grid ceil(N / 4), block 128.
#define MMVQ(name, Format)                                                                                   \
    extern "C" __global__ void name(const uint8_t* __restrict__ w, const uint8_t* __restrict__ y,            \
                                    __nv_bfloat16* __restrict__ out, uint32_t K, uint32_t N, uint32_t M) {   \
        mmvq<Format, 4>(w, y, out, K, N, M);                                                                 \
    }

// The same for the matrices at tables[e], e < grid y: reads y + e * y_stride_bytes, writes out + e * M * N.
// Grid (ceil(N / WARPS), experts), block 32 * WARPS.
#define MMVQ_EXPERTS(name, Format, WARPS)                                                                    \
    extern "C" __global__ void name(const uint64_t* __restrict__ tables, const uint8_t* __restrict__ y,      \
                                    __nv_bfloat16* __restrict__ out, uint32_t K, uint32_t N, uint32_t M,     \
                                    uint32_t y_stride_bytes) {                                               \
        const uint64_t e = blockIdx.y;                                                                       \
        mmvq<Format, WARPS>(reinterpret_cast<const uint8_t*>(tables[e]), y + e * y_stride_bytes,             \
                            out + e * M * N, K, N, M);                                                       \
    }

MMVQ(kquant_mmvq_q2_k_w, Q2K)
MMVQ(kquant_mmvq_q3_k_w, Q3K)
MMVQ(kquant_mmvq_q6_k_w, Q6K)
MMVQ_EXPERTS(kquant_mmvq_q2_k_experts_w2, Q2K, 2)
MMVQ_EXPERTS(kquant_mmvq_q2_k_experts_w, Q2K, 4)
MMVQ_EXPERTS(kquant_mmvq_q2_k_experts_w8, Q2K, 8)
MMVQ_EXPERTS(kquant_mmvq_q3_k_experts_w2, Q3K, 2)
MMVQ_EXPERTS(kquant_mmvq_q3_k_experts_w, Q3K, 4)
MMVQ_EXPERTS(kquant_mmvq_q3_k_experts_w8, Q3K, 8)
