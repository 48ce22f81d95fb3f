// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Warp matrix products, one function an instruction; with METRALE_HOST the runtime emulates them.
#pragma once

#include "common/types.cuh"

namespace metrale {

// c[16, 8] += a[16, 16] * b[16, 8], bf16 with f32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//     a: rows g, g + 8 at k = 2t, 2t + 1, then the same rows at k + 8;  b: column g at k = 2t, 2t + 1, then k
//     + 8; c: row g at columns 2t, 2t + 1, then row g + 8.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
#ifdef METRALE_HOST
    host::mma_m16n8k16_bf16(c, a, b, c);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The same with f16.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
#ifdef METRALE_HOST
    host::mma_m16n8k16_f16(c, a, b, c);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// c[16, 8] += a[16, 32] * b[32, 8], unsigned times signed bytes. A lane holds
//     a: rows g, g + 8 at k = 4t .. 4t + 3, then the same rows at k + 16;  b: column g at k = 4t .. 4t + 3,
//     then k + 16; c: as above.
__device__ __forceinline__ void mma_m16n8k32_u8s8(int (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
#ifdef METRALE_HOST
    host::mma_m16n8k32_u8s8(c, a, b, c);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

} // namespace metrale
