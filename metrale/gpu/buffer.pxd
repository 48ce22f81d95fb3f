# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.core cimport Core
from metrale.gpu.ledger cimport Allocation


cdef class OwnedMemory:
    cdef readonly object gpu
    cdef readonly size_t nbytes
    cdef Allocation allocation      # None once freed
    cdef Py_ssize_t exports         # of others who use the memory and hold a reference to this

    cdef int take(self, Core gpu, object nbytes, str kind, object tag) except -1
    cdef uint64_t address(self) except 0
    cdef bint is_used(self) except -1


cdef class DeviceBuffer(OwnedMemory):
    pass


cdef class PinnedBuffer(OwnedMemory):
    pass


cdef class OwnedHandle:
    cdef object gpu
    cdef object destroy
    cdef readonly object value      # None once freed
