# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch, LaunchFlag
from metrale.gpu.kernel cimport KernelHandle


cdef class KernelLaunch:
    cdef GpuBackend gpu
    cdef KernelHandle kernel
    cdef Launch* packed       # its own, from a pool
    cdef bint launched        # the next argument starts a new list
    cdef dict foreign         # place -> another library's array, asked at launch; None where there is none
    cdef bint launching       # packed is being read without the GIL

    cdef int writing(self) except -1
    cdef int next_argument(self) except -1
    cdef long long integer(self, object value, bint is_signed, uint32_t bits) except? -1
    cdef double number(self, object value) except? -1
    cdef str next_name(self)
    cdef int refuse_next(self, object value, str allowed) except -1
    cdef int refuse_launch(self, object error) except -1
    cdef KernelLaunch set_flag(self, LaunchFlag flag, bint on)
