# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.kernel cimport KernelHandle


cdef class PreparedLaunch:
    cdef GpuBackend gpu
    cdef KernelHandle kernel
    cdef Launch packed
    cdef dict foreign             # place -> another library's array, asked at each launch; None where there is none
    cdef uint64_t id              # by which a graph knows its nodes; never used again

    cdef int place_of(self, object which) except -1
    # Overwrite argument i with the bytes of its parameter; the caller knows their number and meaning.
    cdef void set_raw(self, uint32_t i, const void* value) noexcept nogil
    cdef int c_launch(self, uint64_t stream) except -1 nogil


cdef str parameter_name(KernelHandle kernel, uint32_t i)
cdef int follow(GpuBackend gpu, KernelHandle kernel, Launch* l, dict foreign, uint64_t stream) except -1
cdef uint64_t stream_of(GpuBackend gpu, object stream) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t integer_bits(object value, str name, bint is_signed, uint32_t bits) except? 0xFFFFFFFFFFFFFFFF
