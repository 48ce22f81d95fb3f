# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the scripts of this folder share. A script's arguments are the backend's kind and a number."""

import faulthandler
import inspect
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import metrale
from metrale import KernelLaunch
from metrale.errors import MetraleError
from metrale.gpu.owner import Owner

KIND, NUMBER = sys.argv[1], int(sys.argv[2])
FINISH = ("moe_v41", "moe_v41_finish")
SPIN = Path(__file__).with_name("spin.cu")
HANGS_AFTER = 90  # seconds: a script that takes longer shows where its threads are, and fails
N = 64

faulthandler.dump_traceback_later(HANGS_AFTER + 2 * NUMBER, exit=True)


def keep_context():
    """Retain the device's primary context: opening a backend makes it where there is none, which takes long."""
    from cuda.bindings import driver

    assert driver.cuInit(0)[0] == 0
    assert driver.cuDevicePrimaryCtxRetain(0)[0] == 0


if KIND == "cuda" and not Path(sys.argv[0]).stem.startswith("exit"):
    keep_context()


def open_backend(**options):
    return metrale.open(KIND, **options)


def backend_class():
    """The backend's class, for classes derived from it."""
    if KIND == "cuda":
        from metrale.gpu.cuda import CudaBackend as Backend
    else:
        from metrale.gpu.host import HostBackend as Backend
    return Backend


def finish(gpu, acc, out, n=N):
    """A KernelLaunch that rounds ``n`` floats at ``acc`` to bf16 at ``out``."""
    blocks = -(-n // 2048)
    return KernelLaunch(gpu, gpu.kernel(*FINISH)).grid(blocks).block(256).arg_ptr(acc).arg_ptr(out).arg_u32(n)


def spin(gpu, out, steps):
    """A KernelLaunch that sets the u32 at ``out`` to 1 after ``steps`` times 1 to 10 nanoseconds."""
    if not gpu.has_module("spin"):
        gpu.add_module(SPIN)
    return KernelLaunch(gpu, gpu.kernel("spin", "spin")).arg_ptr(out).arg_u32(steps)


def everything(gpu):
    """One object of each kind that stands on a backend, and the backend: 3 allocations, 1 stream, 1 event."""
    acc, out = gpu.buffer(4 * N, "acc"), gpu.buffer(2 * N, "out")
    own = Owner(gpu, "Model")
    own.alloc("weights", 64)
    own.stream()
    own.event()
    launch = finish(gpu, acc, out)
    launch.launch()
    return {"gpu": gpu, "acc": acc, "out": out, "own": own, "kernel": gpu.kernel(*FINISH), "launch": launch,
            "prepared": launch.prepare()}  # fmt: skip


def give_back(things):
    """Free what ``everything`` took, but for the backend."""
    for name in ("acc", "out", "own"):
        things[name].free()


def nothing_left(gpu):
    """Whether nothing is on the backend's ledger."""
    return (len(gpu.ledger), gpu.ledger.streams, gpu.ledger.events, gpu.ledger.graphs) == (0, {}, {}, {})


class HostAndDevice(bytearray):
    """A host buffer that is a device pointer too: what a copy takes on either side."""

    def __init__(self, nbytes, ptr):
        super().__init__(nbytes)
        self.ptr = ptr

    def data_ptr(self):
        return self.ptr


def values_for(gpu):
    """Live values for the parameters of the backend's methods, by the parameters' names."""
    ptr, stream, event = int(gpu.alloc(64)), gpu.create_stream(), gpu.create_event(timing=True)
    either = HostAndDevice(16, ptr)
    return {"nbytes": 16, "ptr": ptr, "value": 0, "src": either, "dst": either, "stream": stream, "event": event,
            "start": event, "end": event, "module": FINISH[0], "name": FINISH[1], "path": SPIN, "tag": "tag",
            "timing": False, "dtype": "uint8", "shape": None, "which": 0, "buffer": "more"}  # fmt: skip


def uses(thing, values):
    """``(name, use)`` of every public method and attribute of ``thing``, and of what a ``with`` block calls.

    A parameter whose name is not among ``values`` gets 1.
    """
    for name in dir(type(thing)):
        if name.startswith("_") and name not in ("__enter__", "__repr__", "__cuda_array_interface__", "__dlpack__"):
            continue
        member = inspect.getattr_static(type(thing), name)
        if not callable(member):
            yield name, partial(getattr, thing, name)
            continue
        try:
            taken = list(inspect.signature(member).parameters.values())[1:]
        except ValueError:  # a slot of C, such as the default __repr__
            taken = []
        positional = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
        yield name, partial(getattr(thing, name), *[values.get(p.name, 1) for p in positional])


def refusal(use):
    """The text of the MetraleError that ``use()`` raises; None where it raises none."""
    try:
        use()
    except MetraleError as error:
        return str(error)
    return None


def in_child(work):
    """Run ``work()`` in a forked child, which then ends as a program does. Returns its exit code."""
    faulthandler.cancel_dump_traceback_later()  # its thread is not in the child, which would wait for it
    with warnings.catch_warnings():
        # Python 3.12 warns of threads: that a fork among them goes well is what is tested.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    if child == 0:
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
