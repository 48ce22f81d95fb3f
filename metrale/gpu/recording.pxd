# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.driver cimport Launch
from metrale.gpu.kernel cimport KernelHandle


cdef class LaunchStep:
    cdef KernelHandle kernel
    cdef Launch launch


cdef class Recording:
    cdef uint64_t id
    cdef list steps            # what to do, in the order in which it was queued
    cdef dict before           # stream -> the steps that its next one comes after, as bits


cdef class Recorder:
    cdef uint64_t recordings   # begun so far
    cdef dict streams          # stream -> the Recording that it is part of
    cdef dict events           # event -> (Recording, the steps that it comes after, as bits)

    cdef int begin(self, uint64_t stream) except -1
    cdef bint add(self, uint64_t stream, object step) except -1
    cdef int record_event(self, uint64_t event, uint64_t stream) except -1
    cdef int stream_wait_event(self, uint64_t stream, uint64_t event) except -1
    cdef list end(self, uint64_t stream)


cdef LaunchStep launch_step(KernelHandle kernel, const Launch* launch)
