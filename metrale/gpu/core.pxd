# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from metrale.gpu.driver cimport CopyKind, Driver, Rows
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.ledger cimport Allocation, Ledger

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define metrale_is_finalizing() Py_IsFinalizing()
    #else
    #define metrale_is_finalizing() _Py_IsFinalizing()
    #endif
    """
    # As sys.is_finalizing(), which is gone when the last objects go.
    bint is_finalizing "metrale_is_finalizing"() noexcept nogil

cdef enum:
    POLL_US = 50      # between looks at calls in flight

cdef class Core(Driver):
    # What every launch looks at comes first, in a line of the cache or two.
    cdef readonly bint closed
    cdef bint serving                      # open, and not in a forked child: all that a launch has to ask
    cdef uint64_t stream0                  # the default stream
    cdef uint64_t id                       # of this backend alone, never used again
    cdef int in_flight                     # driver calls of all threads; atomic
    cdef bint checking                     # check mode: each launch is looked at, and waited for
    cdef bint overlaps                     # a kernel may start while the one before it runs
    cdef uint32_t max_grid[3]
    cdef uint32_t max_block[3]
    cdef object __weakref__
    cdef readonly Ledger ledger
    cdef readonly str kind
    cdef readonly str name
    cdef readonly int sm_count             # multiprocessors; on the host, worker threads
    cdef readonly tuple compute_capability     # (major, minor); (0, 0) where there is no GPU
    cdef object closing                    # the thread that opens or closes the backend, which is closed meanwhile
    cdef bint interrupted                  # while it was being closed
    cdef int handling                      # calls in flight that wait for a signal handler to return
    cdef object handler                    # the thread that runs it
    cdef size_t band                       # bytes of red zone behind each allocation; 0: there are none
    cdef uint64_t scanning                 # the stream that fills and reads them
    cdef list held                         # [(event or 0, stream, what a copy on it that is not done yet uses)]
    cdef list own_streams                  # stream0, and the one that scans
    cdef list spare_events                 # the backend's own, for an order between two streams
    cdef bint started                      # a constructor has run
    cdef str after_fork                    # what a forked child can do instead
    cdef dict kernels                      # (module, name) -> KernelHandle
    cdef object loading                    # a lock
    cdef bint forked                       # this process was forked from the one that opened the backend

    cdef int starting(self, bint check, bint redzone) except -1
    cdef int opened(self) except -1
    cdef int release_all(self) except -1
    cdef int release_each(self, list errors) except -1
    cdef int release_left(self, list left, list errors) except -1
    cdef Allocation allocate(self, size_t nbytes, str kind, object tag, str owner)
    cdef int release(self, Allocation a) except -1

    # The C level: checked, and on the ledger. Pointers, streams and events are plain integers.
    cdef uint64_t c_alloc(self, size_t nbytes, str kind, object tag) except 0
    cdef int c_free(self, uint64_t ptr, str kind) except -1
    cdef int c_memset(self, uint64_t ptr, int value, size_t nbytes, uint64_t stream) except -1
    cdef int c_copy_rows(self, uint64_t dst, uint64_t src, const Rows* rows, uint64_t stream) except -1
    cdef int c_copy(self, CopyKind kind, uint64_t dst, uint64_t src, size_t nbytes, uint64_t stream) except -1

    cdef bint to_be_closed(self) noexcept nogil
    cdef int check_open(self) except -1
    cdef int check_still_open(self) except -1
    cdef int check_waitable(self, uint64_t stream, str call) except -1
    cdef int release_graphs(self, list errors) except -1
    cdef int launched(self, uint64_t stream, str what) except -1
    cdef int hold(self, object what, uint64_t stream) except -1
    cdef int let_go(self, bint wait) except -1
    cdef int check_range(self, str what, uint64_t ptr, size_t nbytes, uint64_t stream) except -1
    cdef uint64_t as_stream(self, object stream) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t as_event(self, object event, str name) except? 0xFFFFFFFFFFFFFFFF
    cdef KernelHandle new_kernel(self, str module, str name)
