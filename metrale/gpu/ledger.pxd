# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport int64_t, uint64_t
from libcpp.map cimport map as cpp_map

cdef enum:
    ALLOCATIONS
    ALLOCATED_BYTES
    FREES
    FREED_BYTES
    COUNTERS


cdef class Allocation:
    cdef readonly uint64_t ptr        # of a stream, event, graph or module its handle
    cdef readonly size_t nbytes       # as asked for; of a module its image; of a stream, event or graph 0
    cdef readonly size_t rounded      # as the driver takes it
    cdef readonly str kind            # "device", "managed", "pinned"; "stream", "event", "graph", "module"
    cdef readonly str tag
    cdef readonly str file
    cdef readonly int line
    cdef readonly object stream       # where a copy or memset used it last; None
    cdef readonly uint64_t seq
    cdef readonly int64_t time_ns
    cdef readonly str owner           # what gives it back: "DeviceBuffer"; None where the program does
    cdef readonly str freed_at        # "file:line" once freed
    cdef readonly uint64_t freed_seq  # 0 while it is live
    cdef readonly int64_t freed_ns    # 0 while it is live
    cdef readonly bint leaked         # the backend gave it back, and not the program
    cdef bint reused                  # another library's memory lies there now


cdef class Ledger:
    cdef cpp_map[uint64_t, void*] _by_ptr     # base -> Allocation, borrowed from _live
    cdef dict _live                           # seq -> Allocation: memory
    cdef object _freed                        # the last ones
    cdef list _peak_freed                     # what was live at the peak and has been freed since
    cdef list _scopes                         # that are open
    cdef dict handles                         # kind -> {handle: Allocation}: what is live and not memory
    cdef dict live_streams                    # those of handles
    cdef dict live_events
    cdef dict live_graphs
    cdef readonly size_t live_bytes           # device and managed; pinned is host memory
    cdef readonly size_t peak_bytes
    cdef readonly size_t pinned_bytes
    cdef readonly uint64_t seq                # counts what begins and what ends
    cdef readonly uint64_t peak_seq           # when the peak was reached
    cdef readonly size_t forgotten            # freed, and no longer remembered
    cdef size_t counted[COUNTERS]               # of memory, since the backend was opened

    cdef Allocation add(self, uint64_t ptr, size_t nbytes, size_t rounded, str kind, str tag, str owner)
    cdef Allocation add_handle(self, uint64_t handle, str kind, str tag, size_t nbytes)
    cdef Allocation new(self, uint64_t ptr, size_t nbytes, str kind, str tag)
    cdef Allocation at(self, uint64_t ptr)            # by base, or None
    cdef Allocation containing(self, uint64_t ptr)    # by any address inside, or None
    cdef Allocation newest(self, uint64_t handle)     # stream, event or graph
    cdef Allocation before(self, uint64_t ptr)        # the last whose base is not above it, or None
    cdef int enter(self, Allocation a) except -1
    cdef int remove(self, Allocation a) except -1
    cdef Allocation remove_handle(self, uint64_t handle, str kind)    # None if it is not live
    cdef int ended(self, Allocation a) except -1
    cdef int restore(self, Allocation a) except -1    # what could not be freed after all
    cdef Allocation freed(self, uint64_t ptr)         # the last that held the address, if it is remembered, or None
    cdef int reused(self, uint64_t ptr) except -1
    cdef str describe(self, uint64_t ptr)             # what is known of an address, for messages
    cdef str left_over(self)                          # what is live, in a line; None if nothing is


cdef class Scope:
    cdef readonly str name
    cdef Ledger ledger
    cdef readonly size_t peak_bytes
    cdef size_t counted[COUNTERS]               # the ledger's counters where it began, and then what they grew by
    cdef uint64_t began               # the ledger's seq; 0 before
    cdef list _left                   # once it has ended

    cdef size_t grown(self, int i) except? 0


cdef tuple call_site()
cdef str call_site_text()
