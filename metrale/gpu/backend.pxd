# SPDX-License-Identifier: MIT OR Apache-2.0
from metrale.gpu.checks cimport Checks


cdef class GpuBackend(Checks):
    cdef int waiting_call(self, str call) except -1
