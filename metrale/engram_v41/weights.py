# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights of an engram layer in device memory."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale.errors import refuse
from metrale.gpu import DevicePtr
from metrale.gpu.owner import Owner
from metrale.moe_v41 import ResidentMat

__all__ = ["EngramTable", "EngramV41LayerWeights", "upload_qk"]


@dataclass(frozen=True, slots=True)
class EngramTable:
    """A table ``[rows, 256]`` of Q2_K blocks in device memory. Its layer owns the memory."""

    rows: int
    ptr: DevicePtr


@dataclass(slots=True, eq=False)
class EngramV41LayerWeights:
    """What an engram layer keeps: the projection, ``qk`` f32 ``[hc, dim]``, and its table if that is resident.

    ``wkv_q2k`` (raw Q2_K blocks) serves one token, ``wkv`` (bf16) one where that is missing, and several. ``own`` holds
    all the device memory, and ``free()`` gives it back, once.
    """

    layer: int
    qk: DevicePtr
    wkv: ResidentMat | None
    wkv_q2k: ResidentMat | None
    table: EngramTable | None
    own: Owner = field(repr=False)

    def __post_init__(self) -> None:
        shapes = {(matrix.n, matrix.k) for matrix in (self.wkv, self.wkv_q2k) if matrix is not None}
        if len(shapes) != 1:
            shown = ", ".join(map(str, sorted(shapes))) or "neither"
            refuse("wkv", shown, "wkv, wkv_q2k or both, of one shape")

    @property
    def out_features(self) -> int:
        """Keys and the value of a token: ``(hc + 1) * dim``."""
        return self._any.n

    @property
    def in_features(self) -> int:
        """Values of the rows of a token: ``cols * head_dim``."""
        return self._any.k

    @property
    def _any(self) -> ResidentMat:
        matrix = self.wkv_q2k if self.wkv is None else self.wkv
        assert matrix is not None
        return matrix

    def free(self) -> None:
        """Give the device memory back."""
        self.own.free()


def upload_qk(own: Owner, q: npt.ArrayLike, k: npt.ArrayLike) -> DevicePtr:
    """The product of the f32 weights of query and key, ``[hc, dim]``, on the device."""
    q_weight, k_weight = (np.ascontiguousarray(weight, np.float32) for weight in (q, k))
    if q_weight.shape != k_weight.shape or q_weight.ndim != 2:
        refuse("k", f"shape {k_weight.shape}", f"(hc, dim), that of q, {q_weight.shape}")
    product: npt.NDArray[Any] = q_weight * k_weight
    ptr = own.alloc("qk", product.nbytes)
    own.gpu.copy_h2d(product, ptr)
    return ptr
