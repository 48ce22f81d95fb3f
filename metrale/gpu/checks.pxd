# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.driver cimport Launch
from metrale.gpu.graphs cimport Graphs
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.ledger cimport Allocation


cdef class Checks(Graphs):
    cdef object guarding       # a lock: bands are painted and read while no other thread frees the memory
    cdef set reported          # (module, kernel, parameter, base): foreign memory that has been logged

    cdef int checked_launch(self, KernelHandle kernel, Launch* l, uint64_t stream) except -1
    cdef int check_pointers(self, KernelHandle kernel, Launch* l) except -1
    cdef int check_pointer(self, KernelHandle kernel, int place, uint64_t ptr) except -1
    cdef bint is_foreign(self, uint64_t ptr, uint64_t* base, size_t* nbytes) except -1
    cdef int paint(self, Allocation a) except -1
    cdef list overruns(self, list allocations)
