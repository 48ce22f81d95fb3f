# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True
"""What launchers refuse, in the package's one wording."""

from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import refuse

from metrale.gpu.atomic cimport publish
from metrale.gpu.interop cimport as_handle, as_integer, is_int
from metrale.gpu.kernel cimport KernelHandle


cdef int find_kernel(KernelHandle kernel, const char* names) except -1 nogil:
    with gil:
        known = names.decode().split()
        if kernel.name not in known:
            refuse("kernel", kernel.name, " or ".join(known))
        kernel.place = known.index(kernel.name)
        publish(&kernel.launchers_names, names)      # last: launchers without the GIL read the place after it
    return kernel.place


cdef int refuse_ptr(const char* name, uint64_t ptr, uint64_t alignment) except -1 nogil:
    with gil:
        if ptr == 0:
            refuse(name.decode(), None, "a device pointer that is not null")
        refuse(name.decode(), ptr, f"a device pointer to a multiple of {alignment} bytes")


cdef int refuse_number(const char* name, uint32_t value, const char* allowed, uint32_t limit) except -1 nogil:
    with gil:
        refuse(name.decode(), value, allowed.decode() + (str(limit) if limit > 0 else ""))


cdef uint32_t u32(str name, object value) except? 0xFFFFFFFF:
    cdef long long n
    if is_int(value, 0, 0xFFFFFFFF, &n):
        return <uint32_t>n
    return <uint32_t>as_integer(value, name, 0xFFFFFFFF, "an integer, 0 to 4294967295")


cdef uint64_t u64(str name, object value) except? 0xFFFFFFFFFFFFFFFF:
    return as_handle(value, name)


cdef float f32(str name, object value) except? -1:
    cdef double v = 0
    if PyFloat_CheckExact(value):
        return <float>PyFloat_AS_DOUBLE(value)
    try:
        v = value
    except (OverflowError, TypeError):
        refuse(name, value, "a float")
    return <float>v
