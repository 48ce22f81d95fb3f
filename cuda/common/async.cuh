// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Copies from global to shared memory that run on while the thread does other work (cp.async). On the host
// they are done at once.
#pragma once

#include "common/types.cuh"

#ifdef METRALE_HOST
#include <cstring>
#endif

namespace metrale {

// The first `valid` of BYTES (4 or 16, and both addresses multiples of it), zeros behind them. For a valid of
// 0 no byte is read, and the address need only be a valid one.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global, uint32_t valid = BYTES) {
    static_assert(BYTES == 4 || BYTES == 16);
#ifdef METRALE_HOST
    memset(shared, 0, BYTES);
    memcpy(shared, global, valid);
#else
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                     "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(valid)
                     : "memory");
#endif
}

// Ends a group of the thread's copies.
__device__ __forceinline__ void copy_async_commit() {
#ifndef METRALE_HOST
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of the thread's groups but the last PENDING. Other threads see the bytes after a barrier.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#ifndef METRALE_HOST
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

} // namespace metrale
