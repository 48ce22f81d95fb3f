# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport int64_t, uint64_t
from libcpp.map cimport map as cpp_map


cdef class Allocation:
    cdef readonly uint64_t ptr
    cdef readonly size_t nbytes
    cdef readonly str kind            # "device", "managed" or "pinned"
    cdef readonly str tag
    cdef readonly str file
    cdef readonly int line
    cdef readonly uint64_t seq
    cdef readonly int64_t time_ns
    cdef readonly str owner           # what frees it: "DeviceBuffer"; None where gpu.free() does
    cdef readonly str freed_at        # "file:line" once freed


cdef class Ledger:
    cdef cpp_map[uint64_t, void*] _by_ptr     # base -> Allocation, borrowed from _live
    cdef dict _live                           # seq -> Allocation
    cdef object _freed                        # the last ones, for messages
    cdef dict live_streams                    # handle -> "file:line"
    cdef dict live_events
    cdef dict live_graphs
    cdef readonly size_t live_bytes           # device and managed; pinned is host memory
    cdef readonly size_t peak_bytes
    cdef readonly size_t pinned_bytes
    cdef readonly uint64_t seq

    cdef Allocation add(self, uint64_t ptr, size_t nbytes, str kind, str tag, str owner)
    cdef Allocation at(self, uint64_t ptr)            # by base, or None
    cdef Allocation containing(self, uint64_t ptr)    # by any address inside, or None
    cdef Allocation before(self, uint64_t ptr)        # the last whose base is not above it, or None
    cdef int restore(self, Allocation a) except -1    # put back, or put in
    cdef int remove(self, Allocation a) except -1
    cdef Allocation freed(self, uint64_t ptr)         # the last that held the address, if it is remembered, or None
    cdef int reused(self, uint64_t ptr) except -1
    cdef str describe(self, uint64_t ptr)             # what is known of an address, for messages
    cdef str left_over(self)                          # what is live, in a line; None if nothing is


cdef tuple call_site()
cdef str call_site_text()
