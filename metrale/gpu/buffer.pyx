# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeviceBuffer: an allocation with an owner."""

import sys

from libc.stdint cimport uint64_t

from metrale.errors import MetraleError
from metrale.gpu.pointer import DevicePtr

from metrale.gpu.core cimport Core
from metrale.gpu.interop cimport as_size
from metrale.gpu.ledger cimport Allocation


cdef class DeviceBuffer:
    """Device memory that is freed by ``free()``, by leaving a ``with`` block, or with its last reference.

    Made by ``gpu.buffer(nbytes, tag=None)`` and ``gpu.upload(host_buffer, tag=None)``; contents start undefined. The
    buffer alone frees it: ``gpu.free`` refuses its address. On a GPU it offers ``__cuda_array_interface__`` as a
    vector of bytes.
    """

    def __init__(self, Core gpu not None, nbytes, tag=None):
        if self.gpu is not None:
            raise TypeError("a DeviceBuffer is initialised once")
        self.allocation = gpu.allocate(as_size(nbytes, "nbytes"), "device", tag, "DeviceBuffer")
        self.nbytes = self.allocation.nbytes
        self.gpu = gpu

    cdef uint64_t address(self) except 0:
        if self.allocation is None or self.allocation.freed_at is not None:
            raise MetraleError("the DeviceBuffer has been freed")
        return self.allocation.ptr

    @property
    def ptr(self):
        """The base address, a ``DevicePtr``; an error once freed."""
        return DevicePtr(self.address())

    def numpy(self, dtype="uint8", shape=None):
        """A NumPy copy of the contents, ordered after the default stream's work. ``shape`` defaults to flat."""
        import numpy as np
        out = np.empty(self.nbytes, np.uint8)
        self.gpu.copy_d2h(self.address(), out)
        out = out.view(dtype)
        return out if shape is None else out.reshape(shape)

    @property
    def __cuda_array_interface__(self):
        if self.gpu is None or self.gpu.kind != "cuda":
            raise AttributeError("__cuda_array_interface__: the buffer is not in CUDA memory")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address(), False), "version": 3,
                "strides": None, "stream": self.gpu.default_stream()}

    def free(self):
        """Free the memory. A second call does nothing; so does one after the backend's ``close()``, which has freed
        it, and one in a forked child, whose parent still has it."""
        cdef Allocation allocation = self.allocation
        self.allocation = None
        if allocation is not None and (<Core>self.gpu).is_usable():
            (<Core>self.gpu).release(allocation)

    def __enter__(self):
        self.address()
        return self

    def __exit__(self, *exc):
        self.free()

    def __del__(self):
        if self.allocation is not None and not sys.is_finalizing():
            self.free()

    def __reduce__(self):
        raise TypeError("a DeviceBuffer belongs to its process and cannot be pickled")

    def __repr__(self):
        if self.allocation is None:
            return "<DeviceBuffer, freed>"
        return f"<DeviceBuffer {self.nbytes} bytes at {self.allocation.ptr:#x}>"
