# SPDX-License-Identifier: MIT OR Apache-2.0
"""Driver: what a backend must be able to do, one method a driver call. No checks and no ledger here."""

from libc.stdint cimport uint64_t

from metrale.gpu.kernel cimport KernelHandle


cdef class Driver:
    """Base of ``GpuBackend``; each kind of backend overrides every method."""

    cdef uint64_t driver_alloc(self, size_t nbytes, str kind) except? 0:
        raise NotImplementedError

    cdef size_t driver_rounded(self, size_t nbytes, str kind) except? 0:
        raise NotImplementedError

    cdef int driver_free(self, uint64_t ptr, str kind) except -1:
        raise NotImplementedError

    cdef int driver_range(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1:
        raise NotImplementedError

    cdef int driver_memory(self, size_t* free, size_t* total) except -1:
        raise NotImplementedError

    cdef int driver_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1:
        raise NotImplementedError

    cdef int driver_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes,
                         uint64_t stream) except -1:
        raise NotImplementedError

    cdef int driver_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1:
        raise NotImplementedError

    cdef bint driver_is_pageable(self, uint64_t host) except -1:
        """Whether a copy from or to this host memory is done with it when it returns."""
        raise NotImplementedError

    cdef uint64_t driver_create_stream(self) except 0:
        raise NotImplementedError

    cdef int driver_destroy_stream(self, uint64_t stream) except -1:
        raise NotImplementedError

    cdef int driver_synchronize(self, uint64_t stream) except -1:
        raise NotImplementedError

    cdef uint64_t driver_create_event(self, bint timing) except 0:
        raise NotImplementedError

    cdef int driver_destroy_event(self, uint64_t event) except -1:
        raise NotImplementedError

    cdef int driver_record_event(self, uint64_t event, uint64_t stream) except -1:
        raise NotImplementedError

    cdef int driver_stream_wait_event(self, uint64_t stream, uint64_t event) except -1:
        raise NotImplementedError

    cdef int driver_event_query(self, uint64_t event) except -1:
        raise NotImplementedError

    cdef int driver_event_synchronize(self, uint64_t event) except -1:
        raise NotImplementedError

    cdef double driver_event_elapsed_ms(self, uint64_t start, uint64_t end) except? -1:
        raise NotImplementedError

    cdef KernelHandle driver_kernel(self, str module, str name):
        raise NotImplementedError

    cdef int driver_check_special(self, KernelHandle kernel, Launch* l) except -1:
        """Raise the LaunchError for a launch with flags that the device cannot do."""
        raise NotImplementedError

    cdef int driver_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil:
        with gil:
            raise NotImplementedError

    cdef int driver_begin_capture(self, uint64_t stream) except -1:
        raise NotImplementedError

    cdef CaptureStatus driver_capture_status(self, uint64_t stream, uint64_t* id,
                                             uint64_t* node) except? CAPTURE_INVALIDATED:
        """The stream's state; where not null, ``id`` takes the capture's number and ``node`` the stream's last node."""
        raise NotImplementedError

    cdef uint64_t driver_end_capture(self, uint64_t stream) except 0:
        """The graph; CaptureError where there is none. The stream is back to normal in both cases, but for a thread
        that did not begin the capture."""
        raise NotImplementedError

    cdef uint64_t driver_instantiate(self, uint64_t graph) except 0:
        raise NotImplementedError

    cdef int driver_destroy_graph(self, uint64_t graph, uint64_t executable) except -1:
        """Either may be 0."""
        raise NotImplementedError

    cdef int driver_launch_graph(self, uint64_t executable, uint64_t stream) except -1:
        raise NotImplementedError

    cdef int driver_update_node(self, uint64_t executable, uint64_t node, KernelHandle kernel, Launch* l) except -1:
        raise NotImplementedError

    cdef int driver_close(self) except -1:
        raise NotImplementedError
