# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle

cdef enum:
    TABLE_SEQS = 32

ctypedef struct GdnInputs:
    uint64_t state, query, key, value, gate, beta, output

ctypedef struct GdnSizes:
    uint32_t batch_size, num_k_heads, num_v_heads, k_dim, v_dim, qk_stride, v_stride, gb_stride


cdef int c_gdn_decode_wy(GpuBackend gpu, KernelHandle kernel, GdnInputs x, const uint64_t* h_state_inter,
                         uint32_t tokens, GdnSizes sizes, bint state_is_table, uint64_t stream) except -1 nogil
cdef int c_gdn_decode_wyn(GpuBackend gpu, KernelHandle kernel, GdnInputs x, uint64_t h_state_inter_base,
                          uint32_t inter_stride_floats, GdnSizes sizes, uint64_t stream) except -1 nogil
cdef int c_gdn_decode_wyn_table(GpuBackend gpu, KernelHandle kernel, GdnInputs x, uint64_t hi_tables,
                                uint32_t slab_entry_stride, GdnSizes sizes, uint64_t stream) except -1 nogil
cdef int c_gated_delta_rule_verify(GpuBackend gpu, KernelHandle kernel, GdnInputs x, uint64_t corrections,
                                   GdnSizes sizes, uint64_t a_log, uint64_t dt_bias, bint unit_rows,
                                   uint64_t stream) except -1 nogil
cdef int c_gated_delta_rule_commit(GpuBackend gpu, KernelHandle kernel, uint64_t H, uint64_t key, uint64_t gate,
                                   uint64_t corrections, uint64_t accepted, uint32_t tokens, GdnSizes sizes,
                                   uint64_t a_log, uint64_t dt_bias, bint unit_rows, uint64_t stream) except -1 nogil
