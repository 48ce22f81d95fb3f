// SPDX-License-Identifier: MIT OR Apache-2.0
//
// C[m, n] = sum over k of A[m, k] * B[n, k]: A bf16 [M, K], B bf16 [N, K], C bf16 or f32 [M, N], all
// row-major, of any M, N, K and alignment. A row's bits depend neither on M nor on the other rows.
#include "common/mma.cuh"
#include "common/router.cuh"
#include "common/tile.cuh"

using namespace metrale;

constexpr uint32_t TILE = 128; // rows of A and of B a block takes
constexpr uint32_t GEMM_THREADS = 256;
constexpr int GEMM_STAGES = 3;
constexpr uint32_t GEMM_WARPS_N = 4, WARP_M = TILE / 2, WARP_N = TILE / GEMM_WARPS_N;
constexpr uint32_t TILE_UINT4 = TILE * TILE_PIECES;

__device__ __forceinline__ void store_pair(__nv_bfloat16* c, float x, float y, bool both, bool aligned) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    if (both && aligned) {
        *reinterpret_cast<__nv_bfloat162*>(c) = pair;
        return;
    }
    c[0] = pair.x;
    if (both)
        c[1] = pair.y;
}

__device__ __forceinline__ void store_pair(float* c, float x, float y, bool both, bool aligned) {
    if (both && aligned) {
        *reinterpret_cast<float2*>(c) = {x, y};
        return;
    }
    c[0] = x;
    if (both)
        c[1] = y;
}

// On the tensor cores: the sum over 64 k at a time in four mma, in order. A block of eight warps does 128 x
// 128 outputs, a warp 64 x 32; while it multiplies the next two tiles are on their way. Grid (ceil(M / 128),
// ceil(N / 128)), block 256, GEMM_STAGES * 32768 bytes of dynamic shared memory.
template <bool WIDE, class Output>
__device__ __forceinline__ void gemm(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                                     Output* __restrict__ C, uint32_t M, uint32_t N, uint32_t K,
                                     uint4* shared) {
    const uint32_t first_m = blockIdx.x * TILE, first_n = blockIdx.y * TILE;
    const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint32_t warp_m = warp / GEMM_WARPS_N * WARP_M, warp_n = warp % GEMM_WARPS_N * WARP_N;
    const uint32_t tiles = (K + TILE_K - 1) / TILE_K;
    const auto copy = [&](uint32_t tile) {
        if (tile < tiles) {
            uint4* to = shared + tile % GEMM_STAGES * 2 * TILE_UINT4;
            copy_tile<WIDE, TILE, GEMM_THREADS>(to, A, first_m, M, tile * TILE_K, K);
            copy_tile<WIDE, TILE, GEMM_THREADS>(to + TILE_UINT4, B, first_n, N, tile * TILE_K, K);
        }
        copy_async_commit();
    };

    float sums[WARP_M / 16][WARP_N / 8][4] = {};
    for (int tile = 0; tile < GEMM_STAGES - 1; ++tile)
        copy(tile);
    for (uint32_t tile = 0; tile < tiles; ++tile) {
        copy_async_wait<GEMM_STAGES - 2>();
        __syncthreads(); // all see this tile, and none reads the one before, which the next copy overwrites
        copy(tile + GEMM_STAGES - 1);
        uint4* left = shared + tile % GEMM_STAGES * 2 * TILE_UINT4;
        uint4* right = left + TILE_UINT4;
#pragma unroll
        for (uint32_t k = 0; k < TILE_K; k += 16) {
            uint32_t a[WARP_M / 16][4], b[WARP_N / 16][2][2];
#pragma unroll
            for (uint32_t i = 0; i < WARP_M / 16; ++i)
                load_left(a[i], left, warp_m + 16 * i, k);
#pragma unroll
            for (uint32_t j = 0; j < WARP_N / 16; ++j)
                load_right(b[j], right, warp_n + 16 * j, k);
#pragma unroll
            for (uint32_t i = 0; i < WARP_M / 16; ++i)
#pragma unroll
                for (uint32_t j = 0; j < WARP_N / 8; ++j)
                    mma_m16n8k16_bf16(sums[i][j], a[i], b[j / 2][j % 2]);
        }
    }

    const bool aligned = N % 2 == 0 && reinterpret_cast<uint64_t>(C) % (2 * sizeof(Output)) == 0;
#pragma unroll
    for (uint32_t i = 0; i < WARP_M / 16; ++i)
#pragma unroll
        for (uint32_t j = 0; j < WARP_N / 8; ++j)
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t m = first_m + warp_m + 16 * i + g + 8 * half;
                const uint32_t n = first_n + warp_n + 8 * j + 2 * t;
                if (m < M && n < N)
                    store_pair(C + static_cast<uint64_t>(m) * N + n, sums[i][j][2 * half],
                               sums[i][j][2 * half + 1], n + 1 < N, aligned);
            }
}

template <class Output>
__device__ __forceinline__ void gemm_of_any_width(const __nv_bfloat16* __restrict__ A,
                                                  const __nv_bfloat16* __restrict__ B, Output* __restrict__ C,
                                                  uint32_t M, uint32_t N, uint32_t K) {
    METRALE_DYNAMIC_SHARED(uint4, shared);
    if (wide_rows(A, K) && wide_rows(B, K))
        gemm<true>(A, B, C, M, N, K, shared);
    else
        gemm<false>(A, B, C, M, N, K, shared);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    dense_gemm_bf16(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                    __nv_bfloat16* __restrict__ C, uint32_t M, uint32_t N, uint32_t K) {
    gemm_of_any_width(A, B, C, M, N, K);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    dense_gemm_bf16_tc_f32out(const __nv_bfloat16* __restrict__ A, const __nv_bfloat16* __restrict__ B,
                              float* __restrict__ C, uint32_t M, uint32_t N, uint32_t K) {
    gemm_of_any_width(A, B, C, M, N, K);
}

// Scalar, in the order of common/router.cuh: the bits of moe_v41_router_gemv_f32out for each eight rows of A.
// One warp an output row of B: grid (ceil(N / 4), 1..ceil(M / 8)), block 128.
extern "C" __global__ void dense_gemm_bf16_f32out(const __nv_bfloat16* __restrict__ A,
                                                  const __nv_bfloat16* __restrict__ B, float* __restrict__ C,
                                                  uint32_t M, uint32_t N, uint32_t K) {
    constexpr uint64_t ROWS = 8; // that share a pass over B
    const uint32_t n = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (n >= N)
        return;
    const bool wide = wide_rows(A, K) && wide_rows(B, K);
    for (uint64_t m = blockIdx.y * ROWS; m < M; m += gridDim.y * ROWS) {
        const uint32_t rows = M - m < ROWS ? M - m : ROWS;
        if (wide)
            router_output<true>(A + m * K, B, C + m * N, n, rows, N, K);
        else
            router_output<false>(A + m * K, B, C + m * N, n, rows, N, K);
    }
}
