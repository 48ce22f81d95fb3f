# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_dequant_q2_k_to_bf16(GpuBackend gpu, KernelHandle kernel, uint64_t raw, uint64_t out, uint32_t n_blocks,
                                uint32_t row_bytes, uint64_t stream) except -1 nogil
cdef int c_engram_v41_wkv_q2k_gemv(GpuBackend gpu, KernelHandle kernel, uint64_t A, uint64_t B, uint64_t C, uint32_t N,
                                   uint32_t K, uint64_t stream) except -1 nogil
cdef int c_engram_v41_wkv_q2k_gemv_gather(GpuBackend gpu, KernelHandle kernel, uint64_t ids, uint64_t table,
                                          uint64_t B, uint64_t C, uint32_t N, uint32_t K, uint64_t table_rows,
                                          uint64_t flag, uint64_t stream) except -1 nogil
cdef int c_engram_v41_gate(GpuBackend gpu, KernelHandle kernel, uint64_t streams, uint64_t kv, uint64_t qk,
                           uint32_t dim, uint32_t hc, float eps, uint32_t tokens, uint64_t stream) except -1 nogil
cdef int c_engram_v41_rows_gather(GpuBackend gpu, KernelHandle kernel, uint64_t ids, uint64_t table, uint64_t out,
                                  uint32_t n_rows, uint64_t table_rows, uint64_t flag,
                                  uint64_t stream) except -1 nogil
cdef int c_engram_v41_hash(GpuBackend gpu, KernelHandle kernel, uint64_t compressed, uint64_t out, uint32_t tokens,
                           uint32_t start, uint64_t multipliers, uint64_t primes, uint64_t offsets, uint32_t sites,
                           uint32_t ngram, uint32_t heads, uint32_t pad, uint64_t stream) except -1 nogil
