// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Tiles of 64 bf16 a row in shared memory, and the fragments of mma_m16n8k16_bf16 from them. The eight
// 16-byte pieces of a row lie in an order of its own, so that the same piece of eight rows falls on all
// banks.
#pragma once

#include "common/async.cuh"
#include "common/vec8.cuh"
#include "common/warp.cuh"

namespace metrale {

constexpr uint32_t TILE_K = 64;
constexpr uint32_t TILE_PIECES = TILE_K / 8;

__device__ __forceinline__ uint4* tile_piece(uint4* tile, uint32_t row, uint32_t piece) {
    return tile + row * TILE_PIECES + (piece ^ row % TILE_PIECES);
}

// Row first + r, columns k .. k + 64 of X [limit, K] to row r of the tile, for r < ROWS; zeros beyond X.
// THREADS threads.
template <bool WIDE, uint32_t ROWS, uint32_t THREADS>
__device__ __forceinline__ void copy_tile(uint4* tile, const __nv_bfloat16* __restrict__ X, uint32_t first,
                                          uint32_t limit, uint32_t k, uint32_t K) {
    static_assert(ROWS * TILE_PIECES % THREADS == 0);
#pragma unroll
    for (uint32_t i = 0; i < ROWS * TILE_PIECES; i += THREADS) {
        const uint32_t r = (i + threadIdx.x) / TILE_PIECES, piece = (i + threadIdx.x) % TILE_PIECES;
        const uint32_t row = first + r, at = k + 8 * piece;
        const bool inside = row < limit && at < K;
        const __nv_bfloat16* from = X + (inside ? static_cast<uint64_t>(row) * K + at : 0);
        uint4* to = tile_piece(tile, r, piece);
        if constexpr (WIDE)
            copy_async<16>(to, from, inside ? 16 : 0);
        else
            *to = load_bf16x8<false>(from, 0, inside ? K - at : 0);
    }
}

// ldmatrix.x4: four 8 x 8 matrices of bf16. row(l) is where row l % 8 of matrix l / 8 lies, 16 bytes. A lane
// gets of each matrix the elements 2t, 2t + 1 of row g, with g = lane / 4 and t = lane % 4.
template <class Row>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], Row row) {
    const uint32_t lane = threadIdx.x % WARP;
#ifdef METRALE_HOST
    for (uint32_t i = 0; i < 4; ++i)
        memcpy(&to[i], reinterpret_cast<const char*>(row(8 * i + lane / 4)) + 4 * (lane % 4), 4);
#else
    const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row(lane)));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
#endif
}

// The left operand of an mma: rows row .. row + 16, k .. k + 16, k a multiple of 16.
__device__ __forceinline__ void load_left(uint32_t (&a)[4], uint4* tile, uint32_t row, uint32_t k) {
    load_matrices(a, [=](uint32_t l) { return tile_piece(tile, row + l % 16, k / 8 + l / 16); });
}

// The right operands of two: rows row .. row + 8 of the tile are the columns of the first, the next eight the
// second's.
__device__ __forceinline__ void load_right(uint32_t (&b)[2][2], uint4* tile, uint32_t row, uint32_t k) {
    uint32_t both[4];
    load_matrices(both,
                  [=](uint32_t l) { return tile_piece(tile, row + l % 8 + l / 16 * 8, k / 8 + l / 8 % 2); });
    b[0][0] = both[0];
    b[0][1] = both[1];
    b[1][0] = both[2];
    b[1][1] = both[3];
}

} // namespace metrale
