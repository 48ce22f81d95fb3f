# SPDX-License-Identifier: MIT OR Apache-2.0
# What launchers refuse, in the package's one wording.
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.kernel cimport KernelHandle


cdef int kernel_in(KernelHandle kernel, tuple names) except -1
cdef int device_ptr(str name, uint64_t ptr, uint64_t alignment) except -1
cdef int nullable_ptr(str name, uint64_t ptr, uint64_t alignment) except -1
cdef int positive(str name, uint32_t value) except -1
cdef int multiple(str name, uint32_t value, uint32_t step) except -1
cdef int at_most(str name, uint32_t value, uint32_t limit) except -1
cdef uint32_t u32(str name, object value) except? 0xFFFFFFFF
cdef uint64_t u64(str name, object value) except? 0xFFFFFFFFFFFFFFFF
cdef float f32(str name, object value) except? -1


cdef inline uint32_t ceil_div(uint64_t n, uint32_t step) noexcept nogil:
    """Blocks of ``step`` that cover ``n``; more than fit give a number that no device takes as a grid."""
    cdef uint64_t blocks = (n + step - 1) // step
    if blocks > <uint64_t>0xFFFFFFFF:
        return 0xFFFFFFFF
    return <uint32_t>blocks
