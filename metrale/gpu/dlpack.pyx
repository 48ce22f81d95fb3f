# SPDX-License-Identifier: MIT OR Apache-2.0
"""DLPack capsules: made of memory with an owner, and read."""

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from metrale.gpu.core cimport is_finalizing

cdef extern from "Python.h":
    bint Py_IsInitialized() noexcept nogil
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** traceback)
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* traceback)
    # With a borrowed argument: the capsule is on its way out, and must not be counted up again.
    ctypedef void (*destructor)(PyObject* capsule) noexcept
    object PyCapsule_New(void* pointer, const char* name, destructor gone)

cdef const char* PLAIN = "dltensor"
cdef const char* VERSIONED = "dltensor_versioned"

cdef enum:
    UINT = 1                  # DLPack's code of unsigned integers
    MAJOR = 1                 # the version that is written and understood
    MINOR = 0


cdef struct Export:
    DLManagedTensor plain
    DLManagedTensorVersioned versioned
    int64_t shape
    int64_t stride
    PyObject* owner           # a reference of its own
    Py_ssize_t* exports       # the owner's count


cdef object export_bytes(object owner, Py_ssize_t* exports, uint64_t address, size_t nbytes, DLDevice device,
                         bint versioned):
    """A capsule with the bytes at ``address`` as a vector; ``owner`` lives, and counts it in ``exports``, until the
    consumer is done with it."""
    cdef Export* export = <Export*>calloc(1, sizeof(Export))
    cdef DLTensor tensor
    if export == NULL:
        raise MemoryError
    export.shape, export.stride = <int64_t>nbytes, 1
    tensor.data, tensor.device, tensor.ndim, tensor.byte_offset = <void*>address, device, 1, 0
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = UINT, 8, 1
    tensor.shape, tensor.strides = &export.shape, &export.stride
    export.plain.tensor = export.versioned.tensor = tensor
    export.plain.context = export.versioned.context = export
    export.plain.deleter, export.versioned.deleter = delete_plain, delete_versioned
    export.versioned.version.major, export.versioned.version.minor = MAJOR, MINOR
    export.owner, export.exports = <PyObject*>owner, exports
    try:
        if versioned:
            capsule = PyCapsule_New(&export.versioned, VERSIONED, drop_capsule)
        else:
            capsule = PyCapsule_New(&export.plain, PLAIN, drop_capsule)
    except BaseException:
        free(export)
        raise
    Py_INCREF(owner)
    exports[0] += 1
    return capsule


cdef void drop_capsule(PyObject* capsule) noexcept:
    """A capsule that nobody has consumed, and thereby renamed, still owns its tensor."""
    cdef DLManagedTensor* plain
    cdef DLManagedTensorVersioned* versioned
    if PyCapsule_IsValid(<object>capsule, PLAIN):
        plain = <DLManagedTensor*>PyCapsule_GetPointer(<object>capsule, PLAIN)
        plain.deleter(plain)
    elif PyCapsule_IsValid(<object>capsule, VERSIONED):
        versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(<object>capsule, VERSIONED)
        versioned.deleter(versioned)


cdef void delete_plain(DLManagedTensor* tensor) noexcept nogil:
    give_back(<Export*>tensor.context)


cdef void delete_versioned(DLManagedTensorVersioned* tensor) noexcept nogil:
    give_back(<Export*>tensor.context)


cdef void give_back(Export* export) noexcept nogil:
    """From any thread, with or without the GIL, and also while an exception is on its way. A thread that asks for the
    GIL of an interpreter that ends would not come back: then all stays as it is."""
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* traceback = NULL
    if not Py_IsInitialized() or is_finalizing():
        return
    with gil:
        PyErr_Fetch(&kind, &value, &traceback)
        export.exports[0] -= 1
        Py_XDECREF(export.owner)
        PyErr_Restore(kind, value, traceback)
    free(export)


cdef const DLTensor* tensor_in(object capsule, uint64_t* flags) except NULL:
    """The tensor in a capsule of ``__dlpack__()``, which stays its owner; ``flags`` takes its ``DLFlag``."""
    cdef DLManagedTensorVersioned* versioned
    flags[0] = 0
    if PyCapsule_IsValid(capsule, PLAIN):
        return &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, PLAIN)).tensor
    if not PyCapsule_IsValid(capsule, VERSIONED):
        raise BufferError("__dlpack__() gave no capsule with a tensor")
    versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, VERSIONED)
    if versioned.version.major != MAJOR:
        raise BufferError(f"__dlpack__() gave version {versioned.version.major} where {MAJOR} was asked for")
    flags[0] = versioned.flags
    return &versioned.tensor


cdef bint is_contiguous(const DLTensor* tensor) noexcept:
    """Whether the elements, of which there are some, lie one after another in C order."""
    cdef int64_t expected = 1
    cdef int i
    for i in range(tensor.ndim - 1, -1, -1):
        if tensor.strides != NULL and tensor.shape[i] != 1 and tensor.strides[i] != expected:
            return False
        expected *= tensor.shape[i]
    return True
