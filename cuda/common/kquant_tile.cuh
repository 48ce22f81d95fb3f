// SPDX-License-Identifier: MIT OR Apache-2.0
//
// K-quant matrix times many q8 rows on the int8 tensor cores:
//
//     out[m, n] = sum over k of W[n, k] * y[m, k],    W [N, K/256] blocks, y in the blocks of
//     common/q8_mmq.cuh
//
// A block does 128 rows of W, a warp 16 of them alone: it decodes them from memory straight into the left
// operand, so that no weight is decoded twice and none passes through shared memory. The activations of up to
// COLS rows of y wait there, a super-block of 256 values at a time.
//
// A scaled weight is a byte: u = scale * q of Q2_K is 0 .. 45, and u = scale * q + 127 of Q3_K is 3 .. 255.
// The ints of the values under one activation scale are summed exactly; 127 times the sum of the activations
// is taken off at the start. The minimums of Q2_K meet the group sums in one f16 product a super-block:
//
//     out += d * (sum over scales of d8 * ints) - dmin * (sum over groups of min * (d8 * sum(q8)))
//
// in that order, super-block after super-block. Nothing depends on COLS, on the place of a row in the tile or
// on the grid.
//
// Lane g = lane / 4, t = lane % 4 takes the words 2t and 2t + 1 of the eight that hold the quants of 32
// values (common/kquant.cuh), for the instruction's k 4t and 16 + 4t, and so the same words of the
// activations.
#pragma once

#include "common/kquant.cuh"
#include "common/mma.cuh"
#include "common/q8_mmq.cuh"

namespace metrale {

constexpr uint32_t TILE_WARPS = 8;
constexpr uint32_t TILE_WARP_ROWS = 16;
constexpr uint32_t TILE_ROWS = TILE_WARPS * TILE_WARP_ROWS; // of W
constexpr uint32_t TILE_THREADS = TILE_WARPS * WARP;

constexpr uint32_t STAGED_WORDS = 2 * MMQ_BYTES / 4; // a row's two blocks
constexpr uint32_t PIECES = 2 * MMQ_BYTES / 16;

// Shared memory: COLS rows of y over 256 values, and what is derived from them, eight words a row: the sums
// of each 32 ints (Q3_K), or d * sum(q) of each group of 16 in f16 (Q2_K).
template <int COLS>
struct alignas(16) TileStage {
    uint32_t words[COLS][STAGED_WORDS];
    uint32_t derived[COLS][8];
    uint32_t row[COLS];
};

// The parts of a format that the tile asks for: bytes(share, s), the lane's four scaled weights of part s;
// OFFSET, what is in them too much; SCALES, how many activation scales 128 values have.
struct Q2KTile : Q2K {
    static constexpr int OFFSET = 0;
    static constexpr int SCALES = 2;

    static __device__ __forceinline__ uint32_t bytes(const Share& share, int s) {
        const QuantPart p = part(share, s);
        return p.q * static_cast<uint32_t>(p.scale);
    }

    static __device__ __forceinline__ float activation_scale(const uint32_t* block, int i) {
        return f32_from_f16(block[0] >> 16 * i & 0xffff);
    }

    // Word i of the derived: groups 2 * i and 2 * i + 1 of the 16.
    static __device__ __forceinline__ uint32_t derive(const uint32_t* staged, uint32_t i) {
        const uint32_t* block = staged + i / 4 * (MMQ_BYTES / 4);
        const uint32_t pair = i % 4;
        if (pair < 3)
            return block[1 + pair];
        const __half d = __ushort_as_half(static_cast<uint16_t>(block[0] >> 16));
        const uint32_t* ints = block + MMQ_HEADER / 4 + 8 * pair;
        int sum[2] = {};
#pragma unroll
        for (int w = 0; w < 8; ++w)
            sum[w / 4] = __dp4a(0x01010101, static_cast<int>(ints[w]), sum[w / 4]);
        return __half_as_ushort(mmq_group_sum(d, sum[0])) |
               static_cast<uint32_t>(__half_as_ushort(mmq_group_sum(d, sum[1]))) << 16;
    }

    // The minimums of groups 2 * i and 2 * i + 1 of a block, f16.
    static __device__ __forceinline__ uint32_t minimums(const uint8_t* block, uint32_t i) {
        const uint32_t scales = load_u16(block + 2 * i);
        return __half_as_ushort(__float2half_rn(static_cast<float>(scales >> 4 & 15))) |
               static_cast<uint32_t>(__half_as_ushort(__float2half_rn(static_cast<float>(scales >> 12))))
                   << 16;
    }
};

struct Q3KTile : Q3K {
    static constexpr int OFFSET = 127;
    static constexpr int SCALES = 4;

    static __device__ __forceinline__ uint32_t bytes(const Share& share, int s) {
        // Four products at once: each byte of the result is in 0 .. 255, so what is borrowed on the way comes
        // back.
        const int factor = scale(share, s);
        return raised(share, s) * static_cast<uint32_t>(factor) +
               static_cast<uint32_t>(OFFSET - 4 * factor) * 0x01010101u;
    }

    static __device__ __forceinline__ float activation_scale(const uint32_t* block, int i) {
        return float_from_bits(block[i]);
    }

    // Word i of the derived: the sum of the ints 32 * i .. + 31.
    static __device__ __forceinline__ uint32_t derive(const uint32_t* staged, uint32_t i) {
        const uint32_t* ints = staged + i / 4 * (MMQ_BYTES / 4) + MMQ_HEADER / 4 + 8 * (i % 4);
        int sum = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w)
            sum = __dp4a(0x01010101, static_cast<int>(ints[w]), sum);
        return static_cast<uint32_t>(sum);
    }
};

// Row `row` of y over the 256 values of super-block b, and what is derived from it, for the first `cols`
// columns.
template <class Format, int COLS>
__device__ __forceinline__ void tile_stage(TileStage<COLS>& stage, const uint8_t* __restrict__ y,
                                           uint64_t y_rows, uint32_t b, uint32_t cols) {
    __syncthreads(); // the rows are known, and the super-block before is done with
    for (uint32_t i = threadIdx.x; i < cols * PIECES; i += TILE_THREADS) {
        const uint32_t col = i / PIECES, piece = i % PIECES, half = piece / (PIECES / 2);
        const uint8_t* block = y + ((2 * b + half) * y_rows + stage.row[col]) * MMQ_BYTES;
        reinterpret_cast<uint4*>(stage.words[col])[piece] =
            reinterpret_cast<const uint4*>(block)[piece % (PIECES / 2)];
    }
    __syncthreads();
    // Products take eight columns at a time: of those that do not exist, the ints must not overflow.
    for (uint32_t i = threadIdx.x; i < (cols + 7) / 8 * 64; i += TILE_THREADS)
        stage.derived[i / 8][i % 8] = i < cols * 8 ? Format::derive(stage.words[i / 8], i % 8) : 0;
    __syncthreads();
}

// The left operand of a warp: 16 rows of W over a super-block.
template <class Format>
struct TileOperand {
    uint32_t u[2][4][4]; // of the parts [half][s], the instruction's four words
    uint32_t minimums[4];
    float d[2], dmin[2]; // of the lane's rows g and g + 8

    __device__ __forceinline__ void load(const uint8_t* const (&row)[2], uint64_t b) {
        const uint32_t t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint8_t* block = row[r] + b * Format::BYTES;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const typename Format::Share share = Format::load(block, 8 * half + 2 * t + c);
#pragma unroll
                    for (int s = 0; s < 4; ++s)
                        u[half][s][2 * c + r] = Format::bytes(share, s);
                    d[r] = share.d;
                    if constexpr (Format::HAS_MIN)
                        dmin[r] = share.dmin;
                }
            if constexpr (Format::HAS_MIN) {
                minimums[r] = Format::minimums(block, t);
                minimums[2 + r] = Format::minimums(block, t + 4);
            }
        }
    }
};

// acc[16, 8] += the operand times columns first .. + 7 of the stage.
template <class Format, int COLS>
__device__ __forceinline__ void tile_multiply(float (&acc)[4], const TileOperand<Format>& a,
                                              const TileStage<COLS>& stage, uint32_t first) {
    constexpr int PARTS = 4 / Format::SCALES; // under one scale
    const uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    float scaled[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t at = half * (MMQ_BYTES / 4);
        const uint32_t* right = stage.words[first + g] + at + MMQ_HEADER / 4 + 2 * t;
#pragma unroll
        for (int i = 0; i < Format::SCALES; ++i) {
            int sum[4] = {};
            if constexpr (Format::OFFSET != 0) {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    sum[c] =
                        -Format::OFFSET *
                        static_cast<int>(stage.derived[first + 2 * t + c % 2][half * Format::SCALES + i]);
            }
#pragma unroll
            for (int s = i * PARTS; s < (i + 1) * PARTS; ++s) {
                const uint2 word = *reinterpret_cast<const uint2*>(right + 8 * s);
                mma_m16n8k32_u8s8(sum, a.u[half][s], {word.x, word.y});
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float d8 = Format::activation_scale(stage.words[first + 2 * t + c % 2] + at, i);
                scaled[c] = fmaf(d8, static_cast<float>(sum[c]), scaled[c]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
        acc[c] = fmaf(a.d[c / 2], scaled[c], acc[c]);
    if constexpr (Format::HAS_MIN) {
        float mins[4] = {};
        mma_m16n8k16_f16(mins, a.minimums, {stage.derived[first + g][t], stage.derived[first + g][t + 4]});
#pragma unroll
        for (int c = 0; c < 4; ++c)
            acc[c] = fmaf(-a.dmin[c / 2], mins[c], acc[c]);
    }
}

// Rows n0 .. n0 + 127 of W times the rows stage.row[0 .. cols) of y, y of y_rows rows; out(column, n, value)
// takes each result. CHECKED: rows from N on do not exist. Block: TILE_THREADS.
template <class Format, int COLS, bool CHECKED, class Out>
__device__ __forceinline__ void kquant_tile(TileStage<COLS>& stage, const uint8_t* __restrict__ W,
                                            uint64_t row_bytes, const uint8_t* __restrict__ y,
                                            uint64_t y_rows, uint32_t n0, uint32_t N, uint32_t K,
                                            uint32_t cols, Out out) {
    const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint32_t n[2] = {n0 + warp * TILE_WARP_ROWS + g, n0 + warp * TILE_WARP_ROWS + g + 8};
    const uint8_t* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) // beyond the matrix, its last row: nothing is kept of it
        row[r] = W + static_cast<uint64_t>(CHECKED && n[r] >= N ? N - 1 : n[r]) * row_bytes;

    float acc[COLS / 8][4] = {};
    for (uint32_t b = 0; b < K / KQUANT_VALUES; ++b) {
        TileOperand<Format> a;
        a.load(row, b);
        tile_stage<Format>(stage, y, y_rows, b, cols);
#pragma unroll
        for (int j = 0; j < COLS / 8; ++j)
            if (8u * j < cols)
                tile_multiply<Format>(acc[j], a, stage, 8 * j);
    }
#pragma unroll
    for (int j = 0; j < COLS / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint32_t col = 8 * j + 2 * t + c % 2;
            if (col < cols && (!CHECKED || n[c / 2] < N))
                out(col, n[c / 2], acc[j][c]);
        }
}

} // namespace metrale
