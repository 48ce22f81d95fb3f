# SPDX-License-Identifier: MIT OR Apache-2.0
from metrale.gpu.graphs cimport Graphs


cdef class GpuBackend(Graphs):
    cdef int waiting_call(self, str call) except -1
