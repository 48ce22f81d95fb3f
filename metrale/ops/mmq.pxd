# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_metrale_q8_1_quantize_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t y, uint32_t K,
                                      uint32_t M, uint64_t stream) except -1 nogil
cdef int c_kquant_mmq128(GpuBackend gpu, KernelHandle kernel, uint64_t w, uint64_t y, uint64_t out, uint32_t N,
                         uint32_t M, uint32_t K, uint32_t blocks_per_row, uint32_t y_rows, uint32_t out_stride,
                         uint64_t stream) except -1 nogil
