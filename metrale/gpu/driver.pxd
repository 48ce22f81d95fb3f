# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from metrale.gpu.kernel cimport MAX_PARAM_BYTES, MAX_PARAMS, KernelHandle

cdef struct Launch:
    uint32_t grid[3]
    uint32_t block[3]
    uint32_t cluster[3]                    # blocks of a cluster, with LAUNCH_CLUSTER
    uint32_t flags                         # LAUNCH_*; 0 is a plain launch
    size_t shared_bytes
    uint32_t n                             # arguments
    uint32_t used                          # bytes of data
    uint32_t overflow                      # more arguments were pushed than fit
    uint32_t codes[MAX_PARAMS]             # kind << 16 | size, compared with the kernel's
    void* args[MAX_PARAMS]                 # into data: copy_launch copies a Launch
    unsigned char data[MAX_PARAM_BYTES]


cdef inline void copy_launch(Launch* to, const Launch* source) noexcept nogil:
    cdef uint32_t i
    memcpy(to, source, sizeof(Launch))
    for i in range(source.n):
        to.args[i] = &to.data[<const unsigned char*>source.args[i] - source.data]


cdef enum LaunchFlag:
    LAUNCH_CLUSTER = 1
    LAUNCH_COOPERATIVE = 2
    LAUNCH_OVERLAP_PREVIOUS = 4

cdef enum CaptureStatus:
    CAPTURE_NONE = 0
    CAPTURE_ACTIVE = 1
    CAPTURE_INVALIDATED = 2        # a call that cannot be captured ended it; it still has to be taken off the stream

cdef struct Rows:                          # of a 2-D copy
    size_t width                           # bytes copied of each
    size_t height                          # their number
    size_t src_pitch                       # bytes from one to the next
    size_t dst_pitch

cdef enum CopyKind:
    COPY_H2D = 1
    COPY_D2H = 2
    COPY_D2D = 3


cdef class Driver:
    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0    # 0: out of memory
    cdef size_t driver_rounded(self, size_t nbytes, str kind) except? 0    # what an allocation takes of the memory
    cdef int driver_free(self, uint64_t ptr, str kind) except -1
    cdef int driver_range(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1   # 1: known, 0: not
    cdef int driver_memory(self, size_t* free, size_t* total) except -1
    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1
    cdef int driver_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes,
                         uint64_t stream) except -1
    cdef int driver_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1
    cdef bint driver_is_pageable(self, uint64_t host) except -1
    cdef uint64_t driver_create_stream(self) except 0
    cdef int driver_destroy_stream(self, uint64_t stream) except -1
    cdef int driver_synchronize(self, uint64_t stream) except -1
    cdef uint64_t driver_create_event(self, bint timing) except 0
    cdef int driver_destroy_event(self, uint64_t event) except -1
    cdef int driver_record_event(self, uint64_t event, uint64_t stream) except -1
    cdef int driver_stream_wait_event(self, uint64_t stream, uint64_t event) except -1
    cdef int driver_event_query(self, uint64_t event) except -1
    cdef int driver_event_synchronize(self, uint64_t event) except -1
    cdef double driver_event_elapsed_ms(self, uint64_t start, uint64_t end) except? -1
    cdef KernelHandle driver_kernel(self, str module, str name)
    cdef int driver_check_special(self, KernelHandle kernel, Launch* l) except -1
    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil
    cdef int driver_begin_capture(self, uint64_t stream) except -1
    cdef CaptureStatus driver_capture_status(self, uint64_t stream, uint64_t* id,
                                             uint64_t* node) except? CAPTURE_INVALIDATED
    cdef uint64_t driver_end_capture(self, uint64_t stream) except 0
    cdef uint64_t driver_instantiate(self, uint64_t graph) except 0
    cdef int driver_destroy_graph(self, uint64_t graph, uint64_t executable) except -1
    cdef int driver_launch_graph(self, uint64_t executable, uint64_t stream) except -1
    cdef int driver_update_node(self, uint64_t executable, uint64_t node, KernelHandle kernel, Launch* l) except -1
    cdef int driver_close(self) except -1
