# SPDX-License-Identifier: MIT OR Apache-2.0
"""The driver's figure against the ledger's: every byte that is in use on a device, by what is known of it."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from metrale.audit.foreign import holdings
from metrale.errors import refuse
from metrale.gpu.context import CHUNK, SHARED_MOST
from metrale.gpu.cuda import CudaBackend
from metrale.gpu.ledger import Allocation

__all__ = ["DriverAccount", "Explanation", "Line", "explain"]


class Line(NamedTuple):
    """A part of the memory in use: its name, its bytes, and how they are known."""

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True)
class Explanation:
    """``total`` and ``used`` bytes of a device as the driver has them, and the ``lines`` that ``used`` is the sum of;
    the last line is what nothing explains."""

    device: str
    total: int
    used: int
    lines: tuple[Line, ...]

    @property
    def unexplained(self) -> int:
        """Bytes in use that no line explains; negative where the lines are more than is in use."""
        return self.lines[-1].nbytes

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {"device": self.device, "total": self.total, "used": self.used, "unexplained": self.unexplained,
                "lines": [line._asdict() for line in self.lines]}  # fmt: skip

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        rows = [f"{line.nbytes:>18,}  {line.name:<{width}}  {line.source}" for line in self.lines]
        return "\n".join([f"{self.used:>18,}  in use of {self.total:,} on {self.device}, as the driver says", *rows])


@dataclass
class DriverAccount:
    """Follows what a device's memory goes to, for the growth that no allocator knows of.

    ``with account.step("load the tokenizer"):`` makes what grows in the block beyond known allocations a line of its
    own: code that a library loads with its first kernels, or its workspaces. ``explain()`` gives the lines. Make it
    right after the backend: what other processes grow by in between goes off the context's line. Refuses a backend
    other than CUDA's.
    """

    gpu: CudaBackend
    steps: dict[str, int] = field(default_factory=dict)
    _context: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, CudaBackend):
            refuse("gpu", self.gpu, "an open CUDA backend: memory of the host is not the driver's")
        # Once: other processes may grow later, and the context does not shrink for it.
        used = self.gpu.total_memory - self.gpu.free_memory
        self._context = _context(self.gpu.overhead, _others(used, _own_bytes(self.gpu)))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A block whose unexplained growth gets a line of the name; of one that raises, too."""
        before = self.explain().unexplained
        try:
            yield
        finally:
            self.steps[name] = self.steps.get(name, 0) + self.explain().unexplained - before

    def explain(self) -> Explanation:
        """The device's memory in use now, line by line."""
        gpu = self.gpu
        total = gpu.total_memory
        used = total - gpu.free_memory
        others = _others(used, _own_bytes(gpu))
        lines = [
            *_processes(self._context, others),
            *_overhead(gpu),
            *_ledger(gpu.ledger.live()),
            *_foreign(gpu.ordinal),
        ]
        lines += [
            Line(f"while: {name}", nbytes, "grew and is no known allocation") for name, nbytes in self.steps.items()
        ]
        lines.append(Line("unexplained", used - sum(line.nbytes for line in lines), "the rest"))
        return Explanation(gpu.name, total, used, tuple(lines))


def explain(gpu: CudaBackend) -> Explanation:
    """What the device's memory in use goes to: see ``DriverAccount``, which can tell more."""
    return DriverAccount(gpu).explain()


def _others(used: int, own: int | None) -> int | None:
    """What is in use and not by this process; None where NVML does not say."""
    return None if own is None else used - own


def _context(overhead: dict[str, int], others: int | None) -> int:
    """What was in use when the backend was opened, without torch's and CuPy's and other processes'."""
    return overhead["before"] - overhead["foreign_before"] - (others or 0)


def _processes(context: int, others: int | None) -> list[Line]:
    if others is None:
        return [Line("context and other processes", context, "in use when the backend was opened (no NVML)")]
    return [Line("other processes and the driver", others, "NVML: in use, and not by this process"),
            Line("context", context, "in use when the backend was opened, less other processes then")]  # fmt: skip


def _own_bytes(gpu: CudaBackend) -> int | None:
    """What this process uses of the device as NVML (package nvidia-ml-py) says, or None where it does not."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            device = pynvml.nvmlDeviceGetHandleByUUID(_uuid(gpu))
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass
    return None


def _uuid(gpu: CudaBackend) -> bytes:
    """Its name to NVML, which numbers devices in another order."""
    import uuid

    from cuda.bindings import driver

    _, device = driver.cuDeviceGet(gpu.ordinal)
    _, raw = driver.cuDeviceGetUuid(device)
    return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}".encode()


def _overhead(gpu: CudaBackend) -> list[Line]:
    measured = "as the driver's figure grew"
    return [Line("streams", gpu.overhead["streams"], measured), Line("modules", gpu.overhead["modules"], measured)]


def _ledger(live: Iterable[Allocation]) -> list[Line]:
    """Device memory on the ledger, and what the chunks that it lies in are larger. Managed memory is on the device
    only while it is used there: it is not counted."""
    held = [a for a in live if a.kind == "device"]
    shared = {a.ptr // CHUNK for a in held if a.rounded <= SHARED_MOST}
    chunks = len(shared) * CHUNK + sum(a.rounded for a in held if a.rounded > SHARED_MOST)
    asked = sum(a.nbytes for a in held)
    return [Line("metrale: allocations", asked, "the ledger"),
            Line("metrale: rounding", chunks - asked, "to chunks of 2 MiB, which those up to 1 MiB share")]  # fmt: skip


def _foreign(ordinal: int) -> list[Line]:
    lines = []
    for library, (nbytes, rounding) in holdings(ordinal).items():
        lines.append(Line(f"{library}: allocator", nbytes, "what the library says that it holds"))
        if rounding:
            lines.append(Line(f"{library}: rounding", rounding, "to chunks of 2 MiB"))
    return lines
