# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.kernel cimport KernelHandle


cdef int c_moe_grouped_tiles(GpuBackend gpu, KernelHandle kernel, uint64_t hdr, uint32_t tokens, uint32_t topk,
                             uint32_t n_routed, uint32_t first, uint32_t last, uint32_t tile_rows, uint64_t offsets,
                             uint64_t tiles, uint64_t n_tiles, uint64_t stream) except -1 nogil
cdef int c_moe_grouped_rows(GpuBackend gpu, KernelHandle kernel, uint64_t hdr, uint32_t tokens, uint32_t topk,
                            uint32_t n_routed, uint64_t offsets, uint64_t slot_of, uint64_t arena_base, uint64_t
                            slot_bytes, uint64_t gate_off, uint64_t up_off, uint64_t down_off, uint64_t row_token,
                            uint64_t row_weight, uint64_t token_rows, uint64_t ptrs, uint64_t stream) except -1 nogil
cdef int c_moe_grouped_combine(GpuBackend gpu, KernelHandle kernel, uint64_t src, uint64_t token_rows, uint64_t
                               shared, uint64_t acc, uint64_t out, uint32_t tokens, uint32_t topk, uint32_t dim,
                               uint64_t stream) except -1 nogil
cdef int c_kquant_mmvq_grouped(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t rows,
                               uint64_t out, uint64_t tiles, uint64_t n_tiles, uint32_t K, uint32_t N, uint32_t
                               n_routed, uint32_t out_rows, uint32_t max_tiles, uint32_t projections, uint64_t
                               stream) except -1 nogil
cdef int c_kquant_mmq_grouped(GpuBackend gpu, KernelHandle kernel, uint64_t tables, uint64_t y, uint64_t rows,
                              uint64_t out, uint64_t tiles, uint64_t n_tiles, uint32_t K, uint32_t N, uint32_t
                              n_routed, uint32_t out_rows, uint32_t y_rows, uint32_t max_tiles, uint32_t projections,
                              uint64_t stream) except -1 nogil
