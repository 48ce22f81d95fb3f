// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <vector_types.h>

// __thread, and not thread_local: no initialiser to look for at each use.
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
inline constexpr int warpSize = 32;
