// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels that are wrong on purpose; test_faults.py says how the host runtime tells.
#include "common/types.cuh"

#include <stdexcept>

// --- races and barriers ---

extern "C" __global__ void reverse_without_barrier(const int* in, int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
    out[blockIdx.x * 64 + threadIdx.x] = tile[63 - threadIdx.x];
}

extern "C" __global__ void exit_before_barrier(unsigned* out) {
    if (threadIdx.x == 40)
        return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(unsigned* out) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void barrier_and_vote(unsigned* out) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        out[threadIdx.x] = __syncthreads_or(1);
}

extern "C" __global__ void barrier_and_shuffle(unsigned* out) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        out[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, 0);
}

// --- warp collectives ---

extern "C" __global__ void shuffle_after_exit(unsigned* out) {
    if (threadIdx.x >= 5 && threadIdx.x < 7)
        return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
}

extern "C" __global__ void ballot_full_mask(unsigned* out) {
    out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}

extern "C" __global__ void shuffle_outside_mask(unsigned* out) {
    out[threadIdx.x] = threadIdx.x < 8 ? __shfl_down_sync(0xffu, threadIdx.x, 4) : 0;
}

extern "C" __global__ void lane_outside_mask(unsigned* out) { out[threadIdx.x] = __ballot_sync(0xffu, 1); }

extern "C" __global__ void two_collectives(unsigned* out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
    else
        out[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, 0);
}

extern "C" __global__ void two_masks(unsigned* out) {
    out[threadIdx.x] = __ballot_sync(threadIdx.x < 16 ? 0xffffffffu : 0xffffff00u, 1);
}

extern "C" __global__ void odd_width(unsigned* out) {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, 0, 12);
}

// --- what a kernel may do to itself ---

extern "C" __global__ void throws(unsigned* out, unsigned thread) {
    __syncthreads();
    if (threadIdx.x == thread)
        throw std::runtime_error("on purpose");
    __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void traps() { __trap(); }

extern "C" __global__ void fails_in_one_block(unsigned block) {
    __syncthreads();
    if (blockIdx.x >= block)
        throw std::runtime_error("block " + std::to_string(blockIdx.x));
}

__device__ unsigned recurse(volatile unsigned* depth) {
    volatile unsigned frame[256];
    frame[0] = *depth + 1;
    return recurse(frame) + frame[0];
}
extern "C" __global__ void endless_recursion(unsigned* out, unsigned first) { out[0] = recurse(&first); }

extern "C" __global__ void large_local(unsigned* out, unsigned bytes) {
    auto* local = static_cast<volatile unsigned char*>(__builtin_alloca(bytes));
    local[0] = local[bytes - 1] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = local[0] + local[bytes - 1];
}

// --- overruns, for the sanitizers ---

// Out of line, where no compiler knows what `at` points into.
__attribute__((noinline)) __device__ void put(unsigned* at, unsigned n) { at[n] = threadIdx.x; }

extern "C" __global__ void overrun_global(unsigned* out, unsigned n) { put(out + threadIdx.x, n); }

extern "C" __global__ void overrun_dynamic_shared(unsigned* out, unsigned n) {
    METRALE_DYNAMIC_SHARED(unsigned, tile);
    put(tile + threadIdx.x, n);
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void overrun_static_shared(unsigned* out, unsigned n) {
    __shared__ unsigned tile[32];
    put(tile + threadIdx.x, n);
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void overrun_local(unsigned* out, unsigned n) {
    unsigned local[4] = {};
    __syncthreads();
    put(local, n);
    __syncthreads();
    out[threadIdx.x] = local[0];
}

extern "C" __global__ void signed_overflow(int* out, int n) {
    out[threadIdx.x] = n + static_cast<int>(threadIdx.x);
}
