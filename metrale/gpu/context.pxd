# SPDX-License-Identifier: MIT OR Apache-2.0
from cuda.bindings cimport cydriver as cu
from libc.stdint cimport uint64_t

from metrale.gpu.backend cimport GpuBackend


cdef class CudaContext(GpuBackend):
    cdef cu.CUdevice device
    cdef cu.CUcontext context
    cdef set made_current         # threads where no context was current before
    cdef readonly int ordinal
    cdef readonly int driver_version     # 1000 * major + 10 * minor
    cdef int max_shared_optin
    cdef size_t used_before       # of the device's memory, once the context was there
    cdef size_t foreign_before    # of that, what other libraries of the process held
    cdef size_t streams_took      # of the device's memory, as the driver's figures changed
    cdef size_t modules_took

    cdef int retain(self, int ordinal) except -1
    cdef size_t used(self) noexcept
    cdef size_t grown(self, size_t before) noexcept
    cdef int attribute(self, cu.CUdevice_attribute which) except? -1
    cdef int enter(self) except -1 nogil
    cdef int enter_slowly(self, cu.CUcontext current) except -1
    cdef void leave(self, int pushed) noexcept nogil
    cdef int enter_freely(self, cu.CUstreamCaptureMode* mode) except -1
    cdef void leave_freely(self, int pushed, cu.CUstreamCaptureMode* mode) noexcept
    cdef int let_signals_in(self) except -1
    cdef int wait(self, uint64_t handle, bint is_event, str what) except -1


cdef int check_result(cu.CUresult result, str what) except -1
