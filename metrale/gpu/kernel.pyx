# SPDX-License-Identifier: MIT OR Apache-2.0
"""A loaded kernel and the layout of its parameters."""

from libc.stdint cimport uint32_t, uint64_t

from metrale.errors import MetraleError

cdef dict _CODES = {
    "ptr": param_code(KIND_PTR, 8), "f32": param_code(KIND_FLOAT, 4), "f64": param_code(KIND_FLOAT, 8),
    **{f"{sign}{8 * size}": param_code(KIND_INT, size) for size in (1, 2, 4, 8) for sign in "iu"},
}
cdef dict _KINDS = {code: kind for kind, code in _CODES.items()}
_CODES["ptr?"] = _CODES["ptr"]


cdef str kind_of(uint32_t code):
    """The kind's name for a code: "ptr", "u32", ...; "bytes" for a struct, "any" for a bare size."""
    return _KINDS.get(code, "bytes" if code >> 16 == KIND_BYTES else "any")


cdef class KernelHandle:
    """A kernel of one backend. Made by ``GpuBackend.kernel(module, name)``, never directly.

    ``params`` holds ``(name, kind)`` for each parameter; kinds are ``ptr`` (``ptr?``: may be null), ``u32``, ``i64``,
    ``f32``, ..., ``bytes`` (a struct by value) and ``any`` (only the size is known).
    """

    def __init__(self):
        raise TypeError("KernelHandle comes from GpuBackend.kernel(module, name)")

    cdef int set_params(self, tuple params, list codes) except -1:
        """Fill the layout: ``params`` as the source declares them, ``codes`` as the binary has them, where a code
        of kind "any" says only the size."""
        cdef uint32_t i, code, want
        where = f"{self.module}.{self.name}"
        if len(params) != len(codes):
            raise MetraleError(f"{where}: its source declares {len(params)} parameters, its binary has {len(codes)}")
        if len(params) > MAX_PARAMS:
            raise MetraleError(f"{where}: {len(params)} parameters, at most {MAX_PARAMS} are taken")
        for i, (name, kind) in enumerate(params):
            code = codes[i]
            want = _CODES.get(kind, code)
            if kind == "bytes":
                want = param_code(KIND_BYTES, code & 0xFFFF)
            if code != want and code != param_code(KIND_ANY, want & 0xFFFF):
                raise MetraleError(f"{where}: parameter {name} is {kind} in its source and "
                                   f"{kind_of(code)} in its binary")
            self.codes[i] = want
        self.n_params = <uint32_t>len(params)
        self.params = params
        return 0

    @property
    def address(self):
        """What the kernel is to its backend's driver: on a GPU the ``CUfunction``, for other users of the driver."""
        return <uint64_t>self.function

    def __repr__(self):
        args = ", ".join(f"{name}: {kind}" for name, kind in self.params)
        return f"<KernelHandle {self.module}.{self.name}({args})>"

    def __reduce__(self):
        raise TypeError("a KernelHandle belongs to its process and cannot be pickled")
