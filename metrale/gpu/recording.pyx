# SPDX-License-Identifier: MIT OR Apache-2.0
"""Captures for a backend that does work when it is queued: in a capture the work is written down instead."""

from libc.stdint cimport uint64_t

from metrale.errors import CaptureError

from metrale.gpu.driver cimport Launch, copy_launch
from metrale.gpu.kernel cimport KernelHandle


cdef class LaunchStep:
    """A launch as a step: one that an update can replace."""


cdef class Recording:
    """One capture."""

    def __cinit__(self, uint64_t id):
        self.id = id
        self.steps = []
        self.before = {}


cdef class Recorder:
    """All captures of a backend.

    Steps are kept in the order in which they came, which is one that the streams and events allow. Which step comes
    after which is followed all the same: a stream that is not joined back is an error, as it is to CUDA.
    """

    def __cinit__(self):
        self.streams = {}
        self.events = {}

    cdef int begin(self, uint64_t stream) except -1:
        self.recordings += 1
        recording = Recording(self.recordings)
        recording.before[stream] = 0
        self.streams[stream] = recording
        return 0

    cdef bint add(self, uint64_t stream, object step) except -1:
        """Take down a step, if ``stream`` is being captured. Returns whether it is."""
        cdef Recording recording = self.streams.get(stream)
        if recording is None:
            return False
        recording.before[stream] |= 1 << <object>len(recording.steps)
        recording.steps.append(step)
        return True

    cdef int record_event(self, uint64_t event, uint64_t stream) except -1:
        cdef Recording recording = self.streams.get(stream)
        if recording is None:
            self.events.pop(event, None)
        else:
            self.events[event] = (recording, recording.before[stream])
        return 0

    cdef int stream_wait_event(self, uint64_t stream, uint64_t event) except -1:
        """A stream that waits for an event of a capture becomes part of it."""
        cdef Recording recording
        if event in self.events:
            recording, before = self.events[event]
            self.streams[stream] = recording
            recording.before[stream] = recording.before.get(stream, 0) | before
        return 0

    cdef list end(self, uint64_t stream):
        """End the capture that began on ``stream``, and return its steps."""
        cdef Recording recording = self.streams[stream]
        for joined in recording.before:
            del self.streams[joined]
        self.events = {event: noted for event, noted in self.events.items() if noted[0] is not recording}
        missing = ((1 << <object>len(recording.steps)) - 1) & ~recording.before[stream]
        if missing:
            late = [f"{s:#x}" for s, before in recording.before.items() if before & missing]
            raise CaptureError(f"the capture of the stream {stream:#x} made no graph: a stream that joined it was not "
                               f"joined back ({', '.join(late)})")
        return recording.steps


cdef LaunchStep launch_step(KernelHandle kernel, const Launch* launch):
    cdef LaunchStep step = LaunchStep.__new__(LaunchStep)
    step.kernel = kernel
    copy_launch(&step.launch, launch)
    return step
