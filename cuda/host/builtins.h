// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <vector_types.h>

// __thread, and not thread_local: no initialiser to look for at each use. Local-dynamic: one look-up serves
// all of them and the kernel's shared memory, of which a library that is loaded late may have any amount.
#define METRALE_BUILTIN __attribute__((visibility("hidden"), tls_model("local-dynamic")))
extern __thread uint3 threadIdx METRALE_BUILTIN;
extern __thread uint3 blockIdx METRALE_BUILTIN;
extern __thread uint3 blockDim METRALE_BUILTIN;
extern __thread uint3 gridDim METRALE_BUILTIN;
#undef METRALE_BUILTIN
inline constexpr int warpSize = 32;
