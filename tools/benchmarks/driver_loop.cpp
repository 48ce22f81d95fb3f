// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The floor of a launch: the driver call in a loop, from C++. Returns nanoseconds a launch.
#include <chrono>

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             void*, void**, void**);

extern "C" double driver_loop(LaunchKernel launch, void* function, void* stream, void** args, int n) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < n; ++i)
        if (launch(function, 1, 1, 1, 32, 1, 1, 0, stream, args, nullptr) != 0)
            return -1;
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
    return elapsed.count() / n;
}
