# SPDX-License-Identifier: MIT OR Apache-2.0
from libc.stdint cimport uint64_t


cdef uint64_t as_ptr(object value) except? 0xFFFFFFFFFFFFFFFF
