# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_kquant_q8_1_rows_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t y, uint32_t K, uint32_t M,
                                 uint64_t stream) except -1 nogil
cdef int c_kquant_swiglu_q8_1_rows_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t gate, uint64_t up, uint64_t w,
                                        uint64_t h, uint64_t y, uint32_t rows, uint32_t inter, float limit,
                                        uint64_t stream) except -1 nogil
cdef int c_kquant_mmvq_w(GpuBackend gpu, KernelHandle kernel, uint64_t w, uint64_t y, uint64_t out, uint32_t K,
                         uint32_t N, uint32_t M, uint64_t stream) except -1 nogil
cdef int c_kquant_mmvq_experts_w(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t out,
                                 uint32_t K, uint32_t N, uint32_t M, uint32_t y_stride_bytes, uint32_t experts,
                                 uint32_t warps, uint64_t stream) except -1 nogil
