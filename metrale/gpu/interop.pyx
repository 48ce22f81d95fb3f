# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the runtime takes for a device pointer."""

from libc.stdint cimport uint64_t

from metrale.errors import refuse

from metrale.gpu.buffer cimport DeviceBuffer


cdef uint64_t as_ptr(object value) except? 0xFFFFFFFFFFFFFFFF:
    """The address behind ``value``: an int, a DeviceBuffer, ``__cuda_array_interface__`` or ``data_ptr()``; None is
    the null pointer."""
    cdef uint64_t p = 0
    if value is None:
        return 0
    if isinstance(value, int):
        address = value
    elif isinstance(value, DeviceBuffer):
        return (<DeviceBuffer>value).address()
    elif hasattr(value, "__cuda_array_interface__"):
        address = value.__cuda_array_interface__["data"][0]
    elif hasattr(value, "data_ptr"):
        address = value.data_ptr()
    else:
        refuse("ptr", value, "an int, a DeviceBuffer, or an object with __cuda_array_interface__ or data_ptr()")
    try:
        p = address
    except OverflowError:
        refuse("ptr", address, "a device address, 0 to 2**64 - 1")
    return p
