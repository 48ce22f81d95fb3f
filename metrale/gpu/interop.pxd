# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t


cdef uint64_t as_ptr(object value, str name=*) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t as_handle(object value, str name) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t as_integer(object value, str name, uint64_t limit, str allowed) except? 0xFFFFFFFFFFFFFFFF
cdef size_t as_size(object value, str name) except? 0xFFFFFFFFFFFFFFFF
cdef int host_buffer(object value, str name, bint writable, Py_buffer* view) except -1


cdef class HostView:
    cdef Py_buffer view
    cdef bint filled

    cdef inline uint64_t address(self) noexcept:
        return <uint64_t>self.view.buf


cdef HostView host_view(object value, str name, bint writable)
