// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels that do nothing, with 0, 5 and 17 arguments: what is left of a launch is its price.
#include "common/types.cuh"

extern "C" __global__ void noop0() {}

extern "C" __global__ void noop5(const float* a, float* b, uint32_t c, uint32_t d, float e) {}

extern "C" __global__ void noop17(const float* a, const float* b, const float* c, const float* d,
                                  const float* e, const float* f, const float* g, float* h, float* i,
                                  float* j, uint32_t k, uint32_t l, uint32_t m, uint32_t n, uint32_t o,
                                  uint32_t p, float q) {}
