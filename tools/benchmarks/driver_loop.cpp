// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The driver calls alone, in loops: the floors of a launch of one block and of an allocation. Nanoseconds a call, or the
// driver's error number negated.
#include <chrono>
#include <cstddef>

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             void*, void**, void**);

extern "C" double driver_loop(LaunchKernel launch, void* function, unsigned block, void* stream, void** args,
                              int n) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < n; ++i) {
        const int error = launch(function, 1, 1, 1, block, 1, 1, 0, stream, args, nullptr);
        if (error != 0)
            return -error;
    }
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
    return elapsed.count() / n;
}

using Alloc = int (*)(unsigned long long*, std::size_t);
using Free = int (*)(unsigned long long);

// n allocations, then their frees: ns[0] an allocation, ns[1] a free.
extern "C" int alloc_loop(Alloc alloc, Free release, std::size_t bytes, unsigned long long* ptrs, int n, double* ns) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    for (int i = 0; i < n; ++i)
        if (const int error = alloc(&ptrs[i], bytes))
            return error;
    const auto middle = Clock::now();
    for (int i = 0; i < n; ++i)
        if (const int error = release(ptrs[i]))
            return error;
    const auto end = Clock::now();
    ns[0] = std::chrono::duration<double, std::nano>(middle - start).count() / n;
    ns[1] = std::chrono::duration<double, std::nano>(end - middle).count() / n;
    return 0;
}
