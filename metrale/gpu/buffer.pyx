# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeviceBuffer, PinnedBuffer and OwnedHandle: allocations, streams and events with an owner."""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from libc.stdint cimport uint64_t

from metrale.errors import ArgumentError, MetraleError, refuse
from metrale.gpu.pointer import DevicePtr

from metrale.gpu.core cimport Core, is_finalizing
from metrale.gpu.dlpack cimport DL_CPU, DL_CUDA, DLDevice, export_bytes
from metrale.gpu.interop cimport as_handle, as_size, is_captured, order_after
from metrale.gpu.ledger cimport Allocation


cdef class OwnedMemory:
    """Memory that is freed by ``free()``, by leaving a ``with`` block, or with its last reference, and by nothing
    else: ``gpu.free`` refuses its address."""

    def __init__(self):
        raise TypeError(f"{type(self).__name__} is abstract: use gpu.buffer() or gpu.pinned_buffer()")

    cdef int take(self, Core gpu, object nbytes, str kind, object tag) except -1:
        if self.gpu is not None:
            raise TypeError(f"a {type(self).__name__} is initialised once")
        self.allocation = gpu.allocate(as_size(nbytes, "nbytes"), kind, tag, type(self).__name__)
        self.nbytes = self.allocation.nbytes
        self.gpu = gpu
        return 0

    cdef uint64_t address(self) except 0:
        if self.allocation is None or self.allocation.freed_at is not None:
            raise MetraleError(f"the {type(self).__name__} has been freed")
        return self.allocation.ptr

    cdef bint is_used(self) except -1:
        """Whether others use the memory: views of it, DLPack and copies that are not done."""
        cdef Core gpu = self.gpu
        if self.allocation is None or self.allocation.freed_at is not None or not gpu.serving:
            return False
        if self.exports > 0:
            gpu.let_go(False)
        return self.exports > 0

    def free(self):
        """Free the memory. A second call does nothing; so does one after the backend's ``close()``, which has freed
        it, and one in a forked child, whose parent still has it. Refused while others use the memory: what views of
        it, DLPack and copies that are not done have been given. A ``with`` block that ends in an error leaves it to
        them."""
        cdef Allocation allocation = self.allocation
        cdef Core gpu = self.gpu
        if allocation is None:
            return
        if self.is_used():
            raise MetraleError(f"{self!r} is exported {self.exports} times: it is freed once the views, DLPack "
                               "tensors and copies that use it are done")
        self.allocation = None
        if gpu.serving:
            try:
                gpu.release(allocation)
            except BaseException:
                if allocation.freed_at is None:      # such as an interrupt: the next call goes on
                    self.allocation = allocation
                raise

    def __enter__(self):
        self.address()
        return self

    def __exit__(self, kind, *exc):
        # What uses it holds a reference, so after an error the last one frees it: a refusal would hide the error.
        if kind is None or not self.is_used():
            self.free()

    def __del__(self):
        if self.allocation is not None and not is_finalizing():
            self.free()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} belongs to its process and cannot be pickled")

    def __repr__(self):
        name = type(self).__name__
        if self.allocation is None:
            return f"<{name}, freed>"
        return f"<{name} {self.nbytes} bytes at {self.allocation.ptr:#x}>"


cdef class DeviceBuffer(OwnedMemory):
    """Device memory that is freed by ``free()``, by leaving a ``with`` block, or with its last reference.

    Made by ``gpu.buffer(nbytes, tag=None)`` and ``gpu.upload(host_buffer, tag=None)``; contents start undefined. The
    buffer alone frees it: ``gpu.free`` refuses its address. To other libraries it is a vector of bytes, without a
    copy: through DLPack (``torch.from_dlpack(buffer)``; on the host ``numpy.from_dlpack(buffer)``) and, on a GPU,
    ``__cuda_array_interface__``. While a DLPack tensor lives the memory stays; only the backend's ``close()`` takes
    it, as it takes all.
    """

    def __init__(self, Core gpu not None, nbytes, tag=None):
        self.take(gpu, nbytes, "device", tag)

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

    def __dlpack_device__(self):
        """DLPack's ``(device type, device number)``."""
        return (<int>DL_CUDA, self.gpu.ordinal) if self.gpu.kind == "cuda" else (<int>DL_CPU, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of the bytes. What the consumer queues on ``stream`` from now on (None: the legacy stream,
        -1: no order) comes after what the default stream has by now."""
        cdef Core gpu = self.gpu
        cdef uint64_t consumer, address = self.address()
        cdef DLDevice device
        gpu.check_open()
        device.type, device.id = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != (device.type, device.id):
            raise BufferError(f"dl_device: got {dl_device!r}, allowed: {(device.type, device.id)}, where the memory is")
        if copy:
            raise BufferError(f"copy: got {copy!r}, allowed: False or None: the consumer makes copies")
        if device.type == DL_CPU:
            if stream is not None and stream != -1:
                refuse("stream", stream, "None or -1 for CPU memory")
        elif stream is None or stream != -1:
            consumer = 1 if stream is None else as_handle(stream, "stream")
            if consumer == 0:
                refuse("stream", stream, "None, -1, 1 (legacy), 2 (per thread) or a handle")
            if not is_captured(gpu, consumer):
                order_after(gpu, consumer, gpu.stream0)
        return export_bytes(self, &self.exports, address, self.nbytes, device,
                            max_version is not None and max_version[0] >= 1)


cdef class PinnedBuffer(OwnedMemory):
    """Page-locked host memory that is freed by ``free()``, by leaving a ``with`` block, or with its last reference.

    Made by ``gpu.pinned_buffer(nbytes, tag=None)``; contents start undefined. It is a writable buffer of bytes to
    Python: ``numpy.frombuffer(pinned, dtype)`` and ``memoryview(pinned)`` look at it, and copies take it as host
    memory, the ``_async`` ones without a copy on the way. ``free()`` is refused while a view lives or such a copy is
    not done; only the backend's ``close()`` takes the memory, as it takes all.
    """

    def __init__(self, Core gpu not None, nbytes, tag=None):
        self.take(gpu, nbytes, "pinned", tag)

    @property
    def ptr(self):
        """The host address, an ``int``, which kernels take too; an error once freed."""
        return self.address()

    def __getbuffer__(self, Py_buffer* view, int flags):
        view.buf = <void*>self.address()
        view.obj = self
        view.len = self.nbytes
        view.itemsize = 1
        view.readonly = 0
        view.format = <char*>b"B" if flags & PyBUF_FORMAT else <char*>NULL
        view.ndim = 1
        view.shape = &view.len if flags & PyBUF_ND else <Py_ssize_t*>NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else <Py_ssize_t*>NULL
        view.suboffsets = NULL
        view.internal = NULL
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.exports -= 1


cdef class OwnedHandle:
    """A stream, an event or a graph: ``create()`` makes it, and ``destroy(value)`` is called by ``free()`` or with the
    last reference.

    An interrupt cannot come between its creation and the object that destroys it, as it can in Python code.
    """

    def __init__(self, Core gpu not None, create, destroy):
        if self.gpu is not None:
            raise TypeError("an OwnedHandle is initialised once")
        self.gpu, self.destroy = gpu, destroy
        self.value = create()
        gpu.ledger.newest(self.value).owner = type(self).__name__

    def free(self):
        """Destroy it. Nothing the second time, after the backend's ``close()``, and in a forked child."""
        value, self.value = self.value, None
        if value is not None and (<Core>self.gpu).serving:
            try:
                self.destroy(value)
            except ArgumentError:      # it is not there any more
                raise
            except BaseException:
                self.value = value
                raise

    def __del__(self):
        if self.value is not None and not is_finalizing():
            self.free()

    def __reduce__(self):
        raise TypeError("an OwnedHandle is the only owner of what it holds, and cannot be copied or pickled")
