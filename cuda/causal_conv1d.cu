// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A depthwise causal convolution of width 4 with SiLU, a few tokens at a time onto a running window.
#include <cuda_bf16.h>

#include "common/math.cuh"

using namespace metrale;

constexpr uint32_t CHUNK = 2;

// Token t of sequence b, channel c:
//     window <- window[1:], x[b, t, c]
//     out[b, t, c] = bf16(silu(bias[c] + sum over i of window[i] * weight[c, i]))
// state f32 [batch, dim, 4], oldest first: the window before, on return after both tokens; state_mid, of the
// same shape: after the first; both 16-byte aligned. x, out bf16 [batch, 2, dim]; weight bf16 [dim, width],
// width 4; bias f32 [dim] or null. The sum starts with the bias and goes from oldest to newest, one fmaf a
// step. One thread a channel: grid (ceil(dim / 256), batch), block 256.
extern "C" __global__ void
causal_conv1d_update_chunk2(float* __restrict__ state, const __nv_bfloat16* __restrict__ x,
                            const __nv_bfloat16* __restrict__ weight,
                            const float* __restrict__ METRALE_NULLABLE bias, __nv_bfloat16* __restrict__ out,
                            float* __restrict__ state_mid, uint32_t batch, uint32_t dim, uint32_t width) {
    const uint32_t c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (c >= dim || b >= batch)
        return;
    const __nv_bfloat16* taps = weight + static_cast<uint64_t>(c) * width;
    const float w0 = __bfloat162float(taps[0]), w1 = __bfloat162float(taps[1]);
    const float w2 = __bfloat162float(taps[2]), w3 = __bfloat162float(taps[3]);
    const float first = bias ? bias[c] : 0.0f;

    const uint64_t channel = static_cast<uint64_t>(b) * dim + c;
    float4 window = reinterpret_cast<const float4*>(state)[channel];
#pragma unroll
    for (uint32_t t = 0; t < CHUNK; ++t) {
        const uint64_t i = (static_cast<uint64_t>(b) * CHUNK + t) * dim + c;
        window = {window.y, window.z, window.w, __bfloat162float(x[i])};
        const float y = fmaf(window.w, w3, fmaf(window.z, w2, fmaf(window.y, w1, fmaf(window.x, w0, first))));
        out[i] = __float2bfloat16_rn(silu(y));
        reinterpret_cast<float4*>(t + 1 < CHUNK ? state_mid : state)[channel] = window;
    }
}
