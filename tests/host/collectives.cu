// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels that each show one thing which the host runtime does; test_collectives.py says what it ought to
// give.
#include "common/types.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ unsigned rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

#define SHUFFLES(type, suffix)                                                                               \
    extern "C" __global__ void shfl_##suffix(const type* in, type* out, int argument, int width) {           \
        out[rank()] = __shfl_sync(0xffffffffu, in[rank()], argument, width);                                 \
    }                                                                                                        \
    extern "C" __global__ void shfl_up_##suffix(const type* in, type* out, int argument, int width) {        \
        out[rank()] = __shfl_up_sync(0xffffffffu, in[rank()], argument, width);                              \
    }                                                                                                        \
    extern "C" __global__ void shfl_down_##suffix(const type* in, type* out, int argument, int width) {      \
        out[rank()] = __shfl_down_sync(0xffffffffu, in[rank()], argument, width);                            \
    }                                                                                                        \
    extern "C" __global__ void shfl_xor_##suffix(const type* in, type* out, int argument, int width) {       \
        out[rank()] = __shfl_xor_sync(0xffffffffu, in[rank()], argument, width);                             \
    }
SHUFFLES(int, i32)
SHUFFLES(unsigned, u32)
SHUFFLES(float, f32)
SHUFFLES(unsigned long long, u64)
SHUFFLES(double, f64)

#define REDUCE(type, name, call)                                                                             \
    extern "C" __global__ void name(const type* in, type* out, unsigned mask) {                              \
        if (mask >> threadIdx.x % 32 & 1)                                                                    \
            out[rank()] = call(mask, in[rank()]);                                                            \
    }
REDUCE(int, reduce_add_i32, __reduce_add_sync)
REDUCE(int, reduce_min_i32, __reduce_min_sync)
REDUCE(int, reduce_max_i32, __reduce_max_sync)
REDUCE(unsigned, reduce_add_u32, __reduce_add_sync)
REDUCE(unsigned, reduce_min_u32, __reduce_min_sync)
REDUCE(unsigned, reduce_max_u32, __reduce_max_sync)
REDUCE(unsigned, reduce_and_u32, __reduce_and_sync)
REDUCE(unsigned, reduce_or_u32, __reduce_or_sync)
REDUCE(unsigned, reduce_xor_u32, __reduce_xor_sync)

extern "C" __global__ void votes(const int* in, unsigned* ballot, int* any, int* all, unsigned mask) {
    if (!(mask >> threadIdx.x % 32 & 1))
        return;
    ballot[rank()] = __ballot_sync(mask, in[rank()]);
    any[rank()] = __any_sync(mask, in[rank()]);
    all[rank()] = __all_sync(mask, in[rank()]);
}

extern "C" __global__ void block_votes(const int* in, int* any, int* all, int* count) {
    any[rank()] = __syncthreads_or(in[rank()]);
    all[rank()] = __syncthreads_and(in[rank()]);
    count[rank()] = __syncthreads_count(in[rank()]);
}

// The two halves of a warp meet among themselves, in different numbers of rounds.
extern "C" __global__ void half_warps(unsigned* out) {
    const unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
    unsigned value = threadIdx.x;
    for (unsigned round = 0; round < 1 + threadIdx.x / 16; ++round)
        value = __reduce_add_sync(mask, value);
    out[threadIdx.x] = value;
}

// Two lanes meet first while the others already wait for them.
extern "C" __global__ void two_then_all(unsigned* out) {
    unsigned value = 1;
    if (threadIdx.x >= 30)
        value = __reduce_add_sync(0xc0000000u, value);
    out[threadIdx.x] = __reduce_add_sync(0xffffffffu, value);
}

// Threads from `stay` on leave; the others sum over the block.
extern "C" __global__ void leave_before_barrier(unsigned* out, unsigned stay) {
    __shared__ unsigned part[1024];
    if (threadIdx.x >= stay)
        return;
    part[threadIdx.x] = threadIdx.x;
    __syncthreads();
    unsigned sum = 0;
    for (unsigned i = 0; i < stay; ++i)
        sum += part[i];
    out[threadIdx.x] = sum;
}

extern "C" __global__ void leave_after_others_wait(unsigned* out) {
    if (threadIdx.x != 3)
        __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void leave_before_syncwarp(unsigned* out) {
    if (threadIdx.x >= 5)
        return;
    __syncwarp();
    out[threadIdx.x] = 1;
}

// One row for each thread: threadIdx, blockIdx, blockDim, gridDim.
extern "C" __global__ void indices(unsigned* out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned* row = out + 12 * (block * blockDim.x * blockDim.y * blockDim.z + rank());
    __syncthreads(); // every thread sleeps once
    const uint3 all[4] = {threadIdx, blockIdx, blockDim, gridDim};
    for (int i = 0; i < 4; ++i) {
        row[3 * i] = all[i].x;
        row[3 * i + 1] = all[i].y;
        row[3 * i + 2] = all[i].z;
    }
}

template <int N>
__device__ void reverse(const int* in, int* out) {
    __shared__ int tile[N];
    tile[threadIdx.x] = in[blockIdx.x * N + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * N + threadIdx.x] = tile[N - 1 - threadIdx.x];
}
#define REVERSE(n)                                                                                           \
    extern "C" __global__ void __launch_bounds__(n) reverse_##n(const int* __restrict__ in, int* out) {      \
        reverse<n>(in, out);                                                                                 \
    }
REVERSE(32)
REVERSE(256)

extern "C" __global__ void reverse_dynamic(const int* in, int* out) {
    METRALE_DYNAMIC_SHARED(int, tile);
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// What shared memory holds as a block begins; then it is left dirty.
extern "C" __global__ void first_sight(unsigned* fixed, unsigned* dynamic) {
    __shared__ unsigned a[64];
    METRALE_DYNAMIC_SHARED(unsigned, b);
    fixed[blockIdx.x * 64 + threadIdx.x] = a[threadIdx.x];
    dynamic[blockIdx.x * 64 + threadIdx.x] = b[threadIdx.x];
    a[threadIdx.x] = b[threadIdx.x] = 0;
}

extern "C" __global__ void atomics(unsigned* sum, unsigned* bits, int* low, int* high, float* real,
                                   unsigned* swaps) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, i);
    atomicOr(bits, 1u << i % 32);
    atomicMin(low, -static_cast<int>(i));
    atomicMax(high, static_cast<int>(i));
    atomicAdd(real, 0.5f);
    for (unsigned seen = *swaps, before; (before = atomicCAS(swaps, seen, seen + 2)) != seen;)
        seen = before;
}

extern "C" __global__ void integers(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* out) {
    const unsigned i = threadIdx.x, n = blockDim.x;
    const unsigned x = a[i], y = b[i], z = c[i];
    const unsigned results[] = {
        static_cast<unsigned>(__dp4a(static_cast<int>(x), static_cast<int>(y), static_cast<int>(z))),
        __dp4a(x, y, z),
        __byte_perm(x, y, z),
        __funnelshift_l(x, y, z),
        __funnelshift_r(x, y, z),
        static_cast<unsigned>(__popc(x)),
        static_cast<unsigned>(__clz(static_cast<int>(x))),
        static_cast<unsigned>(__ffs(static_cast<int>(x))),
        __brev(x),
        __umulhi(x, y),
        min(x, y),
        static_cast<unsigned>(max(static_cast<int>(x), static_cast<int>(y))),
    };
    for (unsigned r = 0; r < sizeof results / sizeof *results; ++r)
        out[r * n + i] = results[r];
}

extern "C" __global__ void halves(const __half* a, const __half* b, const __half* c, __half* out,
                                  int* nearest) {
    const unsigned i = threadIdx.x;
    out[i] = __hfma(a[i], b[i], c[i]);
    const __half2 pair = __shfl_xor_sync(0xffffffffu, __halves2half2(a[i], b[i]), 1);
    out[32 + i] = pair.x;
    out[64 + i] = pair.y;
    nearest[i] = __half2int_rn(a[i]);
}

extern "C" __global__ void rounding(const float* in, int* nearest, int* truncated, unsigned* positive) {
    nearest[threadIdx.x] = __float2int_rn(in[threadIdx.x]);
    truncated[threadIdx.x] = __float2int_rz(in[threadIdx.x]);
    positive[threadIdx.x] = __float2uint_rn(in[threadIdx.x]);
}

// a [16, 16], b [8, 16], c and d [16, 8], all row-major; one warp.
template <class Half, class Mma>
__device__ void mma_halves(const Half* a, const Half* b, const float* c, float* d, Mma mma) {
    const unsigned group = threadIdx.x / 4, quad = threadIdx.x % 4;
    const auto pair = [](const Half* at) { return *reinterpret_cast<const uint32_t*>(at); };
    uint32_t x[4], y[2];
    for (unsigned i = 0; i < 4; ++i)
        x[i] = pair(a + (group + 8 * (i & 1)) * 16 + 2 * quad + 8 * (i >> 1));
    for (unsigned i = 0; i < 2; ++i)
        y[i] = pair(b + group * 16 + 2 * quad + 8 * i);
    float sum[4];
    for (unsigned i = 0; i < 4; ++i)
        sum[i] = c[(group + 8 * (i >> 1)) * 8 + 2 * quad + (i & 1)];
    mma(sum, x, y);
    for (unsigned i = 0; i < 4; ++i)
        d[(group + 8 * (i >> 1)) * 8 + 2 * quad + (i & 1)] = sum[i];
}

extern "C" __global__ void mma_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c,
                                    float* d) {
    mma_halves(a, b, c, d,
               [](auto& sum, auto& x, auto& y) { metrale::host::mma_m16n8k16_bf16(sum, x, y, sum); });
}

extern "C" __global__ void mma_f16(const __half* a, const __half* b, const float* c, float* d) {
    mma_halves(a, b, c, d,
               [](auto& sum, auto& x, auto& y) { metrale::host::mma_m16n8k16_f16(sum, x, y, sum); });
}

// a [16, 32], b [8, 32], c and d [16, 8], all row-major; one warp.
extern "C" __global__ void mma_u8s8(const uint8_t* a, const int8_t* b, const int* c, int* d) {
    const unsigned group = threadIdx.x / 4, quad = threadIdx.x % 4;
    const auto word = [](const auto* at) { return *reinterpret_cast<const uint32_t*>(at); };
    uint32_t x[4], y[2];
    for (unsigned i = 0; i < 4; ++i)
        x[i] = word(a + (group + 8 * (i & 1)) * 32 + 4 * quad + 16 * (i >> 1));
    for (unsigned i = 0; i < 2; ++i)
        y[i] = word(b + group * 32 + 4 * quad + 16 * i);
    int sum[4];
    for (unsigned i = 0; i < 4; ++i)
        sum[i] = c[(group + 8 * (i >> 1)) * 8 + 2 * quad + (i & 1)];
    metrale::host::mma_m16n8k32_u8s8(sum, x, y, sum);
    for (unsigned i = 0; i < 4; ++i)
        d[(group + 8 * (i >> 1)) * 8 + 2 * quad + (i & 1)] = sum[i];
}

struct Pair {
    int first;
    double second;
};
using Count = unsigned short;

extern "C" __global__ void every_kind(double* out, bool a, int8_t b, Count c, uint32_t d, int e,
                                      unsigned long long f, long long g, float h, double i, Pair j) {
    const double values[] = {double(a), double(b), double(c), double(d),       double(e), double(f),
                             double(g), double(h), i,         double(j.first), j.second};
    for (unsigned n = 0; n < sizeof values / sizeof *values; ++n)
        out[n] = values[n];
}

struct alignas(16) Overaligned {
    float values[8];
};

extern "C" __global__ void overaligned(float* out, Overaligned argument) {
    for (unsigned n = 0; n < 8; ++n)
        out[n] = argument.values[n];
    out[8] = reinterpret_cast<uintptr_t>(&argument) % alignof(Overaligned);
}

extern "C" __global__ void no_parameters() {}
