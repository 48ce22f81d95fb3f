// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What nvcc gives every kernel source without being asked, for a C++ compiler. build.py includes it ahead of
// the source, so the source itself is the one that a GPU runs.
#pragma once

#define METRALE_HOST 1

// A block runs on one operating system thread, so a block's variables are that thread's. The address
// sanitizer does not watch thread-local arrays: METRALE_STATIC_SHARED gives it globals, and the runtime one
// worker.
#ifdef METRALE_STATIC_SHARED
#define __shared__ static
#else
#define __shared__ thread_local
#endif
#define __launch_bounds__(...)
#define __cluster_dims__(...)

#include <vector_functions.h>

#include "atomics.h"
#include "builtins.h"
#include "collectives.h"
#include "half.h"
#include "intrinsics.h"
#include "mma.h"
