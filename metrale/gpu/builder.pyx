# SPDX-License-Identifier: MIT OR Apache-2.0
"""KernelLaunch: geometry, arguments, launch."""

cimport cython

from cpython.buffer cimport PyBuffer_Release
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.number cimport PyNumber_Index
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from metrale.errors import ArgumentError, LaunchError, refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport LAUNCH_COOPERATIVE, LAUNCH_OVERLAP_PREVIOUS, Launch, LaunchFlag, copy_launch
from metrale.gpu.interop cimport LONGEST_INT, as_integer, foreign_ptr, host_buffer, is_int, own_ptr
from metrale.gpu.kernel cimport KIND_BYTES, MAX_PARAM_BYTES, KernelHandle, param_code
from metrale.gpu.launch cimport (
    check_fit, launch, launch_cluster, launch_geometry, push_bytes, push_f32, push_f64, push_i32, push_i64, push_ptr,
    push_u32, push_u64,
)
from metrale.gpu.prepared cimport PreparedLaunch, follow, integer_bits, parameter_name, stream_of

cdef enum:
    POOL = 16


# A Launch is large, and a builder lives for one statement: those that are done with wait here for the next.
cdef Launch* pool[POOL]
cdef int pooled = 0


cdef Launch* take_launch() except NULL:
    global pooled
    cdef Launch* fresh
    if pooled > 0:
        pooled -= 1
        return pool[pooled]
    fresh = <Launch*>malloc(sizeof(Launch))
    if fresh == NULL:
        raise MemoryError
    return fresh


cdef void give_launch(Launch* spent) noexcept:
    global pooled
    if pooled < POOL:
        pool[pooled] = spent
        pooled += 1
    else:
        free(spent)


@cython.freelist(16)
cdef class KernelLaunch:
    """Builds one kernel launch and starts it.

    ``KernelLaunch(gpu, kernel).grid(8, 1, 1).block(256, 1, 1).arg_ptr(p).arg_u32(n).launch(stream)``

    Arguments are packed into a fixed buffer in the object and checked, at ``launch``, against the kernel's
    parameters: count, sizes and kinds (pointer, integer, float). The block starts as (1, 1, 1), the grid
    likewise, dynamic shared memory as 0 bytes. After ``launch`` geometry stays, and the next ``arg_*`` starts a
    new argument list; with no ``arg_*`` in between, a second ``launch`` repeats the first. So it is after a launch
    or an argument that was refused. One thread at a time may use a builder.

    Errors: ``LaunchError`` for a launch that does not fit the kernel or the device, before the driver sees it.
    """

    def __cinit__(self, GpuBackend gpu not None, KernelHandle kernel not None):
        self.gpu = gpu
        self.kernel = kernel
        self.packed = take_launch()
        launch_geometry(self.packed, 1, 1, 1, 1, 1, 1, 0)

    def __dealloc__(self):
        if self.packed != NULL:
            give_launch(self.packed)

    @cython.final
    cdef int writing(self) except -1:
        if self.launching:
            raise LaunchError(f"{self.kernel.module}.{self.kernel.name}: another thread is launching with this "
                              "KernelLaunch: each thread needs its own")
        return 0

    @cython.final
    cdef int next_argument(self) except -1:
        self.writing()
        if self.launched:
            self.packed.n = self.packed.used = self.packed.overflow = 0
            self.launched = False
            self.foreign = None
        return 0

    def grid(self, x, y=1, z=1):
        """Blocks in x, y, z; also one 3-sequence."""
        self.writing()
        _set_dims(self.packed.grid, "grid", x, y, z)
        return self

    def block(self, x, y=1, z=1):
        """Threads a block in x, y, z; also one 3-sequence."""
        self.writing()
        _set_dims(self.packed.block, "block", x, y, z)
        return self

    def shared_mem(self, nbytes):
        """Dynamic shared memory a block, in bytes."""
        cdef long long n
        self.writing()
        if is_int(nbytes, 0, self.kernel.max_shared, &n):
            self.packed.shared_bytes = n
            return self
        allowed = f"0 to {self.kernel.max_shared} bytes"
        try:
            self.packed.shared_bytes = as_integer(nbytes, "shared_mem", self.kernel.max_shared, allowed)
        except ArgumentError as error:
            self.refuse_launch(error)
        return self

    def cluster(self, x, y=1, z=1):
        """Blocks of a cluster in x, y, z; also one 3-sequence. The grid is a multiple of it. From compute capability
        9.0."""
        cdef uint32_t dims[3]
        self.writing()
        _set_dims(dims, "cluster", x, y, z)
        launch_cluster(self.packed, dims[0], dims[1], dims[2])
        return self

    def cooperative(self, on=True):
        """Launch all blocks at once or not at all, so that they may wait for each other."""
        return self.set_flag(LAUNCH_COOPERATIVE, on)

    def overlap_previous(self, on=True):
        """Start while the kernel before it on the stream still runs (programmatic dependent launch): the kernel waits
        for it itself, with ``cudaGridDependencySynchronize()``. From compute capability 9.0; on the host without
        effect."""
        return self.set_flag(LAUNCH_OVERLAP_PREVIOUS, on)

    cdef KernelLaunch set_flag(self, LaunchFlag flag, bint on):
        self.writing()
        if on:
            self.packed.flags |= flag
        else:
            self.packed.flags &= ~<uint32_t>flag
        return self

    def arg_ptr(self, value):
        """A device pointer: an int, a DeviceBuffer, or another library's array on this device; None is null.

        An array is asked for its address again at ``launch``, which comes after what its library has queued by then,
        and is kept until the next argument list.
        """
        cdef uint64_t p = 0
        cdef bint own
        try:
            own = own_ptr(value, "ptr", self.gpu, &p)
        except ArgumentError as error:
            self.refuse_next(value, str(error).partition("allowed: ")[2])
        if not own:
            try:
                p = foreign_ptr(value, self.next_name(), self.gpu, 0, False)
            except ArgumentError as error:
                self.launched = True
                self.refuse_launch(error)
        self.next_argument()
        push_ptr(self.packed, p)
        if not own and not self.packed.overflow:
            if self.foreign is None:
                self.foreign = {}
            self.foreign[self.packed.n - 1] = value
        return self

    def arg_u32(self, value):
        """An unsigned 32-bit integer."""
        cdef long long n
        if not is_int(value, 0, 0xFFFFFFFF, &n):
            n = self.integer(value, False, 32)
        self.next_argument()
        push_u32(self.packed, <uint32_t>n)
        return self

    def arg_i32(self, value):
        """A signed 32-bit integer."""
        cdef long long n
        if not is_int(value, -0x80000000, 0x7FFFFFFF, &n):
            n = self.integer(value, True, 32)
        self.next_argument()
        push_i32(self.packed, <int32_t>n)
        return self

    def arg_u64(self, value):
        """An unsigned 64-bit integer."""
        cdef long long n
        if not is_int(value, 0, LONGEST_INT, &n):
            n = self.integer(value, False, 64)
        self.next_argument()
        push_u64(self.packed, n)
        return self

    def arg_i64(self, value):
        """A signed 64-bit integer."""
        cdef long long n
        if not is_int(value, -LONGEST_INT, LONGEST_INT, &n):
            n = self.integer(value, True, 64)
        self.next_argument()
        push_i64(self.packed, n)
        return self

    def arg_f32(self, value):
        """A 32-bit float; the value is rounded to nearest."""
        cdef double v = PyFloat_AS_DOUBLE(value) if PyFloat_CheckExact(value) else self.number(value)
        self.next_argument()
        push_f32(self.packed, <float>v)
        return self

    def arg_f64(self, value):
        """A 64-bit float."""
        cdef double v = PyFloat_AS_DOUBLE(value) if PyFloat_CheckExact(value) else self.number(value)
        self.next_argument()
        push_f64(self.packed, v)
        return self

    def arg_bytes(self, value):
        """A struct by value, or an integer of 1 or 2 bytes, as a contiguous buffer of the parameter's size."""
        cdef Py_buffer view
        cdef uint32_t code
        host_buffer(value, "arg_bytes", False, &view)
        try:
            self.next_argument()
            if view.len > MAX_PARAM_BYTES:
                self.packed.overflow = 1
                return self
            code = param_code(KIND_BYTES, <uint32_t>view.len)
            if view.len <= 2 and self.packed.n < self.kernel.n_params:
                if self.kernel.codes[self.packed.n] & 0xFFFF == <uint32_t>view.len:
                    code = self.kernel.codes[self.packed.n]
            push_bytes(self.packed, view.buf, <uint32_t>view.len, code)
        finally:
            PyBuffer_Release(&view)
        return self

    def launch(self, stream=None):
        """Start the kernel on ``stream`` (an int, an object with ``__cuda_stream__``, None: the default stream).

        Returns once the launch is queued.
        """
        cdef uint64_t s = stream_of(self.gpu, stream)
        self.writing()
        self.launching = True
        try:
            if self.foreign is not None:
                follow(self.gpu, self.kernel, self.packed, self.foreign, s)
            with nogil:
                launch(self.gpu, self.kernel, self.packed, s)
        finally:
            self.launching = False
            self.launched = True

    def prepare(self):
        """Check geometry and arguments once, and return a ``PreparedLaunch`` that keeps both."""
        self.writing()
        self.launched = True
        check_fit(self.gpu, self.kernel, self.packed)
        cdef PreparedLaunch prepared = PreparedLaunch.__new__(PreparedLaunch, self.gpu, self.kernel)
        copy_launch(&prepared.packed, self.packed)
        prepared.foreign = None if self.foreign is None else self.foreign.copy()
        return prepared

    cdef long long integer(self, object value, bint is_signed, uint32_t bits) except? -1:
        """The low bits of an integer that is no plain int in range, or is refused."""
        cdef str name = self.next_name()
        try:
            return <long long>integer_bits(value, name, is_signed, bits)
        except ArgumentError as error:
            self.launched = True
            self.refuse_launch(error)

    cdef double number(self, object value) except? -1:
        try:
            return value
        except (OverflowError, TypeError):
            self.refuse_next(value, "a float")

    cdef str next_name(self):
        return parameter_name(self.kernel, 0 if self.launched else self.packed.n)

    cdef int refuse_next(self, object value, str allowed) except -1:
        name = self.next_name()
        self.launched = True
        try:
            refuse(name, value, allowed)
        except ArgumentError as error:
            self.refuse_launch(error)

    cdef int refuse_launch(self, object error) except -1:
        raise LaunchError(f"{self.kernel.module}.{self.kernel.name}: {error}") from error

    def __reduce__(self):
        raise TypeError("a KernelLaunch belongs to its process and cannot be pickled")


cdef int _set_dims(uint32_t* dims, str what, x, y, z) except -1:
    cdef long long i, j, k
    if is_int(x, 0, 0xFFFFFFFF, &i) and is_int(y, 0, 0xFFFFFFFF, &j) and is_int(z, 0, 0xFFFFFFFF, &k):
        dims[0], dims[1], dims[2] = <uint32_t>i, <uint32_t>j, <uint32_t>k
        return 0
    try:
        if not isinstance(x, int) and hasattr(x, "__len__"):
            if len(x) != 3 or (y, z) != (1, 1):
                refuse(what, x, "three integers, or one sequence of three")
            x, y, z = x
        dims[0], dims[1], dims[2] = PyNumber_Index(x), PyNumber_Index(y), PyNumber_Index(z)
    except (OverflowError, TypeError):
        refuse(what, (x, y, z), "integers from 1 to the device's limit")
    return 0
