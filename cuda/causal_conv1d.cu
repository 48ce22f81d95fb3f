// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A depthwise causal convolution of width 4 with SiLU, up to 17 tokens at a time onto a running window.
//
// Token t of sequence b, channel c:
//     window <- window[1:], x[b, t, c]
//     out[b, t, c] = bf16(silu(bias[c] + sum over i of window[i] * weight[c, i]))
// x, out bf16 [batch, N, dim]; weight bf16 [dim, width], width 4; bias f32 [dim] or null. A window is f32
// [dim, 4], oldest first, 16-byte aligned. The sum starts with the bias and goes from oldest to newest, one
// fmaf a step.
//
//     causal_conv1d_update_chunkN: state [batch] windows before, on return after all tokens; state_mid [N -
//     1, batch]
//         windows, after each other token; for N = 1 null
//     causal_conv1d_verify: no window is written; N is `tokens`
//     causal_conv1d_commit: state after the first accepted[b] (0 to tokens) inputs; 0 writes nothing
//
// In the _table forms state is one pointer a sequence, and state_mid one such table for each token,
// CONV_TABLE_SEQS entries apart. One thread a channel: grid (ceil(dim / 256), batch), block 256.
#include <cuda_bf16.h>

#include "common/math.cuh"

using namespace metrale;

constexpr uint32_t CONV_TABLE_SEQS = 32;

namespace {

// Where a thread's channel lies: in a window, and in row t of x and out.
struct Channel {
    uint32_t c, b, tokens, batch, dim;
    __device__ Channel(uint32_t tokens, uint32_t batch, uint32_t dim)
        : c(blockIdx.x * blockDim.x + threadIdx.x), b(blockIdx.y), tokens(tokens), batch(batch), dim(dim) {}
    __device__ bool exists() const { return c < dim && b < batch; }
    __device__ uint64_t row(uint32_t t) const { return (static_cast<uint64_t>(b) * tokens + t) * dim + c; }
};

// The channel's window of a sequence: of those that lie behind each other, or of a table.
__device__ __forceinline__ float4* window_of(float* states, const Channel& at) {
    return reinterpret_cast<float4*>(states) + static_cast<uint64_t>(at.b) * at.dim + at.c;
}
__device__ __forceinline__ float4* window_of(float* const* states, const Channel& at) {
    return reinterpret_cast<float4*>(states[at.b]) + at.c;
}

// The same after token t.
__device__ __forceinline__ float4* middle_of(float* states, uint32_t t, const Channel& at) {
    return window_of(states + static_cast<uint64_t>(t) * at.batch * at.dim * 4, at);
}
__device__ __forceinline__ float4* middle_of(float* const* states, uint32_t t, const Channel& at) {
    return window_of(states + t * CONV_TABLE_SEQS, at);
}

__device__ __forceinline__ float4 shifted(const float4& window, __nv_bfloat16 x) {
    return {window.y, window.z, window.w, __bfloat162float(x)};
}

// each(t, window): after token t.
template <class Each>
__device__ __forceinline__ void convolve(float4 window, const __nv_bfloat16* __restrict__ x,
                                         const __nv_bfloat16* __restrict__ weight,
                                         const float* __restrict__ bias, __nv_bfloat16* __restrict__ out,
                                         uint32_t width, const Channel& at, Each each) {
    const __nv_bfloat16* taps = weight + static_cast<uint64_t>(at.c) * width;
    const float w0 = __bfloat162float(taps[0]), w1 = __bfloat162float(taps[1]);
    const float w2 = __bfloat162float(taps[2]), w3 = __bfloat162float(taps[3]);
    const float first = bias ? bias[at.c] : 0.0f;
#pragma unroll 4
    for (uint32_t t = 0; t < at.tokens; ++t) {
        window = shifted(window, x[at.row(t)]);
        const float y = fmaf(window.w, w3, fmaf(window.z, w2, fmaf(window.y, w1, fmaf(window.x, w0, first))));
        out[at.row(t)] = __float2bfloat16_rn(silu(y));
        each(t, window);
    }
}

template <class States>
__device__ __forceinline__ void update(States state, const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                       const float* bias, __nv_bfloat16* out, States state_mid,
                                       uint32_t width, const Channel& at) {
    if (!at.exists())
        return;
    float4* last = window_of(state, at);
    convolve(*last, x, weight, bias, out, width, at, [&](uint32_t t, const float4& window) {
        *(t + 1 < at.tokens ? middle_of(state_mid, t, at) : last) = window;
    });
}

template <class States>
__device__ __forceinline__ void commit(States state, const __nv_bfloat16* x, const int32_t* accepted,
                                       const Channel& at) {
    if (!at.exists())
        return;
    const int32_t tokens = static_cast<int32_t>(at.tokens), wanted = accepted[at.b];
    const int32_t count = wanted < tokens ? wanted : tokens;
    if (count <= 0)
        return;
    float4* window = window_of(state, at);
    float4 next = *window;
    for (int32_t t = count > 4 ? count - 4 : 0; t < count; ++t)
        next = shifted(next, x[at.row(t)]);
    *window = next;
}

} // namespace

#define UPDATE(name, States, mid, tokens)                                                                    \
    extern "C" __global__ void name(States state, const __nv_bfloat16* x, const __nv_bfloat16* weight,       \
                                    const float* METRALE_NULLABLE bias, __nv_bfloat16* out, States mid,      \
                                    uint32_t batch, uint32_t dim, uint32_t width) {                          \
        update<States>(state, x, weight, bias, out, state_mid, width, Channel(tokens, batch, dim));          \
    }
#define UPDATES(tokens, mid)                                                                                 \
    UPDATE(causal_conv1d_update_chunk##tokens, float*, mid, tokens)                                          \
    UPDATE(causal_conv1d_update_chunk##tokens##_table, float* const*, mid, tokens)

UPDATES(1, METRALE_NULLABLE state_mid)
UPDATES(2, state_mid)
UPDATES(3, state_mid)
UPDATES(4, state_mid)
UPDATES(5, state_mid)
UPDATES(6, state_mid)
UPDATES(7, state_mid)
UPDATES(8, state_mid)
UPDATES(9, state_mid)
UPDATES(10, state_mid)
UPDATES(11, state_mid)
UPDATES(12, state_mid)
UPDATES(13, state_mid)
UPDATES(14, state_mid)
UPDATES(15, state_mid)
UPDATES(16, state_mid)
UPDATES(17, state_mid)

#define VERIFY(name, States)                                                                                 \
    extern "C" __global__ void name(States state, const __nv_bfloat16* x, const __nv_bfloat16* weight,       \
                                    const float* METRALE_NULLABLE bias, __nv_bfloat16* out, uint32_t tokens, \
                                    uint32_t batch, uint32_t dim, uint32_t width) {                          \
        const Channel at(tokens, batch, dim);                                                                \
        if (at.exists())                                                                                     \
            convolve(*window_of(state, at), x, weight, bias, out, width, at,                                 \
                     [](uint32_t, const float4&) {});                                                        \
    }
VERIFY(causal_conv1d_verify, float*)
VERIFY(causal_conv1d_verify_table, float* const*)

#define COMMIT(name, States)                                                                                 \
    extern "C" __global__ void name(States state, const __nv_bfloat16* x, const int32_t* accepted,           \
                                    uint32_t tokens, uint32_t batch, uint32_t dim) {                         \
        commit<States>(state, x, accepted, Channel(tokens, batch, dim));                                     \
    }
COMMIT(causal_conv1d_commit, float*)
COMMIT(causal_conv1d_commit_table, float* const*)
