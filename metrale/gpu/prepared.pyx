# SPDX-License-Identifier: MIT OR Apache-2.0
"""PreparedLaunch: a launch that is checked once and made often."""

from cpython.buffer cimport PyBuffer_Release
from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from metrale.errors import refuse

from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport LONGEST_INT, foreign_ptr, host_buffer, is_int, own_ptr
from metrale.gpu.kernel cimport KIND_FLOAT, KIND_INT, KIND_PTR, KernelHandle
from metrale.gpu.launch cimport serve, start

cdef uint64_t prepared_count = 0


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


cdef uint64_t stream_of(GpuBackend gpu, object stream) except? 0xFFFFFFFFFFFFFFFF:
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
