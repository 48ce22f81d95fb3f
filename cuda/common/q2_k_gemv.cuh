// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The GEMV of common/gemv.cuh over raw Q2_K blocks, each weight rounded to bf16: the same products in the
// same order.
//
// A block of threads takes every gridDim.x-th 16 rows. It copies them to shared memory in chunks of one
// super-block a warp, the next chunks, of these rows or of its next ones, while it multiplies. In two steps a
// lane has a group of either of its rows: it forms the group's four values and picks its weights from them.
#pragma once

#include "common/async.cuh"
#include "common/gemv.cuh"
#include "common/q2_k_bf16.cuh"

namespace metrale {

constexpr uint32_t Q2_K_CHUNK = GEMV_WARPS * Q2K::BYTES; // of a row
constexpr int Q2_K_STAGES = 4;
static_assert(GEMV_SPAN == KQUANT_VALUES && Q2_K_CHUNK % 16 == 0);

// In dynamic shared memory; x bf16 [K] lies behind it.
struct Q2KGemvShared {
    alignas(16) uint8_t rows[Q2_K_STAGES][GEMV_ROWS][Q2_K_CHUNK];
    float partial[GEMV_WARPS][GEMV_ROWS];

    __device__ __forceinline__ uint4* x() { return reinterpret_cast<uint4*>(this + 1); }
};
constexpr uint32_t Q2_K_STAGE = sizeof(Q2KGemvShared::rows[0]);

// Has the compiler keep a value in a register, where it would compute it anew in each turn of a loop.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
#ifndef METRALE_HOST
    asm volatile("" : "+r"(value));
#endif
    return value;
}

// A thread's part of the copies, BYTES at a time: its pieces of one of 16 rows, chunk after chunk of all that
// the block takes. The other threads of a warp's half do the row's other pieces.
template <int BYTES>
class Q2KCopies {
    static constexpr uint32_t STEP = GEMV_WARPS * WARP / GEMV_ROWS * BYTES;

    const uint8_t* from;
    uint32_t row, begin, to, first = 0; // begin: of the pieces in a chunk; first: of the chunk in the row

public:
    __device__ __forceinline__ Q2KCopies(const uint8_t* W, uint32_t row_bytes)
        : begin(kept(threadIdx.x * BYTES % STEP)) {
        row = threadIdx.x * BYTES / STEP;
        to = kept(row * Q2_K_CHUNK + begin);
        row += blockIdx.x * GEMV_ROWS;
        from = W + static_cast<uint64_t>(row) * row_bytes + begin;
    }

    // The next chunk, as far as there is one.
    __device__ __forceinline__ void next(uint8_t* stage, uint32_t N, uint32_t row_bytes) {
        if (row < N) {
            const uint32_t left = row_bytes - first, end = left < Q2_K_CHUNK ? left : Q2_K_CHUNK;
#pragma unroll(BYTES == 16 ? 3 : 1)
            for (uint32_t i = 0; i < Q2_K_CHUNK; i += STEP)
                if (i + begin < end)
                    copy_async<BYTES>(stage + to + i, from + i);
        }
        copy_async_commit();
        first += Q2_K_CHUNK;
        from += Q2_K_CHUNK;
        if (first >= row_bytes) {
            row += gridDim.x * GEMV_ROWS;
            from += static_cast<uint64_t>(gridDim.x * GEMV_ROWS) * row_bytes - first;
            first = 0;
        }
    }
};

// Where a lane finds its share of a super-block: groups 8 * (t / 2) + t % 2 + {0, 2, 4, 6}, which are those
// of bytes 16t .. 16t + 16.
struct Q2KPlaces {
    uint32_t scales, even, odd, byte[2]; // even, odd: the words of those steps, where gemv_k has them

    __device__ __forceinline__ explicit Q2KPlaces(uint32_t t)
        : scales(kept(8 * (t / 2))), even(kept(16 + 16 * t + 8 * (t / 2))),
          odd(kept(16 + 16 * t + 8 * (1 - t / 2))), byte{kept(0x7440 + t % 2), kept(0x7442 + t % 2)} {}
};

struct Q2KLane {
    uint32_t q[4], scales[2]; // of its groups the scales' bytes are t % 2 and t % 2 + 2
    float d, dmin_16th;

    __device__ __forceinline__ Q2KLane(const uint8_t* block, const Q2KPlaces& places) {
        const uint32_t d_dmin = load_u32(block + 80);
        d = f32_from_f16(d_dmin & 0xffff);
        dmin_16th = f32_from_f16(d_dmin >> 16) * 0.0625f;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            q[i] = load_u32(block + places.even + 4 * i);
            q[2 + i] = load_u32(block + places.odd + 4 * i);
            scales[i] = load_u32(block + places.scales + 4 * i);
        }
    }

    // Of group p of the four. The byte and each of its nibbles as a float without a conversion: 2^23 + byte
    // has the byte in its last bits.
    __device__ __forceinline__ uint2 values(uint32_t p, const Q2KPlaces& places) const {
        constexpr uint32_t TWO_23 = 0x4b000000;
        const uint32_t byte = permute_bytes(scales[p / 2], TWO_23, places.byte[p % 2]);
        const float scale = float_from_bits(byte & ~0xf0u) - 8388608.0f;
        const float min_16 = float_from_bits(byte & ~0x0fu) - 8388608.0f;
        return q2_k_values(d, dmin_16th, scale, min_16);
    }
};

// Grid: any number of blocks. Block: GEMV_WARPS warps. fill_x() has the block write x to shared.x().
template <int BYTES, class FillX>
__device__ __forceinline__ void q2_k_gemv(Q2KGemvShared& shared, FillX fill_x, const uint8_t* __restrict__ W,
                                          __nv_bfloat16* __restrict__ out, uint32_t N, uint32_t K) {
    const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint32_t super_blocks = K / KQUANT_VALUES, row_bytes = super_blocks * Q2K::BYTES;

    uint8_t* const rows = shared.rows[0][0];
    Q2KCopies<BYTES> copies(W, row_bytes);
    for (uint32_t i = 0; i < Q2_K_STAGES - 1; ++i)
        copies.next(rows + i * Q2_K_STAGE, N, row_bytes);
    fill_x(); // the barrier before the first chunk is x's too

    const Q2KPlaces places(t);
    const uint32_t lane = kept(g * Q2_K_CHUNK + warp * Q2K::BYTES);
    const uint32_t even_x = kept(gemv_k(0, t) / 8), odd_x = kept(gemv_k(1, t) / 8);
    uint32_t before = (Q2_K_STAGES - 1) * Q2_K_STAGE, stage = 0; // bytes
    for (uint32_t n = blockIdx.x * GEMV_ROWS; n < N; n += gridDim.x * GEMV_ROWS) {
        GemvSums sums;
        for (uint32_t block = warp; block - warp < super_blocks; block += GEMV_WARPS) {
            copy_async_wait<Q2_K_STAGES - 2>();
            __syncthreads(); // all see this chunk, and none reads the one before, which the next copy
                             // overwrites
            copies.next(rows + before, N, row_bytes);
            const uint8_t* at = rows + stage + lane;
            before = stage;
            stage = stage == (Q2_K_STAGES - 1) * Q2_K_STAGE ? 0 : stage + Q2_K_STAGE;
            if (block >= super_blocks)
                continue;
            const Q2KLane low(at, places), high(at + 8 * Q2_K_CHUNK, places);
            const uint4 *even = shared.x() + block * (GEMV_SPAN / 8) + even_x,
                        *odd = shared.x() + block * (GEMV_SPAN / 8) + odd_x;
#pragma unroll
            for (uint32_t p = 0; p < 4; ++p) {
                const uint2 low_values = low.values(p, places), high_values = high.values(p, places);
                const auto add = [&](uint32_t i, const uint4& b) {
                    const auto pick = [&](const uint2& values, const Q2KLane& weights) {
                        const uint2 first = q2_k_pick(values, weights.q[i] >> 2 * p & 0x03030303u);
                        const uint2 second = q2_k_pick(values, weights.q[i + 1] >> 2 * p & 0x03030303u);
                        return uint4{first.x, first.y, second.x, second.y};
                    };
                    sums.add(pick(low_values, low), pick(high_values, high), b);
                };
                add(0, even[4 * p]);
                add(2, odd[4 * p]);
            }
        }
        sums.store(shared.partial, out, n, N);
    }
}

// q2_k_gemv with the widest copies that W allows.
template <class FillX>
__device__ __forceinline__ void
q2_k_gemv_of_any_width(Q2KGemvShared& shared, FillX fill_x, const uint8_t* __restrict__ W,
                       __nv_bfloat16* __restrict__ out, uint32_t N, uint32_t K) {
    if (aligned16(W) && K / KQUANT_VALUES * Q2K::BYTES % 16 == 0)
        q2_k_gemv<16>(shared, fill_x, W, out, N, K);
    else
        q2_k_gemv<4>(shared, fill_x, W, out, N, K);
}

} // namespace metrale
