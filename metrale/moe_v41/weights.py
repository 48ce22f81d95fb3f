# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights of a MoE layer in device memory: router, shared expert, routed experts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale.errors import refuse
from metrale.formats.kquant import BF16, Q2_K, Q3_K, SUPER_BLOCK, QuantType, kquant_weight_bytes
from metrale.gpu import DevicePtr
from metrale.gpu.owner import Owner

__all__ = ["MoeV41LayerWeights", "ResidentMat", "RouterWeights", "SlotLayout", "check_bytes"]

MATRIX_KINDS = (BF16, Q2_K, Q3_K)


@dataclass(frozen=True, slots=True)
class ResidentMat:
    """A matrix ``[n, k]`` in device memory, bf16 row-major or in its Q2_K or Q3_K blocks. Its layer owns the memory."""

    kind: QuantType
    n: int
    k: int
    ptr: DevicePtr

    @classmethod
    def upload(cls, own: Owner, name: str, kind: QuantType, shape: tuple[int, ...], data: Any) -> "ResidentMat":
        """Copy ``data`` (any contiguous buffer) to the device. Refuses another kind, shape or number of bytes."""
        if kind not in MATRIX_KINDS:
            refuse(f"{name}: kind", kind.name, ", ".join(k.name for k in MATRIX_KINDS))
        n, k = shape
        return cls(kind, n, k, _upload(own, name, data, n * kind.row_bytes(k)))


@dataclass(frozen=True, slots=True, eq=False)
class RouterWeights:
    """A layer's router alone: weight bf16 ``[n_routed, dim]`` and bias f32 ``[n_routed]`` on the device, and the
    bias on the host. Enough to predict a layer's picks."""

    weight: DevicePtr
    bias: DevicePtr
    host_bias: npt.NDArray[np.float32]
    n_routed: int
    dim: int

    @classmethod
    def upload(cls, own: Owner, weight: Any, bias: npt.ArrayLike, dim: int) -> "RouterWeights":
        """Copy bf16 bits ``[n_routed, dim]`` and f32 ``[n_routed]`` to the device."""
        host_bias = np.ascontiguousarray(bias, np.float32)
        n_routed = len(host_bias)
        return cls(
            _upload(own, "router", weight, n_routed * BF16.row_bytes(dim)),
            _upload(own, "bias", host_bias, host_bias.nbytes),
            host_bias,
            n_routed,
            dim,
        )


@dataclass(slots=True, eq=False)
class MoeV41LayerWeights:
    """What a layer keeps beside its routed experts: the router and the shared expert's gate, up and down.

    ``swiglu_limit`` clamps the routed experts, ``shared_swiglu_limit`` the shared one; None takes the
    configuration's. ``own`` holds all the device memory, and ``free()`` gives it back, once.
    """

    router: RouterWeights
    shared_gate: ResidentMat
    shared_up: ResidentMat
    shared_down: ResidentMat
    own: Owner = field(repr=False)
    swiglu_limit: float | None = None
    shared_swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        gate, up, down, dim = self.shared_gate, self.shared_up, self.shared_down, self.router.dim
        if (gate.n, gate.k) != (up.n, up.k) or (down.n, down.k) != (gate.k, gate.n) or gate.k != dim:
            shapes = f"gate {gate.n, gate.k}, up {up.n, up.k}, down {down.n, down.k}"
            refuse("shared expert", shapes, f"gate and up (inter, {dim}), down ({dim}, inter)")
        for name in ("swiglu_limit", "shared_swiglu_limit"):
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:
                refuse(name, limit, "None, 0 (no clamp) or more")

    def free(self) -> None:
        """Give the device memory back."""
        self.own.free()


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One expert's blocks in a slot: gate ``[inter, dim]`` and up in Q2_K, down ``[dim, inter]`` in Q3_K, back to
    back. All sizes are multiples of 256 blocks, so every matrix starts on a 16-byte boundary."""

    dim: int
    inter: int

    def __post_init__(self) -> None:
        for name in ("dim", "inter"):
            if getattr(self, name) <= 0 or getattr(self, name) % SUPER_BLOCK:
                refuse(name, getattr(self, name), f"a positive multiple of {SUPER_BLOCK}")

    @property
    def up_offset(self) -> int:
        """Bytes before the up blocks: those of gate, which starts the slot."""
        return kquant_weight_bytes(self.inter, self.dim, Q2_K.block_bytes)

    @property
    def down_offset(self) -> int:
        """Bytes before the down blocks."""
        return 2 * self.up_offset

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.down_offset + kquant_weight_bytes(self.dim, self.inter, Q3_K.block_bytes)


def check_bytes(name: str, data: Any, nbytes: int) -> None:
    """Refuse a buffer of another size."""
    if memoryview(data).nbytes != nbytes:
        refuse(name, f"{memoryview(data).nbytes} bytes", f"{nbytes} bytes")


def _upload(own: Owner, name: str, data: Any, nbytes: int) -> DevicePtr:
    check_bytes(name, data, nbytes)
    ptr = own.alloc(name, nbytes)
    own.gpu.copy_h2d(data, ptr)
    return ptr
