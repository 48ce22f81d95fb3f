# SPDX-License-Identifier: MIT OR Apache-2.0
"""Graphs: work captured from streams, and launched again as a whole."""

import _thread

from libc.stdint cimport uint64_t

from metrale.errors import CaptureError, MetraleError, refuse

from metrale.gpu.core cimport Core
from metrale.gpu.driver cimport CAPTURE_NONE, Launch, copy_launch
from metrale.gpu.interop cimport as_handle
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.ledger cimport Allocation
from metrale.gpu.recording cimport LaunchStep


cdef class CapturedWork:
    """What is known of a capture, and of the graph that it gives."""

    def __cinit__(self):
        self.nodes = {}
        self.launches = []
        self.prepared = {}
        self.held = []
        self.launching = _thread.allocate_lock()
        self.thread = _thread.get_ident()


cdef class Graphs(Core):
    """The part of ``GpuBackend`` that captures streams into graphs."""

    def __cinit__(self, *args, **kwargs):
        self.begun = {}
        self.graphs = {}
        self.captured_events = {}

    def begin_capture(self, stream=None):
        """Queue nothing on ``stream`` from now on, and remember what would have been, for ``end_capture``.

        Other streams join with ``stream_wait_event`` on an event recorded in the capture, and are joined back the
        same way before it ends. Launches, ``_async`` copies and ``memset_async`` are captured; calls that wait for a
        captured stream are refused. Only the thread that began a capture ends it. Refuses the legacy stream.
        """
        cdef uint64_t s = self.as_stream(stream)
        cdef CapturedWork work = CapturedWork()
        if s == 0:
            refuse("stream", stream, "a stream other than the legacy stream, which cannot be captured")
        self.check_waitable(s, "begin_capture")
        self.driver_begin_capture(s)
        self.begun[s] = work
        self.captures += 1
        try:
            self.driver_capture_status(s, &work.capture, NULL)
        except BaseException:
            self.abort_capture_if_active(s)
            raise

    def end_capture(self, stream=None):
        """End the capture that began on ``stream``, and return its graph, ready for ``launch_graph``: an integer.

        ``CaptureError`` if the captured work does not make a graph, such as where a stream has not been joined back;
        the streams can then be used as before.
        """
        cdef uint64_t s = self.as_stream(stream), graph, executable
        cdef CapturedWork work = self.ending(s, "end_capture")
        graph = self.driver_end_capture(s)
        try:
            executable = self.driver_instantiate(graph)
        except BaseException:
            self.driver_destroy_graph(graph, 0)
            raise
        work.graph = graph
        self.graphs[executable] = work
        self.ledger.add_handle(executable, "graph", None, 0)
        return executable

    def abort_capture_if_active(self, stream=None):
        """End the capture that began on ``stream``, if there is one, and forget what it captured. Returns whether
        there was one."""
        cdef uint64_t s = self.as_stream(stream)
        # A capture that is known of is ended without a look at the device, which may have nothing but errors to give.
        if s not in self.begun and self.driver_capture_status(s, NULL, NULL) == CAPTURE_NONE:
            return False
        self.ending(s, "abort_capture_if_active")
        try:
            self.driver_destroy_graph(self.driver_end_capture(s), 0)
        except CaptureError:      # it had failed already, and is over
            pass
        return True

    def stream_is_capturing(self, stream=None):
        """Whether ``stream`` is being captured, by whomever; also where the capture has failed and has yet to end."""
        return self.driver_capture_status(self.as_stream(stream), NULL, NULL) != CAPTURE_NONE

    def launch_graph(self, graph, stream=None):
        """Queue all work of ``graph`` on ``stream``. Memory that it uses must still be there. Refuses a stream that is
        being captured."""
        cdef uint64_t s = self.as_stream(stream), executable = as_handle(graph, "graph")
        cdef CapturedWork work = self.work_of(executable)
        if self.driver_capture_status(s, NULL, NULL) != CAPTURE_NONE:
            raise CaptureError(f"launch_graph: the stream {s:#x} is being captured, and a graph does not become "
                               "part of another")
        if self.checking:
            self.check_graph(work)
        with work.launching:
            self.work_of(executable)      # another thread may have destroyed it meanwhile
            site = self.ledger.live_graphs[executable].site
            self.driver_launch_graph(executable, s)
        if work.held:
            self.hold(work.held, s)
        if self.checking:
            self.launched(s, f"the graph {executable:#x} from {site}")

    def destroy_graph(self, graph):
        """Destroy a graph of ``end_capture``; launches of it that are queued still complete."""
        cdef uint64_t executable = as_handle(graph, "graph")
        cdef CapturedWork work = self.work_of(executable)
        del self.graphs[executable]      # first, so that a second thread cannot destroy it too
        cdef Allocation a = self.ledger.remove_handle(executable, "graph")
        try:
            with work.launching:
                self.driver_destroy_graph(work.graph, executable)
        except BaseException:
            self.graphs[executable] = work
            self.ledger.restore(a)
            raise

    cdef int release_graphs(self, list errors) except -1:
        cdef CapturedWork work
        cdef Allocation a
        for stream in self.begun:
            try:
                self.driver_destroy_graph(self.driver_end_capture(stream), 0)
            except CaptureError:
                pass
            except MetraleError as error:
                errors.append(error)
        while self.graphs:
            executable, work = self.graphs.popitem()
            a = self.ledger.remove_handle(executable, "graph")
            a.leaked = True
            try:
                self.driver_destroy_graph(work.graph, executable)
            except MetraleError as error:
                errors.append(error)
        self.begun.clear()
        self.captures = 0
        return 0

    cdef int check_graph(self, CapturedWork work) except -1:
        """Before a launch of a graph in check mode: look at the pointers of its launches."""
        raise NotImplementedError

    cdef CapturedWork ending(self, uint64_t stream, str call):
        """Take the capture that began on ``stream`` off the list, for the caller to end."""
        cdef CapturedWork work = self.begun.get(stream)
        if work is None:
            raise CaptureError(f"{call}: no capture began on the stream {stream:#x}")
        if work.thread != _thread.get_ident():
            raise CaptureError(f"{call}: the capture of the stream {stream:#x} began in another thread, which ends it")
        del self.begun[stream]
        self.captures -= 1
        return work

    cdef CapturedWork work_of(self, uint64_t executable):
        self.check_open()
        cdef CapturedWork work = self.graphs.get(executable)
        if work is None:
            refuse("graph", executable, "a live graph of end_capture")
        return work

    cdef CapturedWork work_on(self, uint64_t stream, uint64_t* node):
        """What ``stream`` is being captured into, and its last node; None if that began elsewhere, or not at all."""
        cdef uint64_t capture = 0
        if self.captures > 0 and self.driver_capture_status(stream, &capture, node) != CAPTURE_NONE:
            return self.numbered(capture)
        return None

    cdef CapturedWork numbered(self, uint64_t capture):
        """The work of a capture that has not ended."""
        cdef CapturedWork work
        for work in self.begun.values():
            if work.capture == capture:
                return work
        return None

    cdef int remember_node(self, uint64_t id, uint64_t stream) except -1:
        """Put down the node that a PreparedLaunch has made, if it made one."""
        cdef uint64_t node = 0
        cdef CapturedWork work = self.work_on(stream, &node)
        if work is not None and node != 0:
            work.nodes.setdefault(id, []).append(node)
            if self.checking:
                work.prepared.setdefault(id, []).append(work.launches[-1])
        return 0

    cdef int update_nodes(self, object graph, uint64_t id, KernelHandle kernel, Launch* l) except -1:
        """Give the nodes of a PreparedLaunch the arguments of ``l``."""
        cdef uint64_t executable = as_handle(graph, "graph")
        cdef CapturedWork work = self.work_of(executable)
        cdef LaunchStep step
        nodes = work.nodes.get(id)
        if nodes is None:
            refuse("graph", graph, f"a graph that holds a launch of this PreparedLaunch of {kernel.name}")
        with work.launching:
            self.work_of(executable)
            for node in nodes:
                self.driver_update_node(executable, node, kernel, l)
            for step in work.prepared.get(id, ()):
                copy_launch(&step.launch, l)
        return 0

    cdef int record_noted(self, uint64_t event, uint64_t stream) except -1:
        """Record an event, and note whether that was in a capture, where it will not happen."""
        cdef uint64_t capture = 0
        cdef bint captured = self.driver_capture_status(stream, &capture, NULL) != CAPTURE_NONE
        self.driver_record_event(event, stream)
        if captured:
            self.captured_events[event] = capture
        else:
            self.captured_events.pop(event, None)
        return 0

    cdef int check_order(self, uint64_t event, uint64_t stream) except -1:
        """Refuse to let a stream wait for an event of another capture, or of none: the driver would end the capture."""
        cdef uint64_t capture = 0
        self.driver_capture_status(stream, &capture, NULL)
        recorded = self.captured_events.get(event, 0)
        if recorded == capture:
            return 0
        if recorded == 0:
            raise CaptureError(f"stream_wait_event: the stream {stream:#x} is being captured, and the event {event:#x} "
                               "was not recorded in its capture")
        if capture != 0:
            raise CaptureError(f"stream_wait_event: the event {event:#x} was recorded in another capture than that of "
                               f"the stream {stream:#x}")
        return 0 if self.numbered(recorded) is not None else self.check_event(event, "stream_wait_event")

    cdef int check_event(self, uint64_t event, str call) except -1:
        if event in self.captured_events:
            raise CaptureError(f"{call}: the event {event:#x} was recorded in a capture, where it orders streams and "
                               "never happens")
        return 0

    cdef int hold_host(self, object memory, uint64_t address, uint64_t stream) except -1:
        """Keep the host memory of a copy that was queued until it is done, or as long as the graph that captured it."""
        cdef CapturedWork work = None
        cdef bint captured
        try:
            captured = self.driver_capture_status(stream, NULL, NULL) != CAPTURE_NONE
            if captured:
                work = self.work_on(stream, NULL)
            elif self.driver_is_pageable(address):
                return 0
        except BaseException:      # the copy is queued all the same
            self.held.append((0, stream, memory))
            raise
        if not captured:
            return self.hold(memory, stream)
        if work is not None:
            work.held.append(memory)
        return 0
