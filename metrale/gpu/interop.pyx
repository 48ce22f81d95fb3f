# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the runtime takes for a device pointer, a stream, a size and host memory, and how it refuses all else."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint64_t

from metrale.errors import ArgumentError, CaptureError, MetraleError, refuse

from metrale.gpu.atomic cimport atomic_add
from metrale.gpu.buffer cimport DeviceBuffer
from metrale.gpu.core cimport Core
from metrale.gpu.dlpack cimport (
    DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED, DL_IS_COPIED, DL_READ_ONLY, DLTensor, is_contiguous, tensor_in,
)
from metrale.gpu.driver cimport CAPTURE_NONE

cdef enum:
    UNORDERED = -1      # in DLPack's __dlpack__(stream=...)
    LEGACY = 1          # the legacy stream there, and to the driver, where it is 0 too

cdef str CONTIGUOUS = "C-contiguous arrays"
cdef str WRITABLE = "arrays that a kernel may write"


cdef uint64_t as_ptr(object value, str name, Core gpu, uint64_t stream) except? 0xFFFFFFFFFFFFFFFF:
    """The address behind ``value``, for work that is queued on ``stream`` next: it comes after what the producer of
    a foreign object has queued so far. None is the null pointer."""
    cdef uint64_t address = 0
    if own_ptr(value, name, gpu, &address):
        return address
    return foreign_ptr(value, name, gpu, stream, True)


cdef uint64_t address_of(object value, str name, Core gpu) except? 0xFFFFFFFFFFFFFFFF:
    """The address behind ``value``, and no order of streams."""
    cdef uint64_t address = 0
    if own_ptr(value, name, gpu, &address):
        return address
    return foreign_ptr(value, name, gpu, 0, False)


cdef bint own_ptr(object value, str name, Core gpu, uint64_t* address) except -1:
    """Whether ``value`` is an address already: an int, None, or a DeviceBuffer of this backend."""
    cdef long long n
    if is_int(value, 0, LONGEST_INT, &n):
        address[0] = n
    elif value is None:
        address[0] = 0
    elif isinstance(value, int):
        address[0] = as_handle(value, name)
    elif isinstance(value, DeviceBuffer) and (<DeviceBuffer>value).gpu is gpu:
        address[0] = (<DeviceBuffer>value).address()
    else:
        return False
    return True


cdef uint64_t foreign_ptr(object value, str name, Core gpu, uint64_t stream,
                          bint ordered) except? 0xFFFFFFFFFFFFFFFF:
    """The address of another library's array, which lies on this device, C-contiguous; of one without elements null.
    With ``ordered``, work that is queued on ``stream`` from now on comes after what the producer has queued so far;
    not while ``stream`` is captured.

    DLPack comes first: torch's ``__cuda_array_interface__`` says nothing of streams. ``data_ptr()`` alone, and an
    integer of another type than int, are taken as they are.
    """
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return dlpack_ptr(value, name, gpu, stream, ordered)
    if hasattr(value, "__cuda_array_interface__"):
        return array_ptr(value, name, gpu, stream, ordered)
    if hasattr(value, "data_ptr"):
        return tensor_ptr(value, name, gpu)
    if hasattr(value, "__index__"):
        return as_handle(value, name)
    refuse(name, value, "an int, a DeviceBuffer, or an object with DLPack, __cuda_array_interface__ or data_ptr()")


cdef uint64_t dlpack_ptr(object value, str name, Core gpu, uint64_t stream,
                         bint ordered) except? 0xFFFFFFFFFFFFFFFF:
    cdef const DLTensor* tensor = NULL
    cdef uint64_t flags = 0, address
    cdef int i
    try:
        kind, number = value.__dlpack_device__()
        check_device(value, name, gpu, int(kind), int(number))
        on = None
        if kind == DL_CUDA or kind == DL_CUDA_MANAGED:
            on = (stream or LEGACY) if ordered and not is_captured(gpu, stream) else UNORDERED
        # A parameter of a model exports nothing while it asks for gradients; its alias does.
        capsule = capsule_of(value.detach() if getattr(value, "requires_grad", False) else value, on)
        tensor = tensor_in(capsule, &flags)
    except MetraleError:
        raise
    except Exception as error:
        reject(name, value, f"whose DLPack export fails: {error}", "arrays that can be exported")
    if flags & DL_IS_COPIED:
        reject(name, value, "that exports a copy of itself", "arrays that export their own memory")
    if flags & DL_READ_ONLY:
        reject(name, value, "that is read-only", WRITABLE)
    for i in range(tensor.ndim):
        if tensor.shape[i] == 0:
            return 0
    if not is_contiguous(tensor):
        shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
        strides = tuple([tensor.strides[i] for i in range(tensor.ndim)])
        reject(name, value, f"of shape {shape} with strides {strides}", CONTIGUOUS)
    if tensor.data == NULL:
        reject(name, value, "of elements at a null address", "memory")
    address = <uint64_t>tensor.data + tensor.byte_offset
    if gpu.checking:
        gpu.ledger.reused(address)
    return address


cdef object capsule_of(object value, object stream):
    """A DLPack capsule of ``value``, of version 1 where it knows that."""
    try:
        return value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        return value.__dlpack__(stream=stream)


cdef uint64_t array_ptr(object value, str name, Core gpu, uint64_t stream,
                        bint ordered) except? 0xFFFFFFFFFFFFFFFF:
    cdef uint64_t address, base = 0, producer = 0
    cdef size_t size = 0
    interface = value.__cuda_array_interface__
    try:
        version, shape, (pointer, read_only) = interface["version"], tuple(interface["shape"]), interface["data"]
        strides, item, mask = interface.get("strides"), int(interface["typestr"][2:]), interface.get("mask")
        on = interface.get("stream")
        packed = []
        for extent in reversed(shape):
            packed.insert(0, item)
            item = item * as_size(extent, name)
        strides = tuple(packed if strides is None else strides)
        scattered = any([s != p and n != 1 for s, p, n in zip(strides, packed, shape, strict=True)])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reject(name, value, f"with a __cuda_array_interface__ that cannot be read: {error!r}",
               "one with version, shape, typestr, data and perhaps strides, as the protocol has them")
    if version not in (2, 3):
        reject(name, value, f"with a __cuda_array_interface__ of version {version!r}", "versions 2 and 3")
    address = as_handle(pointer, name)
    if mask is not None:
        reject(name, value, "with a mask", "arrays without one")
    if read_only:
        reject(name, value, "that is read-only", WRITABLE)
    if on is not None:
        producer = as_handle(on, f"{name}: stream")
        if producer == 0:
            reject(name, value, "with the stream 0", "None, 1 (legacy), 2 (per thread) or a handle")
    if scattered and 0 not in shape:
        reject(name, value, f"of shape {shape} with strides {strides}", CONTIGUOUS)
    if address == 0 and 0 not in shape:
        reject(name, value, "of elements at a null address", "memory")
    check_device(value, name, gpu, DL_CUDA, None)
    if 0 in shape:
        return 0
    try:
        gpu.driver_range(address, &base, &size)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {str(error).removeprefix('ptr: ')}") from None
    if ordered and producer != 0 and not is_captured(gpu, stream):
        order_after(gpu, stream, producer)
    return address


cdef uint64_t tensor_ptr(object value, str name, Core gpu) except? 0xFFFFFFFFFFFFFFFF:
    device = getattr(value, "device", None)
    kind = {"cpu": DL_CPU, "cuda": DL_CUDA}.get(getattr(device, "type", None))
    if kind is not None:
        check_device(value, name, gpu, kind, device.index)
    if hasattr(value, "is_contiguous") and not value.is_contiguous():
        reject(name, value, "that is not contiguous", CONTIGUOUS)
    return as_handle(value.data_ptr(), name)


cdef int check_device(object value, str name, Core gpu, int kind, object number) except -1:
    """Refuse memory of another device; a ``number`` of None is not known here."""
    cdef bint cuda = gpu.kind == "cuda"
    if cuda:
        if kind == DL_CUDA_HOST or kind == DL_CUDA_MANAGED:
            return 0
        if kind == DL_CUDA and (number is None or number == gpu.ordinal):
            return 0
    elif kind == DL_CPU or kind == DL_CUDA_HOST:
        return 0
    known = {DL_CPU: "CPU memory", DL_CUDA: "CUDA memory", DL_CUDA_HOST: "page-locked memory",
             DL_CUDA_MANAGED: "managed memory"}
    where = "" if number is None or kind == DL_CPU else f" of device {number}"
    reject(name, value, f"in {known.get(kind, f'memory of kind {kind}')}{where}",
           f"CUDA memory of device {gpu.ordinal}" if cuda else "CPU memory")


cdef bint is_captured(Core gpu, uint64_t stream) except -1:
    return gpu.driver_capture_status(stream, NULL, NULL) != CAPTURE_NONE


cdef int order_after(Core gpu, uint64_t stream, uint64_t producer) except -1:
    """Make what is queued on ``stream`` from now on wait for what is queued on ``producer``."""
    cdef uint64_t event
    if (stream or LEGACY) == (producer or LEGACY):
        return 0
    if is_captured(gpu, producer):
        raise CaptureError(f"the stream {producer:#x}, whose work the stream {stream:#x} would wait for, is being "
                           "captured, and what is captured runs when its graph is launched")
    atomic_add(&gpu.in_flight, 1)      # until the event is back among the spare ones: close() waits for it
    try:
        event = gpu.spare_events.pop() if gpu.spare_events else gpu.driver_create_event(False)
        try:
            gpu.driver_record_event(event, producer)
            gpu.driver_stream_wait_event(stream, event)
        finally:
            gpu.spare_events.append(event)
    finally:
        atomic_add(&gpu.in_flight, -1)
    return 0


cdef int reject(str name, object value, str what, str allowed) except -1:
    """``refuse`` for an array, whose repr might ask the device for its values."""
    kind = type(value)
    raise ArgumentError(f"{name}: got a {kind.__module__}.{kind.__qualname__} {what}, allowed: {allowed}")


cdef uint64_t as_handle(object value, str name) except? 0xFFFFFFFFFFFFFFFF:
    """An address, stream or event."""
    cdef long long n
    if is_int(value, 0, LONGEST_INT, &n):
        return n
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
