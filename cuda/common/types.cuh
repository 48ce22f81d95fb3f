// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Fixed-width integers and dynamic shared memory, spelled once for NVRTC, nvcc and the host build.
#pragma once

#ifdef __CUDACC_RTC__ // NVRTC has no <cstdint>
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

// A pointer parameter that may be null says so to check mode: `const float* METRALE_NULLABLE bias`.
#ifndef METRALE_NULLABLE
#define METRALE_NULLABLE
#endif

// A function that is called, not copied in.
#ifdef METRALE_HOST // where libstdc++ has another meaning for __noinline__
#define METRALE_CALLED __attribute__((noinline))
#else
#define METRALE_CALLED __device__ __noinline__
#endif

#ifdef METRALE_HOST
#define METRALE_DYNAMIC_SHARED(type, name)                                                                   \
    type* const name = static_cast<type*>(metrale::host::dynamic_shared())
#else
// One raw symbol in a translation unit: its kernels may differ in the element type.
#define METRALE_DYNAMIC_SHARED(type, name)                                                                   \
    extern __shared__ __align__(16) unsigned char metrale_dynamic_shared[];                                  \
    type* const name = reinterpret_cast<type*>(metrale_dynamic_shared)
#endif
