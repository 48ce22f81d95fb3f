// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels of a user of the package, for the tests of the runtime.
#include "common/types.cuh"

struct Pair {
    int first;
    float second;
};

// out[i] = value for i < n. Grid ceil(n / block).
extern "C" __global__ void fill(unsigned* out, unsigned n, unsigned value) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = value;
}

// Every argument as a double, then whether p is null. One thread.
extern "C" __global__ void echo(double* out, unsigned u32, int i32, unsigned long long u64, long long i64,
                                float f32, double f64, Pair pair, const void* p) {
    const double all[] = {double(u32), double(i32),        double(u64),         double(i64),  double(f32),
                          f64,         double(pair.first), double(pair.second), p ? 0.0 : 1.0};
    for (int i = 0; i < 9; ++i)
        out[i] = all[i];
}

// out[0] += 1 for every thread of the launch, in any order.
extern "C" __global__ void count_threads(unsigned* out) { atomicAdd(out, 1u); }

// Through n bytes of dynamic shared memory, each thread gets what the next one wrote.
extern "C" __global__ void rotate(unsigned* out, unsigned n) {
    METRALE_DYNAMIC_SHARED(unsigned char, bytes);
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        bytes[i] = static_cast<unsigned char>(i % 251);
    __syncthreads();
    unsigned sum = 0;
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        sum += bytes[(i + 1) % n];
    atomicAdd(out, sum);
}

// Waits until the host sets *flag. GPU only: on the host nothing would.
extern "C" __global__ void wait_for_host(const unsigned* flag) {
    while (*static_cast<const volatile unsigned*>(flag) == 0) {
    }
}
