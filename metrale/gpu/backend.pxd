# SPDX-License-Identifier: MIT OR Apache-2.0
from metrale.gpu.core cimport Core


cdef class GpuBackend(Core):
    pass
