// SPDX-License-Identifier: MIT OR Apache-2.0
//
// C[n] = bf16(sum over k of A[k] * B[n, k]): A [K], B [N, K] row-major, C [N], all bf16. Any N, K and
// alignment, with one order of summation (common/gemv.cuh).
//
// A block takes every gridDim.x-th 16 rows. Each warp copies its spans to shared memory in halves, the next
// halves, of these rows or of the next ones, while it multiplies. Grid 1..ceil(N / 16), block 256,
// GEMV_STAGES * 32768 bytes of dynamic shared memory.
#include "common/async.cuh"
#include "common/gemv.cuh"

using namespace metrale;

constexpr uint32_t GEMV_STAGES = 3;
constexpr uint32_t HALF_STEPS = GEMV_STEPS / 2;
constexpr uint32_t HALF_PIECES = GEMV_SPAN / 16; // of 16 bytes, in a row of half a span

// Where in a stage's rows a piece lies: eight lanes that read a step of two rows fall on all banks.
__device__ __forceinline__ uint4* half_piece(uint4* stage, uint32_t row, uint32_t piece) {
    return stage + row * HALF_PIECES + (piece ^ row % 2 * 4);
}

// Half of a span from k on: steps 0..3 or 4..7, which take 64 k of either 128. Zeros beyond W.
template <bool WIDE>
__device__ __forceinline__ void copy_half(uint4* stage, const __nv_bfloat16* __restrict__ W, uint32_t n,
                                          uint32_t k, uint32_t half, uint32_t N, uint32_t K) {
    const uint32_t piece = threadIdx.x % HALF_PIECES, first = threadIdx.x % WARP / HALF_PIECES;
    const uint32_t at = k + piece / 8 * 128 + half * 64 + piece % 8 * 8;
#pragma unroll
    for (uint32_t i = 0; i < GEMV_ROWS; i += WARP / HALF_PIECES) {
        const uint32_t row = first + i;
        const bool inside = n + row < N && at < K;
        const __nv_bfloat16* from = W + (inside ? static_cast<uint64_t>(n + row) * K + at : 0);
        uint4* to = half_piece(stage, row, piece);
        if constexpr (WIDE)
            copy_async<16>(to, from, inside ? 16 : 0);
        else
            *to = load_bf16x8<false>(from, 0, inside ? K - at : 0);
    }
}

template <bool WIDE>
__device__ __forceinline__ void gemv(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ W,
                                     __nv_bfloat16* __restrict__ out, uint32_t N, uint32_t K,
                                     float (&partial)[GEMV_WARPS][GEMV_ROWS]) {
    METRALE_DYNAMIC_SHARED(uint4, shared); // [warp][stage][row][piece]
    constexpr uint32_t STAGE = GEMV_ROWS * HALF_PIECES;
    const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint32_t step_n = gridDim.x * GEMV_ROWS, first_k = warp * GEMV_SPAN;
    uint4* stages = shared + warp * GEMV_STAGES * STAGE;

    uint32_t next_n = first_k < K ? blockIdx.x * GEMV_ROWS : N, next_k = first_k, next_half = 0,
             next = 0; // to copy
    const auto copy = [&]() {
        if (next_n < N)
            copy_half<WIDE>(stages + next * STAGE, W, next_n, next_k, next_half, N, K);
        copy_async_commit();
        next = next + 1 == GEMV_STAGES ? 0 : next + 1;
        next_half ^= 1;
        if (next_half == 0) {
            next_k += GEMV_WARPS * GEMV_SPAN;
            if (next_k >= K) {
                next_k = first_k;
                next_n += step_n;
            }
        }
    };

    for (uint32_t i = 0; i < GEMV_STAGES - 1; ++i)
        copy();
    uint32_t stage = 0;
    for (uint32_t n = blockIdx.x * GEMV_ROWS; n < N; n += step_n) {
        GemvSums sums;
        for (uint32_t k = first_k; k < K; k += GEMV_WARPS * GEMV_SPAN) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                copy_async_wait<GEMV_STAGES - 2>();
                __syncwarp(); // all lanes' copies, and none reads the stage before, which the next copy
                              // overwrites
                copy();
                uint4* rows = stages + stage * STAGE;
                stage = stage + 1 == GEMV_STAGES ? 0 : stage + 1;
#pragma unroll
                for (uint32_t step = 0; step < HALF_STEPS; ++step) {
                    const uint32_t at = gemv_k(step, t), piece = at / 128 * 8 + at % 128 / 8;
                    const uint4 b = load_bf16x8<WIDE>(x, k + 64 * half + at, K);
                    sums.add(*half_piece(rows, g, piece), *half_piece(rows, g + 8, piece), b);
                }
            }
        }
        sums.store(partial, out, n, N);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    dense_gemv_bf16(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                    __nv_bfloat16* __restrict__ C, uint32_t N, uint32_t K) {
    __shared__ float partial[GEMV_WARPS][GEMV_ROWS];
    if (aligned16(A) && wide_rows(B, K))
        gemv<true>(A, B, C, N, K, partial);
    else
        gemv<false>(A, B, C, N, K, partial);
}
