// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The tensor core instructions mma.sync, emulated for common/mma.cuh: D[16, 8] = A[16, K] * B[K, 8] + C.
// Integers are exact. bf16 and f16 products are summed in double and rounded once; the hardware truncates on
// the way, in an order of its own.
#pragma once

#include "collectives.h"

namespace metrale::host {

// The fragments of one lane, d holding c on entry.
template <class Accumulator>
struct MmaFragments {
    const uint32_t (&a)[4];
    const uint32_t (&b)[2];
    Accumulator (&d)[4];
};

void combine_mma_bf16(Lanes&, unsigned);
void combine_mma_f16(Lanes&, unsigned);
void combine_mma_u8s8(Lanes&, unsigned);

template <class Accumulator>
void mma(const Site& site, Combine combine, Accumulator (&d)[4], const uint32_t (&a)[4],
         const uint32_t (&b)[2], const Accumulator (&c)[4]) {
    Accumulator accumulator[4] = {c[0], c[1], c[2], c[3]}; // d may be c
    MmaFragments<Accumulator> fragments{a, b, accumulator};
    meet_warp(site, kAllLanes, combine, reinterpret_cast<uintptr_t>(&fragments));
    for (int i = 0; i < 4; ++i)
        d[i] = accumulator[i];
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], METRALE_CALLER) {
    mma(METRALE_SITE, combine_mma_bf16, d, a, b, c);
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&c)[4], METRALE_CALLER) {
    mma(METRALE_SITE, combine_mma_f16, d, a, b, c);
}

// mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
inline void mma_m16n8k32_u8s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4],
                              METRALE_CALLER) {
    mma(METRALE_SITE, combine_mma_u8s8, d, a, b, c);
}

} // namespace metrale::host
