// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The floor of a launch: the driver call for one block, in a loop, from C++. Returns nanoseconds a launch, or
// the driver's error number negated.
#include <chrono>

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
