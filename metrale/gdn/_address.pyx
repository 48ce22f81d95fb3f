# SPDX-License-Identifier: MIT OR Apache-2.0
"""Addresses that a batch is cut by."""

from libc.stdint cimport uint64_t

from metrale.errors import refuse
from metrale.gpu.pointer import DevicePtr

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.interop cimport as_ptr


def address(GpuBackend gpu not None, value, str name not None, stream):
    """What a launcher would take ``value`` for, the argument ``name`` of work on ``stream``. Refuses null."""
    cdef uint64_t found = as_ptr(value, name, gpu, gpu.as_stream(stream))
    if found == 0:
        refuse(name, None, "a device pointer that is not null")
    return DevicePtr(found)
