# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_moe_v41_swiglu(GpuBackend gpu, KernelHandle kernel, uint64_t gate, uint64_t up, uint64_t w, uint64_t h,
                          uint32_t rows, uint32_t inter, float limit, uint64_t stream) except -1 nogil
cdef int c_moe_v41_accumulate(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t src, uint32_t n,
                              uint64_t stream) except -1 nogil
cdef int c_moe_v41_finish(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t out, uint32_t n,
                          uint64_t stream) except -1 nogil
cdef int c_moe_v41_sum_rows(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t src, uint32_t n_rows,
                            uint32_t dim, uint64_t stream) except -1 nogil
cdef int c_moe_v41_router_gemv_f32out(GpuBackend gpu, KernelHandle kernel, uint64_t A, uint64_t B, uint64_t C,
                                      uint32_t M, uint32_t N, uint32_t K, uint64_t stream) except -1 nogil
cdef int c_moe_v41_router_gemv_f32out_products(GpuBackend gpu, KernelHandle kernel, uint64_t A, uint64_t B,
                                               uint64_t C, uint32_t M, uint32_t N, uint32_t K,
                                               uint64_t stream) except -1 nogil
cdef int c_moe_v41_route_select(GpuBackend gpu, KernelHandle kernel, uint64_t logits, uint64_t bias,
                                uint32_t n_routed, uint32_t topk, float gate_temp, float route_scale,
                                uint32_t norm_topk, uint64_t slot_of, uint64_t arena_base, uint64_t slot_bytes,
                                uint64_t gate_off, uint64_t up_off, uint64_t down_off, uint64_t hdr, uint64_t plan_w,
                                uint64_t plan_rows, uint64_t ptrs, uint64_t stream) except -1 nogil
cdef int c_moe_v41_slot_table_set(GpuBackend gpu, KernelHandle kernel, uint64_t table, uint32_t n_routed,
                                  uint64_t triples, uint32_t n, uint64_t stream) except -1 nogil
cdef int c_moe_v41_route_select_tokens(GpuBackend gpu, KernelHandle kernel, uint64_t logits, uint64_t bias,
                                       uint32_t n_routed, uint32_t topk, float gate_temp, float route_scale,
                                       uint32_t norm_topk, uint64_t slot_of, uint64_t hdr, uint32_t tokens,
                                       uint64_t stream) except -1 nogil
cdef int c_moe_v41_gather_rows(GpuBackend gpu, KernelHandle kernel, uint64_t x, uint64_t rows, uint64_t out,
                               uint32_t n_rows, uint32_t dim, uint64_t stream) except -1 nogil
cdef int c_moe_v41_scatter_add(GpuBackend gpu, KernelHandle kernel, uint64_t acc, uint64_t src, uint64_t rows,
                               uint32_t n_rows, uint32_t dim, uint64_t stream) except -1 nogil
