# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.kernel cimport MAX_PARAM_BYTES, MAX_PARAMS, KernelHandle

cdef struct Launch:
    uint32_t grid[3]
    uint32_t block[3]
    size_t shared_bytes
    uint32_t n                             # arguments
    uint32_t used                          # bytes of data
    uint32_t overflow                      # more arguments were pushed than fit
    uint32_t codes[MAX_PARAMS]             # kind << 16 | size, compared with the kernel's
    void* args[MAX_PARAMS]                 # into data: a Launch must not be copied by value
    unsigned char data[MAX_PARAM_BYTES]

cdef enum CopyKind:
    COPY_H2D = 1
    COPY_D2H = 2
    COPY_D2D = 3


cdef class Driver:
    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0    # 0: out of memory
    cdef int driver_free(self, uint64_t ptr, str kind) except -1
    cdef int driver_range(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1   # 1: known, 0: not
    cdef int driver_memory(self, size_t* free, size_t* total) except -1
    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1
    cdef int driver_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes,
                         uint64_t stream) except -1
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
    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1
    cdef int driver_close(self) except -1
