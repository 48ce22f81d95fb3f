# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t


cdef class DeviceBuffer:
    cdef readonly object gpu
    cdef readonly size_t nbytes
    cdef uint64_t base            # 0 once freed

    cdef uint64_t address(self) except 0
