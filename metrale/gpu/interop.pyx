# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the runtime takes for a device pointer, a stream, a size and host memory, and how it refuses all else."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_CheckExact
from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint64_t

from metrale.errors import refuse

from metrale.gpu.buffer cimport DeviceBuffer


cdef uint64_t as_ptr(object value, str name="ptr") except? 0xFFFFFFFFFFFFFFFF:
    """The address behind ``value``: an int, a DeviceBuffer, ``__cuda_array_interface__`` or ``data_ptr()``; None is
    the null pointer."""
    if PyLong_CheckExact(value):
        return as_handle(value, name)
    if value is None:
        return 0
    if isinstance(value, int):
        return as_handle(value, name)
    if isinstance(value, DeviceBuffer):
        return (<DeviceBuffer>value).address()
    try:
        if hasattr(value, "__cuda_array_interface__"):
            return as_handle(value.__cuda_array_interface__["data"][0], name)
        if hasattr(value, "data_ptr"):
            return as_handle(value.data_ptr(), name)
    except (KeyError, IndexError, TypeError):
        pass
    if hasattr(value, "__index__"):
        return as_handle(value, name)
    refuse(name, value, "an int, a DeviceBuffer, or an object with __cuda_array_interface__ or data_ptr()")


cdef uint64_t as_handle(object value, str name) except? 0xFFFFFFFFFFFFFFFF:
    """An address, stream or event."""
    cdef uint64_t handle
    if PyLong_CheckExact(value):
        try:
            handle = value
            return handle
        except OverflowError:
            pass
    return as_integer(value, name, 0xFFFFFFFFFFFFFFFF, "an integer, 0 to 2**64 - 1")


cdef size_t as_size(object value, str name) except? 0xFFFFFFFFFFFFFFFF:
    """A number of bytes: beyond any memory, and yet far from overflow when rounded up."""
    return as_integer(value, name, (<uint64_t>1 << 62) - 1, "an integer number of bytes, 0 to 2**62 - 1")


cdef uint64_t as_integer(object value, str name, uint64_t limit, str allowed) except? 0xFFFFFFFFFFFFFFFF:
    """An integer from 0 to ``limit``, of any integer type but bool."""
    cdef uint64_t n = 0
    if isinstance(value, bool):
        refuse(name, value, allowed)
    try:
        n = PyNumber_Index(value)
    except (OverflowError, TypeError):
        refuse(name, value, allowed)
    if n > limit:
        refuse(name, value, allowed)
    return n


cdef int host_buffer(object value, str name, bint writable, Py_buffer* view) except -1:
    """Fill ``view``, which the caller releases, with the memory of a contiguous buffer."""
    try:
        PyObject_GetBuffer(value, view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
    except (BufferError, TypeError, ValueError):
        refuse(name, type(value), f"a contiguous{' and writable' if writable else ''} buffer")
    return 0


cdef class HostView:
    """The memory of a contiguous buffer, which stays where it is as long as this lives."""

    def __dealloc__(self):
        if self.filled:
            PyBuffer_Release(&self.view)


cdef HostView host_view(object value, str name, bint writable):
    cdef HostView held = HostView.__new__(HostView)
    host_buffer(value, name, writable, &held.view)
    held.filled = True
    return held
