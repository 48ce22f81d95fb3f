// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A kernel that takes as long as it is told to, for the tests of threads and interrupts.
#include "common/types.cuh"

// out[0] = 1, after n steps of some nanoseconds, each of which needs the one before. One thread.
extern "C" __global__ void spin(unsigned* out, unsigned n) {
    unsigned x = n;
    for (unsigned i = 0; i < n; ++i)
        x = (x * 1664525u + 1013904223u) ^ (x >> 16);
    out[0] = x == 0 ? 2u : 1u;
}
