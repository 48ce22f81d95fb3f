// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels that the launcher of saxpy does not fit: in the number, the kind and the size of an argument.
extern "C" __global__ void fewer(float* y, const float* x, float a) { y[0] = a * x[0]; }

extern "C" __global__ void integer(float* y, const float* x, int a, unsigned n) { y[0] = a * x[n]; }

extern "C" __global__ void wider(float* y, const float* x, double a, unsigned n) { y[0] = a * x[n]; }
