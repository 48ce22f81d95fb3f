# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeviceBuffer: an allocation with an owner."""

import sys

from libc.stdint cimport uint64_t

from metrale.errors import MetraleError
from metrale.gpu.pointer import DevicePtr

from metrale.gpu.backend cimport GpuBackend


cdef class DeviceBuffer:
    """Device memory that is freed by ``free()``, by leaving a ``with`` block, or with its last reference.

    Made by ``gpu.buffer(nbytes, tag=None)`` and ``gpu.upload(host_buffer, tag=None)``; contents start undefined.
    On a GPU it offers ``__cuda_array_interface__`` as a vector of bytes.
    """

    def __init__(self, GpuBackend gpu not None, nbytes, tag=None):
        if self.base != 0:
            raise TypeError("a DeviceBuffer is initialised once")
        self.base = gpu.alloc(nbytes, tag)
        self.nbytes = nbytes
        self.gpu = gpu

    cdef uint64_t address(self) except 0:
        if self.base == 0:
            raise MetraleError("the DeviceBuffer has been freed")
        return self.base

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
                "strides": None, "stream": self.gpu.default_stream() or None}

    def free(self):
        """Free the memory. A second call does nothing; so does one after the backend's ``close()``."""
        cdef uint64_t base = self.base
        self.base = 0
        if base != 0 and not self.gpu.closed:
            self.gpu.free(base)

    def __enter__(self):
        self.address()
        return self

    def __exit__(self, *exc):
        self.free()

    def __del__(self):
        if self.base != 0 and not sys.is_finalizing() and (<GpuBackend>self.gpu).usable():
            self.free()

    def __reduce__(self):
        raise TypeError("a DeviceBuffer belongs to its process and cannot be pickled")

    def __repr__(self):
        return f"<DeviceBuffer {self.nbytes} bytes at {self.base:#x}>" if self.base else "<DeviceBuffer, freed>"
