// SPDX-License-Identifier: MIT OR Apache-2.0
//
// For tests only: what the other modules compute inside, made visible in f32.
#include "common/mmvq.cuh"
#include "common/route.cuh"

using namespace metrale;

// w blocks -> out f32 [n_blocks, 256]. Grid ceil(n_blocks / 16), block 256.
template <class Format>
__device__ __forceinline__ void decode(const uint8_t* __restrict__ W, float* __restrict__ out,
                                       uint32_t n_blocks) {
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t b = thread / KQUANT_THREADS, w = thread % KQUANT_THREADS;
    if (b >= n_blocks)
        return;
    const typename Format::Share share = Format::load(W + static_cast<uint64_t>(b) * Format::BYTES, w);
    for (int s = 0; s < 4; ++s) {
        const QuantPart part = Format::part(share, s);
        for (int i = 0; i < 4; ++i)
            out[static_cast<uint64_t>(b) * KQUANT_VALUES + kquant_first(w, s) + i] =
                kquant_value<Format>(share, part, i);
    }
}

// kquant_probe_mmvq_*: kquant_mmvq_*_w before its rounding to bf16, with the same arguments and geometry.
#define PROBES(suffix, Format)                                                                               \
    extern "C" __global__ void kquant_probe_decode_##suffix(const uint8_t* __restrict__ w,                   \
                                                            float* __restrict__ out, uint32_t n_blocks) {    \
        decode<Format>(w, out, n_blocks);                                                                    \
    }                                                                                                        \
    extern "C" __global__ void kquant_probe_mmvq_##suffix##_f32(                                             \
        const uint8_t* __restrict__ w, const uint8_t* __restrict__ y, float* __restrict__ out, uint32_t K,   \
        uint32_t N, uint32_t M) {                                                                            \
        mmvq<Format, 4>(w, y, out, K, N, M);                                                                 \
    }

PROBES(q2_k, Q2K)
PROBES(q3_k, Q3K)
PROBES(q6_k, Q6K)

// logits f32 [n] -> out f32 [n], the scores of moe_v41_route_select. Grid ceil(n / 256), block 256.
extern "C" __global__ void route_probe_scores(const float* __restrict__ logits, float* __restrict__ out,
                                              uint32_t n, float gate_temp) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = route_score(logits[i], gate_temp);
}
