# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    MAX_PARAMS = 128          # parameters of a kernel
    MAX_PARAM_BYTES = 4096    # their bytes: CUDA's limit for compute capability below 7.0, and a sane one above

# A parameter's code is kind << 16 | size in bytes; kind 0 is known by its size alone.
cdef enum ParamKind:
    KIND_ANY = 0
    KIND_PTR = 1
    KIND_INT = 2
    KIND_FLOAT = 3
    KIND_BYTES = 4

cdef inline uint32_t param_code(uint32_t kind, uint32_t size) noexcept nogil:
    return (kind << 16) | size

cdef enum ParamCode:
    CODE_PTR = (1 << 16) | 8
    CODE_INT4 = (2 << 16) | 4
    CODE_INT8 = (2 << 16) | 8
    CODE_F32 = (3 << 16) | 4
    CODE_F64 = (3 << 16) | 8


cdef class KernelHandle:
    # What every launch looks at comes first, in a line of the cache or two.
    cdef void* function                 # CUfunction, or the host library's kernel record
    cdef uint64_t owner                 # id of the backend that loaded it
    cdef const char* launchers_names    # the names that the last launcher takes: a literal, known by its address
    cdef int place                      # of this kernel among them
    cdef uint32_t n_params
    cdef uint32_t max_threads           # a block of this kernel may have
    cdef uint32_t max_shared            # dynamic shared bytes a launch may ask for
    cdef uint32_t shared_opted          # the largest dynamic size the driver has been told of
    cdef uint32_t codes[MAX_PARAMS]
    cdef void* launcher                 # the host library's launch function
    cdef readonly str module
    cdef readonly str name
    cdef readonly tuple params          # ((name, kind), ...)

    cdef int set_params(self, tuple params, list codes) except -1


cdef str kind_of(uint32_t code)
