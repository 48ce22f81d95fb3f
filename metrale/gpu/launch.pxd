# SPDX-License-Identifier: MIT OR Apache-2.0
# The C level of a launch: a Launch on the caller's stack, filled by the push functions, checked and started by
# launch(). Nothing here touches the heap before the driver call, nor the interpreter: with and without the GIL, it is
# the same.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport LAUNCH_CLUSTER, Launch, LaunchFlag
from metrale.gpu.kernel cimport (
    CODE_F32, CODE_F64, CODE_INT4, CODE_INT8, CODE_PTR, KIND_BYTES, MAX_PARAM_BYTES, MAX_PARAMS, KernelHandle,
    param_code,
)


cdef inline void launch_geometry(
    Launch* l, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, size_t shared_bytes
) noexcept nogil:
    """Start a launch: geometry, and an empty argument list."""
    l.grid[0], l.grid[1], l.grid[2] = gx, gy, gz
    l.block[0], l.block[1], l.block[2] = bx, by, bz
    l.shared_bytes = shared_bytes
    l.flags = 0
    l.n, l.used, l.overflow = 0, 0, 0


cdef inline void launch_cluster(Launch* l, uint32_t x, uint32_t y, uint32_t z) noexcept nogil:
    """Blocks of a cluster."""
    l.cluster[0], l.cluster[1], l.cluster[2] = x, y, z
    l.flags |= LAUNCH_CLUSTER


cdef inline void push_bytes(Launch* l, const void* value, uint32_t size, uint32_t code) noexcept nogil:
    """Append a parameter of ``size`` bytes. Too many are remembered and refused by launch()."""
    cdef uint32_t slot = (size + 7) & ~<uint32_t>7
    if l.n == MAX_PARAMS or slot > MAX_PARAM_BYTES - l.used:
        l.overflow = 1
        return
    memcpy(&l.data[l.used], value, size)
    l.args[l.n] = &l.data[l.used]
    l.codes[l.n] = code
    l.used += slot
    l.n += 1


cdef inline void push_ptr(Launch* l, uint64_t value) noexcept nogil:
    push_bytes(l, &value, 8, CODE_PTR)


cdef inline void push_u32(Launch* l, uint32_t value) noexcept nogil:
    push_bytes(l, &value, 4, CODE_INT4)


cdef inline void push_i32(Launch* l, int32_t value) noexcept nogil:
    push_bytes(l, &value, 4, CODE_INT4)


cdef inline void push_u64(Launch* l, uint64_t value) noexcept nogil:
    push_bytes(l, &value, 8, CODE_INT8)


cdef inline void push_i64(Launch* l, int64_t value) noexcept nogil:
    push_bytes(l, &value, 8, CODE_INT8)


cdef inline void push_f32(Launch* l, float value) noexcept nogil:
    push_bytes(l, &value, 4, CODE_F32)


cdef inline void push_f64(Launch* l, double value) noexcept nogil:
    push_bytes(l, &value, 8, CODE_F64)


cdef int check_fit(GpuBackend gpu, KernelHandle kernel, Launch* l) except -1 nogil
cdef int launch(GpuBackend gpu, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil


cdef inline int serve(GpuBackend gpu) except -1 nogil:
    """Refuse a backend that is closed, or was opened before a fork."""
    if not gpu.serving:
        with gil:
            gpu.check_open()
    return 0


cdef inline int start(GpuBackend gpu, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil:
    if gpu.checking:
        with gil:
            return gpu.checked_launch(kernel, l, stream)
    return gpu.driver_launch(kernel, l, stream)
