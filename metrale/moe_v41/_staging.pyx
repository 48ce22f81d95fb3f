# SPDX-License-Identifier: MIT OR Apache-2.0
"""What reading experts needs of the runtime and Python cannot call: reads that ``close()`` waits for, and copies of
staging memory that the arena itself keeps until they are done."""

from libc.stdint cimport uint64_t

from metrale.errors import CaptureError, MetraleError

from metrale.gpu.atomic cimport atomic_add
from metrale.gpu.core cimport Core
from metrale.gpu.driver cimport CAPTURE_NONE, COPY_H2D


def stream_handle(Core gpu not None, stream):
    """A stream as the integer that the driver knows. Refuses one that is being captured, and use after ``close()`` and
    in a forked child."""
    cdef uint64_t s = gpu.as_stream(stream)
    if gpu.driver_capture_status(s, NULL, NULL) != CAPTURE_NONE:
        raise CaptureError(f"the stream {s:#x} is being captured: an ExpertArena serves work that is queued, and a "
                           "graph before and after its launch")
    return s


def begin_read(Core gpu not None):
    """Before a read into page-locked memory: ``close()``, which frees it, waits for ``end_read``."""
    atomic_add(&gpu.in_flight, 1)
    if not gpu.serving:
        atomic_add(&gpu.in_flight, -1)
        gpu.check_open()
        raise MetraleError(f"{gpu!r} is closed")


def end_read(Core gpu not None):
    """After the read of ``begin_read``."""
    atomic_add(&gpu.in_flight, -1)


def queue_copy(Core gpu not None, uint64_t src, uint64_t dst, size_t nbytes, uint64_t stream):
    """Copy page-locked host memory at ``src`` to ``dst`` in stream order; the caller keeps it until that is done."""
    gpu.c_copy(COPY_H2D, dst, src, nbytes, stream)
