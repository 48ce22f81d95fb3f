# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t

from metrale.gpu.core cimport Core
from metrale.gpu.driver cimport Launch
from metrale.gpu.kernel cimport KernelHandle


cdef class CapturedWork:
    cdef uint64_t capture      # its number at the driver
    cdef object thread         # that began it
    cdef uint64_t graph
    cdef dict nodes            # PreparedLaunch.id -> [its kernel nodes]
    cdef list launches         # LaunchSteps; in check mode only, as the next
    cdef dict prepared         # PreparedLaunch.id -> [those of them that are its]
    cdef list held             # host memory that its copies use
    cdef object launching      # a lock: the driver takes one launch or update of a graph at a time


cdef class Graphs(Core):
    cdef int captures          # begun by begin_capture and not ended
    cdef dict begun            # origin stream -> CapturedWork
    cdef dict graphs           # executable -> CapturedWork
    cdef dict captured_events  # event that was last recorded in a capture, and never happens -> the capture's number

    cdef int check_graph(self, CapturedWork work) except -1
    cdef CapturedWork ending(self, uint64_t stream, str call)
    cdef CapturedWork work_on(self, uint64_t stream, uint64_t* node)
    cdef CapturedWork numbered(self, uint64_t capture)
    cdef CapturedWork work_of(self, uint64_t executable)
    cdef int remember_node(self, uint64_t id, uint64_t stream) except -1
    cdef int update_nodes(self, object graph, uint64_t id, KernelHandle kernel, Launch* l) except -1
    cdef int record_noted(self, uint64_t event, uint64_t stream) except -1
    cdef int check_order(self, uint64_t event, uint64_t stream) except -1
    cdef int check_event(self, uint64_t event, str call) except -1
    cdef int hold_host(self, object memory, uint64_t address, uint64_t stream) except -1
