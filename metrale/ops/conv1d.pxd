# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_conv1d_update_chunk2(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input,
                                uint64_t weight, uint64_t output, uint64_t conv_state_intermediate, uint32_t d_inner,
                                uint32_t d_conv, uint32_t batch_size, uint64_t stream, uint64_t bias) except -1 nogil
cdef int c_conv1d_update_chunkn(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input,
                                uint64_t weight, uint64_t output, uint64_t conv_state_intermediate, uint32_t d_inner,
                                uint32_t d_conv, uint32_t batch_size, uint64_t stream, uint64_t bias) except -1 nogil
cdef int c_conv1d_verify(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input, uint64_t weight,
                         uint64_t output, uint32_t tokens, uint32_t d_inner, uint32_t d_conv, uint32_t batch_size,
                         uint64_t stream, uint64_t bias) except -1 nogil
cdef int c_conv1d_commit(GpuBackend gpu, KernelHandle kernel, uint64_t conv_state, uint64_t input, uint64_t accepted,
                         uint32_t tokens, uint32_t d_inner, uint32_t d_conv, uint32_t batch_size,
                         uint64_t stream) except -1 nogil
