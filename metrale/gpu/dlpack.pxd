# SPDX-License-Identifier: MIT OR Apache-2.0
# DLPack's structures, as its C header lays them out in versions 0.x (Managed) and 1.x (ManagedVersioned).
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum DLDeviceType:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3          # page-locked
    DL_CUDA_MANAGED = 13

cdef enum DLFlag:
    DL_READ_ONLY = 1
    DL_IS_COPIED = 2

cdef struct DLDevice:
    int32_t type
    int32_t id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides          # in elements; null: C-contiguous
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* context
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef struct DLVersion:
    uint32_t major
    uint32_t minor

cdef struct DLManagedTensorVersioned:
    DLVersion version
    void* context
    void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
    uint64_t flags
    DLTensor tensor


cdef object export_bytes(object owner, Py_ssize_t* exports, uint64_t address, size_t nbytes, DLDevice device,
                         bint versioned)
cdef const DLTensor* tensor_in(object capsule, uint64_t* flags) except NULL
cdef bint is_contiguous(const DLTensor* tensor) noexcept
