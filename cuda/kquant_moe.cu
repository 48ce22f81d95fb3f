// SPDX-License-Identifier: MIT OR Apache-2.0
//
// K-quant experts: activations to q8_1, and products of GGUF blocks with them. K is a multiple of 256, for
// the quantisers of 32. q8_1 rows and Q2_K matrices are 4-byte aligned, Q3_K and Q6_K matrices 2-byte.
#include "common/kquant_tile.cuh"
#include "common/mmvq.cuh"
#include "common/swiglu.cuh"

using namespace metrale;

constexpr uint32_t QUANTISE_WARPS = 8; // a block of threads; a warp does one block of values

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

// x bf16 [M, K], 8-byte aligned -> y [ceil256(K) / 128][ceil128(M)] blocks of common/q8_mmq.cuh. A warp does
// one block: grid ceil(blocks / 8), block 256.
template <class Store>
__device__ __forceinline__ void quantise_mmq(const __nv_bfloat16* __restrict__ x, uint8_t* __restrict__ y,
                                             uint32_t K, uint32_t M, Store store) {
    const uint64_t rows = mmq_padded(M);
    const uint64_t spans = (static_cast<uint64_t>(K) + KQUANT_VALUES - 1) / KQUANT_VALUES * 2;
    const uint64_t block = static_cast<uint64_t>(blockIdx.x) * QUANTISE_WARPS + threadIdx.x / WARP;
    if (block >= rows * spans)
        return;
    const uint64_t row = block % rows;
    const uint32_t k = static_cast<uint32_t>(block / rows * MMQ_VALUES) + 4 * (threadIdx.x % WARP);
    float values[4] = {};
    if (row < M && k < K) {
        const uint2 bits = *reinterpret_cast<const uint2*>(x + row * K + k);
        values[0] = float_from_bits(bits.x << 16);
        values[1] = float_from_bits(bits.x & 0xffff0000u);
        values[2] = float_from_bits(bits.y << 16);
        values[3] = float_from_bits(bits.y & 0xffff0000u);
    }
    store(values, y + block * MMQ_BYTES);
}

extern "C" __global__ void metrale_q8_1_quantize_d4_bf16(const __nv_bfloat16* __restrict__ x,
                                                         uint8_t* __restrict__ y, uint32_t K, uint32_t M) {
    quantise_mmq(x, y, K, M, [](const float (&v)[4], uint8_t* block) { mmq_store_d4(v, block); });
}

extern "C" __global__ void metrale_q8_1_quantize_d2s6_bf16(const __nv_bfloat16* __restrict__ x,
                                                           uint8_t* __restrict__ y, uint32_t K, uint32_t M) {
    quantise_mmq(x, y, K, M, [](const float (&v)[4], uint8_t* block) { mmq_store_d2s6(v, block); });
}

// out bf16 [M, N] = y [M, K] * (w [N, K/256] blocks, blocks_per_row apart)^T, a tile of 128 x 128 a block.
// y_rows and out_stride are the M and N that y and out were made with. _nc: N is a multiple of 128; _wc: any.
// Grid (ceil(N / 128), ceil(M / 128)), block 256.
#define MMQ(name, Format, CHECKED)                                                                           \
    extern "C" __global__ void name(const uint8_t* __restrict__ w, const uint8_t* __restrict__ y,            \
                                    __nv_bfloat16* __restrict__ out, uint32_t N, uint32_t M, uint32_t K,     \
                                    uint32_t blocks_per_row, uint32_t y_rows, uint32_t out_stride) {         \
        mmq_dense<Format, CHECKED>(w, y, out, N, M, K, blocks_per_row, y_rows, out_stride);                  \
    }

template <class Format, bool CHECKED>
__device__ __forceinline__ void mmq_dense(const uint8_t* __restrict__ w, const uint8_t* __restrict__ y,
                                          __nv_bfloat16* __restrict__ out, uint32_t N, uint32_t M, uint32_t K,
                                          uint32_t blocks_per_row, uint32_t y_rows, uint32_t out_stride) {
    constexpr int COLS = 128;
    __shared__ TileStage<COLS> stage;
    const uint32_t m0 = blockIdx.y * COLS, cols = M - m0 < COLS ? M - m0 : COLS;
    if (threadIdx.x < COLS)
        stage.row[threadIdx.x] = m0 + threadIdx.x;
    kquant_tile<Format, COLS, CHECKED>(
        stage, w, static_cast<uint64_t>(blocks_per_row) * Format::BYTES, y, mmq_padded(y_rows),
        blockIdx.x * TILE_ROWS, N, K, cols, [&](uint32_t col, uint32_t n, float value) {
            out[static_cast<uint64_t>(m0 + col) * out_stride + n] = __float2bfloat16_rn(value);
        });
}

MMQ(metrale_q2_k_mmq128_nc, Q2KTile, false)
MMQ(metrale_q2_k_mmq128_wc, Q2KTile, true)
MMQ(metrale_q3_k_mmq128_nc, Q3KTile, false)
MMQ(metrale_q3_k_mmq128_wc, Q3KTile, true)
