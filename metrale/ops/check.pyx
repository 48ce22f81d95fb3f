# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""What launchers refuse, in the package's one wording."""

from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import refuse

from metrale.gpu.kernel cimport KernelHandle


cdef int kernel_in(KernelHandle kernel, tuple names) except -1:
    """A kernel that the launcher is for: others may have parameters of the same kinds and mean something else."""
    if kernel.name not in names:
        refuse("kernel", kernel.name, " or ".join(names))
    return 0


cdef int device_ptr(str name, uint64_t ptr, uint64_t alignment) except -1:
    """A pointer that is not null, to a multiple of ``alignment`` bytes, a power of 2: what the kernel's loads need."""
    if ptr == 0:
        refuse(name, None, "a device pointer that is not null")
    return nullable_ptr(name, ptr, alignment)


cdef int nullable_ptr(str name, uint64_t ptr, uint64_t alignment) except -1:
    if ptr & (alignment - 1) != 0:
        refuse(name, ptr, f"a device pointer to a multiple of {alignment} bytes")
    return 0


cdef int positive(str name, uint32_t value) except -1:
    """1 or more."""
    if value == 0:
        refuse(name, value, "1 or more")
    return 0


cdef int multiple(str name, uint32_t value, uint32_t step) except -1:
    """A positive multiple of ``step``."""
    if value == 0 or value % step != 0:
        refuse(name, value, f"a positive multiple of {step}")
    return 0


cdef int at_most(str name, uint32_t value, uint32_t limit) except -1:
    """1 to ``limit``."""
    if not 1 <= value <= limit:
        refuse(name, value, f"1 to {limit}")
    return 0


cdef uint32_t u32(str name, object value) except? 0xFFFFFFFF:
    cdef uint64_t v = 0
    try:
        v = PyNumber_Index(value)
    except (OverflowError, TypeError):
        v = <uint64_t>1 << 32
    if v > 0xFFFFFFFF:
        refuse(name, value, "an integer, 0 to 4294967295")
    return <uint32_t>v


cdef uint64_t u64(str name, object value) except? 0xFFFFFFFFFFFFFFFF:
    cdef uint64_t v = 0
    try:
        v = PyNumber_Index(value)
    except (OverflowError, TypeError):
        refuse(name, value, "an integer, 0 to 2**64 - 1")
    return v


cdef float f32(str name, object value) except? -1:
    cdef double v = 0
    try:
        v = value
    except TypeError:
        refuse(name, value, "a float")
    return <float>v
