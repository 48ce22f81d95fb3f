# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_dense_gemv(GpuBackend gpu, KernelHandle kernel, uint64_t input, uint64_t weight, uint64_t output,
                      uint32_t n, uint32_t k, uint64_t stream) except -1 nogil
cdef int c_dense_gemm(GpuBackend gpu, KernelHandle kernel, uint64_t input, uint64_t weight, uint64_t output,
                      uint32_t m, uint32_t n, uint32_t k, uint64_t stream) except -1 nogil
