# SPDX-License-Identifier: MIT OR Apache-2.0
"""The C level of a launch: whether it fits the kernel and the device, and its start."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp

from metrale.errors import LaunchError

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport LAUNCH_CLUSTER, LAUNCH_OVERLAP_PREVIOUS, Launch
from metrale.gpu.kernel cimport (
    KIND_ANY, KIND_BYTES, KIND_FLOAT, KIND_INT, KIND_PTR, MAX_PARAM_BYTES, MAX_PARAMS, KernelHandle,
)

_KIND_NAMES = {KIND_ANY: "any", KIND_PTR: "pointer", KIND_INT: "integer", KIND_FLOAT: "float",
               KIND_BYTES: "struct"}


cdef int check_fit(GpuBackend gpu, KernelHandle kernel, Launch* l) except -1 nogil:
    """Raise the LaunchError for a launch that does not fit the kernel or the device."""
    cdef uint64_t threads = <uint64_t>l.block[0] * l.block[1] * l.block[2]
    cdef bint ok = (
        not l.overflow and l.n == kernel.n_params
        and (memcmp(l.codes, kernel.codes, l.n * sizeof(uint32_t)) == 0 or codes_fit(l, kernel))
        and kernel.owner == gpu.id
        and 0 < threads <= kernel.max_threads
        and l.block[0] <= gpu.max_block[0] and l.block[1] <= gpu.max_block[1] and l.block[2] <= gpu.max_block[2]
        and l.grid[0] - 1 < gpu.max_grid[0] and l.grid[1] - 1 < gpu.max_grid[1] and l.grid[2] - 1 < gpu.max_grid[2]
        and l.shared_bytes <= kernel.max_shared
    )
    if ok and (l.flags == 0 or (l.flags == LAUNCH_OVERLAP_PREVIOUS and gpu.overlaps)):
        return 0
    with gil:
        if not ok:
            explain(gpu, kernel, l)
        check_cluster(kernel, l)
        gpu.check_open()
        gpu.driver_check_special(kernel, l)
    return 0


cdef int launch(GpuBackend gpu, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil:
    """Check ``l`` against the kernel and the device, and launch. Raises LaunchError before the driver call."""
    serve(gpu)
    check_fit(gpu, kernel, l)
    return start(gpu, kernel, l, stream)


cdef inline bint code_fits(uint32_t got, uint32_t want) noexcept nogil:
    return got == want or (want >> 16 == KIND_ANY and got & 0xFFFF == want & 0xFFFF)


cdef bint codes_fit(Launch* l, KernelHandle kernel) noexcept nogil:
    """Whether each argument has its parameter's code, or the size of one that is known by its size alone."""
    cdef uint32_t i, got, want
    for i in range(l.n):
        got, want = l.codes[i], kernel.codes[i]
        if not code_fits(got, want):
            return False
    return True


cdef int check_cluster(KernelHandle kernel, Launch* l) except -1:
    """Clusters tile the grid."""
    cdef int i
    if not l.flags & LAUNCH_CLUSTER:
        return 0
    for i in range(3):
        if l.cluster[i] == 0 or l.grid[i] % l.cluster[i] != 0:
            raise LaunchError(f"{kernel.module}.{kernel.name}: cluster: got {tuple(l.cluster)}, allowed: 1 or more "
                              f"that divide the grid, {tuple(l.grid)}")
    return 0


cdef int explain(GpuBackend gpu, KernelHandle kernel, Launch* l) except -1:
    """Raise the LaunchError that says what is wrong."""
    cdef uint32_t i, got, want
    cdef str name = f"{kernel.module}.{kernel.name}"
    if kernel.owner != gpu.id:
        raise LaunchError(f"{name}: the kernel belongs to another backend than {gpu!r}")
    if l.overflow:
        raise LaunchError(f"{name}: more than {MAX_PARAMS} arguments or {MAX_PARAM_BYTES} bytes of them")
    if l.n != kernel.n_params:
        names = ", ".join(p for p, _ in kernel.params)
        raise LaunchError(f"{name}: got {l.n} arguments, takes {kernel.n_params}: ({names})")
    for i in range(l.n):
        got, want = l.codes[i], kernel.codes[i]
        if not code_fits(got, want):
            raise LaunchError(f"{name}: argument {i + 1} ({kernel.params[i][0]}): got {_describe(got)}, "
                              f"takes {_describe(want)}")
    for what, dims, limits in (("grid", tuple(l.grid), tuple(gpu.max_grid)),
                               ("block", tuple(l.block), tuple(gpu.max_block))):
        if not all(1 <= d <= m for d, m in zip(dims, limits, strict=True)):
            raise LaunchError(f"{name}: {what}: got {dims}, allowed: 1 to {limits}")
    threads = <uint64_t>l.block[0] * l.block[1] * l.block[2]
    if threads > kernel.max_threads:
        raise LaunchError(f"{name}: block: got {threads} threads, allowed: 1 to {kernel.max_threads}")
    if l.shared_bytes > kernel.max_shared:
        raise LaunchError(f"{name}: shared_mem: got {l.shared_bytes} bytes, allowed: 0 to {kernel.max_shared}")
    return 0


def _describe(code):
    kind, size = code >> 16, code & 0xFFFF
    return f"a {size}-byte {_KIND_NAMES[kind]}" if kind != KIND_ANY else f"{size} bytes"
