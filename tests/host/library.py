# SPDX-License-Identifier: MIT OR Apache-2.0
"""A library of host kernels through ctypes: cuda/host/abi.h, and nothing of the package."""

import ctypes
import importlib.util
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CUDA = FOLDER.parents[1] / "cuda"
ORDERS = {"forward": 0, "reversed": 1, "shuffled": 2}
KINDS = {1: "ptr", 2: "int", 3: "float", 4: "bytes"}


class Parameter(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("kind", ctypes.c_uint8), ("size", ctypes.c_uint32)]


class Kernel(ctypes.Structure):
    _fields_ = [
        ("module", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("n_params", ctypes.c_uint32),
        ("params", ctypes.POINTER(Parameter)),
        ("function", ctypes.c_void_p),
        ("invoke", ctypes.c_void_p),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("strict", ctypes.c_int),
        ("workers", ctypes.c_uint32),
    ]


class LaunchFailed(Exception):
    pass


class Library:
    def __init__(self, path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.metrale_host_kernels.restype = ctypes.POINTER(Kernel)
        count = ctypes.c_size_t()
        kernels = self._library.metrale_host_kernels(ctypes.byref(count))
        self.kernels = {kernels[i].name.decode(): kernels[i] for i in range(count.value)}

    def parameters(self, name):
        kernel = self.kernels[name]
        params = (kernel.params[i] for i in range(kernel.n_params))
        return [(param.name.decode(), KINDS[param.kind], param.size) for param in params]

    def launch(self, name, *args, grid=1, block=32, shared=0, order="forward", seed=0, strict=False, workers=0):
        """Runs a kernel on ctypes values and arrays. Raises LaunchFailed with the library's message."""
        kernel = self.kernels[name]
        assert len(args) == kernel.n_params
        values = [ctypes.c_void_p(ctypes.addressof(arg)) if isinstance(arg, ctypes.Array) else arg for arg in args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        config = Config(_extent(grid), _extent(block), shared, ORDERS.get(order, order), seed, strict, workers)
        message = ctypes.create_string_buffer(2048)
        if self._library.metrale_host_launch(
            ctypes.byref(kernel), ctypes.byref(config), pointers, message, ctypes.c_size_t(len(message))
        ):
            raise LaunchFailed(message.value.decode())


def _extent(value):
    x, y, z = (*((value,) if isinstance(value, int) else value), 1, 1)[:3]
    return (ctypes.c_uint32 * 3)(x, y, z)


def load_build():
    """cuda/host/build.py as a module."""
    spec = importlib.util.spec_from_file_location("metrale_host_build", CUDA / "host" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
