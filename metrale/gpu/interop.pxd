# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.core cimport Core


cdef uint64_t as_ptr(object value, str name, Core gpu, uint64_t stream) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t address_of(object value, str name, Core gpu) except? 0xFFFFFFFFFFFFFFFF
cdef bint own_ptr(object value, str name, Core gpu, uint64_t* address) except -1
cdef uint64_t foreign_ptr(object value, str name, Core gpu, uint64_t stream,
                          bint ordered) except? 0xFFFFFFFFFFFFFFFF
cdef int order_after(Core gpu, uint64_t stream, uint64_t producer) except -1
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
