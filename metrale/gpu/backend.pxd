# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.checks cimport Checks


cdef class GpuBackend(Checks):
    cdef int waiting_call(self, str call) except -1
    cdef int wait_for(self, uint64_t stream) except -1
