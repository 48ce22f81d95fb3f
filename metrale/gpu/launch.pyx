# SPDX-License-Identifier: MIT OR Apache-2.0
"""KernelLaunch: geometry, arguments, launch; PreparedLaunch: the same, checked once and launched often."""

cimport cython

from cpython.buffer cimport PyBuffer_Release
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.number cimport PyNumber_Index
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from metrale.errors import ArgumentError, LaunchError, refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport (
    LAUNCH_CLUSTER, LAUNCH_COOPERATIVE, LAUNCH_OVERLAP_PREVIOUS, Launch, LaunchFlag, copy_launch,
)
from metrale.gpu.interop cimport LONGEST_INT, as_integer, foreign_ptr, host_buffer, is_int, own_ptr
from metrale.gpu.kernel cimport (
    KIND_ANY, KIND_BYTES, KIND_FLOAT, KIND_INT, KIND_PTR, MAX_PARAM_BYTES, MAX_PARAMS, KernelHandle, param_code,
)

cdef enum:
    POOL = 16

_KIND_NAMES = {KIND_ANY: "any", KIND_PTR: "pointer", KIND_INT: "integer", KIND_FLOAT: "float",
               KIND_BYTES: "struct"}


# A Launch is large, and a builder lives for one statement: those that are done with wait here for the next.
cdef Launch* pool[POOL]
cdef int pooled = 0
cdef uint64_t prepared_count = 0


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
            raise LaunchError(f"{self.kernel.module}.{self.kernel.name}: {error}") from error
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
                p = foreign_ptr(value, self._next_name(), self.gpu, 0, False)
            except ArgumentError as error:
                self.launched = True
                raise LaunchError(f"{self.kernel.module}.{self.kernel.name}: {error}") from error
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
        cdef str name = self._next_name()
        try:
            return <long long>integer_bits(value, name, is_signed, bits)
        except ArgumentError as error:
            self.launched = True
            raise LaunchError(f"{self.kernel.module}.{self.kernel.name}: {error}") from error

    cdef double number(self, object value) except? -1:
        try:
            return value
        except (OverflowError, TypeError):
            self.refuse_next(value, "a float")

    def _next_name(self):
        return parameter_name(self.kernel, 0 if self.launched else self.packed.n)

    cdef int refuse_next(self, object value, str allowed) except -1:
        name = self._next_name()
        self.launched = True
        try:
            refuse(name, value, allowed)
        except ArgumentError as error:
            raise LaunchError(f"{self.kernel.module}.{self.kernel.name}: {error}") from error

    def __reduce__(self):
        raise TypeError("a KernelLaunch belongs to its process and cannot be pickled")


cdef class PreparedLaunch:
    """A launch with geometry and arguments fixed and checked, made by ``KernelLaunch.prepare()``.

    ``launch(stream)`` starts it for the price of the driver call; ``set(which, value)`` changes one argument for the
    launches that follow. Arrays of other libraries among the arguments are kept, and each launch asks them for their
    address and comes after what their library has queued by then. One thread at a time may use it.
    """

    def __cinit__(self, GpuBackend gpu=None, KernelHandle kernel=None):
        global prepared_count
        if gpu is None or kernel is None:
            raise TypeError("PreparedLaunch comes from KernelLaunch.prepare()")
        prepared_count += 1
        self.id = prepared_count
        self.gpu, self.kernel = gpu, kernel

    def __init__(self, *args):
        raise TypeError("PreparedLaunch comes from KernelLaunch.prepare()")

    def set(self, which, value):
        """Set the argument ``which``, a parameter's name or its place from 0, to ``value``, as the ``arg_*`` of its
        kind would: a pointer, an integer, a float, or a buffer for a struct. Returns the PreparedLaunch.
        """
        cdef uint32_t i = self.place_of(which)
        cdef uint32_t code = self.kernel.codes[i], size = code & 0xFFFF
        cdef str name, kind
        cdef uint64_t word = 0
        cdef float single
        cdef double number = 0
        cdef Py_buffer view
        name, kind = self.kernel.params[i]
        if code >> 16 == KIND_PTR:
            if not own_ptr(value, name, self.gpu, &word):
                word = foreign_ptr(value, name, self.gpu, 0, False)
                self.set_raw(i, &word)
                self.foreign = {i: value} if self.foreign is None else {**self.foreign, i: value}
                return self
        elif code >> 16 == KIND_INT:
            word = integer_bits(value, name, kind[0] == "i", 8 * size)
        elif code >> 16 == KIND_FLOAT:
            try:
                number = value
            except (OverflowError, TypeError):
                refuse(name, value, "a float")
            single = <float>number
            memcpy(&word, &single if size == 4 else <void*>&number, size)
        else:
            host_buffer(value, name, False, &view)
            try:
                if view.len != <Py_ssize_t>size:
                    refuse(name, f"{view.len} bytes", f"{size} bytes")
                self.set_raw(i, view.buf)
            finally:
                PyBuffer_Release(&view)
            return self
        self.set_raw(i, &word)
        return self

    def launch(self, stream=None):
        """Start the kernel on ``stream`` (None: the default stream). Returns once the launch is queued."""
        cdef uint64_t s = stream_of(self.gpu, stream)
        with nogil:
            self.c_launch(s)

    def update(self, graph):
        """Give every launch that this object has made in ``graph`` the present arguments, for the graph's next launch.

        ``graph``: a handle of ``end_capture``. Refuses a graph in which this object has no launch.
        """
        if self.gpu.checking:
            self.gpu.check_pointers(self.kernel, &self.packed)
        self.gpu.update_nodes(graph, self.id, self.kernel, &self.packed)

    cdef int place_of(self, object which) except -1:
        cdef uint32_t i
        if isinstance(which, str):
            for i in range(self.kernel.n_params):
                if self.kernel.params[i][0] == which:
                    return i
        elif isinstance(which, int) and 0 <= which < self.kernel.n_params:
            return which
        names = ", ".join(name for name, _ in self.kernel.params)
        refuse("which", which, f"a parameter of {self.kernel.name} ({names}) or its place from 0")

    cdef void set_raw(self, uint32_t i, const void* value) noexcept nogil:
        memcpy(self.packed.args[i], value, self.kernel.codes[i] & 0xFFFF)
        if self.foreign is not None:
            with gil:
                self.foreign.pop(i, None)

    cdef int c_launch(self, uint64_t stream) except -1 nogil:
        if self.foreign is not None:
            with gil:
                follow(self.gpu, self.kernel, &self.packed, self.foreign, stream)
        serve(self.gpu)
        if self.gpu.captures != 0:
            with gil:      # over both, so that no other thread's launch on the host comes between
                if self.gpu.work_on(stream, NULL) is not None:
                    start(self.gpu, self.kernel, &self.packed, stream)
                    return self.gpu.remember_node(self.id, stream)
        return start(self.gpu, self.kernel, &self.packed, stream)

    def __reduce__(self):
        raise TypeError("a PreparedLaunch belongs to its process and cannot be pickled")


cdef inline uint64_t stream_of(GpuBackend gpu, object stream) except? 0xFFFFFFFFFFFFFFFF:
    """``as_stream`` for a launch, which asks by itself whether the backend is open."""
    cdef long long s
    if stream is None:
        return gpu.stream0
    if is_int(stream, 0, LONGEST_INT, &s):
        return s
    return gpu.as_stream(stream)


cdef str parameter_name(KernelHandle kernel, uint32_t i):
    return kernel.params[i][0] if i < kernel.n_params else f"argument {i + 1}"


cdef int follow(GpuBackend gpu, KernelHandle kernel, Launch* l, dict foreign, uint64_t stream) except -1:
    """Take the present addresses of other libraries' arrays, and put ``stream`` after their producers."""
    cdef uint32_t i
    cdef uint64_t address
    for i, value in tuple(foreign.items()):
        address = foreign_ptr(value, parameter_name(kernel, i), gpu, stream, True)
        memcpy(l.args[i], &address, sizeof(address))
    return 0


cdef uint64_t integer_bits(object value, str name, bint is_signed, uint32_t bits) except? 0xFFFFFFFFFFFFFFFF:
    """The low bits of an integer that fits; little-endian, they are its bytes."""
    cdef long long n, half = <long long>1 << (min(bits, 63) - 1)      # of the range, where C has numbers for it
    if is_int(value, -half if is_signed else 0, half - 1 if is_signed else half - 1 + half, &n):
        return <uint64_t>n
    cdef object one = 1      # shifted as a Python integer: 64 bits of C are one too few
    low = -(one << (bits - 1)) if is_signed else 0
    high = (one << (bits - 1 if is_signed else bits)) - 1
    limits = f"{low} to {high}" if bits < 64 else "-2**63 to 2**63 - 1" if is_signed else "0 to 2**64 - 1"
    allowed = f"an integer from {limits}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        refuse(name, value, allowed)
    try:
        number = PyNumber_Index(value)
    except TypeError:      # such as an array of several numbers
        refuse(name, value, allowed)
    if not low <= number <= high:
        refuse(name, value, allowed)
    return number & 0xFFFFFFFFFFFFFFFF


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
    if ok and l.flags == 0:
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
