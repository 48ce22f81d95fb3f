# SPDX-License-Identifier: MIT OR Apache-2.0
from cpython.bool cimport PyBool_Check
from cpython.long cimport PyLong_Check, PyLong_CheckExact
from libc.stdint cimport uint64_t

from metrale.gpu.core cimport Core

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow)     # of an int it raises nothing


cdef inline bint is_int(object value, long long low, long long high, long long* n) noexcept:
    """Whether ``value`` is an int in a range, and not a bool: what most arguments are, told without an exception."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value) and (not PyLong_Check(value) or PyBool_Check(value)):
        return False
    n[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return overflow == 0 and low <= n[0] <= high


cdef enum:
    LONGEST_INT = 0x7FFFFFFFFFFFFFFF


cdef uint64_t as_ptr(object value, str name, Core gpu, uint64_t stream) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t address_of(object value, str name, Core gpu) except? 0xFFFFFFFFFFFFFFFF
cdef bint own_ptr(object value, str name, Core gpu, uint64_t* address) except -1
cdef uint64_t foreign_ptr(object value, str name, Core gpu, uint64_t stream,
                          bint ordered) except? 0xFFFFFFFFFFFFFFFF
cdef bint is_captured(Core gpu, uint64_t stream) except -1
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
