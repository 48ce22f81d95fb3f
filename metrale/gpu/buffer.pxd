# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.ledger cimport Allocation


cdef class DeviceBuffer:
    cdef readonly object gpu
    cdef readonly size_t nbytes
    cdef Allocation allocation      # None once freed

    cdef uint64_t address(self) except 0
