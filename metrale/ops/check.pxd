# SPDX-License-Identifier: MIT OR Apache-2.0
# What launchers refuse, in the package's one wording. What is right costs a comparison, with or without the GIL.
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.atomic cimport published
from metrale.gpu.kernel cimport KernelHandle


cdef int find_kernel(KernelHandle kernel, const char* names) except -1 nogil
cdef int refuse_ptr(const char* name, uint64_t ptr, uint64_t alignment) except -1 nogil
cdef int refuse_number(const char* name, uint32_t value, const char* allowed, uint32_t limit) except -1 nogil
cdef uint32_t u32(str name, object value) except? 0xFFFFFFFF
cdef uint64_t u64(str name, object value) except? 0xFFFFFFFFFFFFFFFF
cdef float f32(str name, object value) except? -1


cdef inline int kernel_in(KernelHandle kernel, const char* names) except -1 nogil:
    """The place of a kernel among those that the launcher is for, a literal with a blank between two: others may have
    parameters of the same kinds and mean something else."""
    return kernel.place if published(&kernel.launchers_names) == names else find_kernel(kernel, names)


cdef inline int device_ptr(const char* name, uint64_t ptr, uint64_t alignment) except -1 nogil:
    """A pointer that is not null, to a multiple of ``alignment`` bytes, a power of 2: what the kernel's loads need."""
    return refuse_ptr(name, ptr, alignment) if ptr == 0 or ptr & (alignment - 1) != 0 else 0


cdef inline int nullable_ptr(const char* name, uint64_t ptr, uint64_t alignment) except -1 nogil:
    return refuse_ptr(name, ptr, alignment) if ptr & (alignment - 1) != 0 else 0


cdef inline int positive(const char* name, uint32_t value) except -1 nogil:
    """1 or more."""
    return refuse_number(name, value, b"1 or more", 0) if value == 0 else 0


cdef inline int multiple(const char* name, uint32_t value, uint32_t step) except -1 nogil:
    """A positive multiple of ``step``."""
    return refuse_number(name, value, b"a positive multiple of ", step) if value == 0 or value % step != 0 else 0


cdef inline int at_most(const char* name, uint32_t value, uint32_t limit) except -1 nogil:
    """1 to ``limit``."""
    return refuse_number(name, value, b"1 to ", limit) if value - 1 >= limit else 0


cdef inline int at_least(const char* name, uint32_t value, uint32_t limit) except -1 nogil:
    """``limit`` or more."""
    return refuse_number(name, value, b"at least ", limit) if value < limit else 0


cdef inline uint32_t ceil_div(uint64_t n, uint32_t step) noexcept nogil:
    """Blocks of ``step`` that cover ``n``; more than fit give a number that no device takes as a grid."""
    cdef uint64_t blocks = (n + step - 1) // step
    if blocks > <uint64_t>0xFFFFFFFF:
        return 0xFFFFFFFF
    return <uint32_t>blocks
