// SPDX-License-Identifier: MIT OR Apache-2.0
//
// y += a * x: f32 [n]. Grid ceil(n / block).
extern "C" __global__ void saxpy(float* y, const float* x, float a, unsigned n) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = fmaf(a, x[i], y[i]);
}
