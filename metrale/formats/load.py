# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers from a GGUF file into device memory."""

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.engram_v41 import EngramTable, EngramTables, EngramV41LayerWeights
from metrale.engram_v41.weights import upload_qk
from metrale.errors import refuse
from metrale.formats.deepseek41 import (
    EngramLayerSpec,
    MoeLayerSpec,
    StoredTensor,
    engram_layer_spec,
    moe_layer_spec,
)
from metrale.formats.gguf import GgufFile
from metrale.formats.kquant import BF16, Q2_K, SUPER_BLOCK
from metrale.gpu import GpuBackend
from metrale.gpu.owner import Owner
from metrale.moe_v41 import (
    ExpertArena,
    GgufExperts,
    MoeV41Cfg,
    MoeV41LayerWeights,
    ResidentMat,
    RouterWeights,
    SlotLayout,
)

__all__ = [
    "LoadedEngramLayer",
    "LoadedMoeLayer",
    "expert_source",
    "load_engram_layer",
    "load_moe_layer",
    "upload_engram_layer",
    "upload_moe_layer",
]


@dataclass(frozen=True, slots=True)
class LoadedMoeLayer:
    """A MoE layer in device memory, with an arena of its own where all its experts are resident, expert e in slot e, or
    with that of its maker. ``free()`` gives back what is its own."""

    layer: int
    cfg: MoeV41Cfg
    weights: MoeV41LayerWeights
    experts: ExpertArena
    owns_experts: bool = True

    def free(self) -> None:
        """Give the device memory of the weights back, and of an arena of its own."""
        try:
            self.weights.free()
        finally:
            if self.owns_experts:
                self.experts.free()


def load_moe_layer(
    gpu: GpuBackend, path: str | os.PathLike[str], layer: int, experts: ExpertArena | None = None
) -> LoadedMoeLayer:
    """Load MoE layer ``layer`` of the DeepSeek-V4.1 GGUF file at ``path``: all experts resident, or none, for them to
    come from the arena ``experts``, which several layers may share.

    Refuses what ``moe_layer_spec`` refuses, before anything is allocated; ``OutOfMemoryError`` if the layer does not
    fit, with nothing left behind.
    """
    with GgufFile(path) as gguf:
        return upload_moe_layer(gpu, moe_layer_spec(gguf, layer), experts)


def expert_source(path: str | os.PathLike[str]) -> GgufExperts:
    """The routed experts of all layers of the DeepSeek-V4.1 GGUF file at ``path``, as the source of an ``ExpertArena``.

    A context manager, to be closed after the arena has been freed.
    """
    return GgufExperts(path)


def upload_moe_layer(gpu: GpuBackend, spec: MoeLayerSpec, experts: ExpertArena | None = None) -> LoadedMoeLayer:
    """``load_moe_layer`` for a layer that is described already, of an open file or made in memory."""
    cfg = _config(spec)
    with Owner(gpu, "MoeV41LayerWeights") as own:
        weights = MoeV41LayerWeights(
            router=RouterWeights.upload(own, spec.router.data, spec.bias.numpy(), spec.dim),
            shared_gate=_matrix(own, "shared_gate", spec.shared_gate),
            shared_up=_matrix(own, "shared_up", spec.shared_up),
            shared_down=_matrix(own, "shared_down", spec.shared_down),
            own=own,
            swiglu_limit=spec.swiglu_limit,
            shared_swiglu_limit=spec.shared_swiglu_limit,
        )
        if experts is not None:
            return LoadedMoeLayer(spec.layer, cfg, weights, experts, owns_experts=False)
        experts = ExpertArena(gpu, SlotLayout(spec.dim, spec.inter), spec.n_routed)
        try:
            for e in range(spec.n_routed):
                experts.load(spec.layer, e, spec.gate.slice(e), spec.up.slice(e), spec.down.slice(e))
        except BaseException:
            experts.free()
            raise
    return LoadedMoeLayer(spec.layer, cfg, weights, experts)


def _config(spec: MoeLayerSpec) -> MoeV41Cfg:
    return MoeV41Cfg(
        dim=spec.dim,
        inter=spec.inter,
        n_routed=spec.n_routed,
        topk=spec.topk,
        gate_temp=spec.gate_temp,
        norm_topk_prob=spec.norm_topk_prob,
        route_scale=spec.route_scale,
        swiglu_limit=spec.swiglu_limit,
    )


def _matrix(own: Owner, name: str, tensor: StoredTensor) -> ResidentMat:
    n, k = tensor.shape
    return ResidentMat.upload(own, name, tensor.type, (n, k), tensor.data)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEngramLayer:
    """An engram layer: its weights in device memory, and its table there or in the file, which then stays open.

    ``free()`` gives memory and file back.
    """

    layer: int
    site: int
    """The layer's place in ``hash``, and in the ids of an ``EngramHasher``"""
    shape: dict[str, Any]
    """``dim``, ``hc``, ``head_dim``, ``cols`` and ``eps``, as ``EngramV41`` takes them"""
    hash: EngramTables
    weights: EngramV41LayerWeights
    _file: GgufFile | None = None

    def read_rows(self, ids: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """The raw rows ``[len(ids), 84]`` of a table that is not resident, read from the file in one go."""
        if self._file is None:
            refuse("layer", self.layer, "a layer whose table was loaded with resident=False")
        indices = np.asarray(ids, np.int64).reshape(-1)
        rows = np.empty((len(indices), Q2_K.block_bytes), np.uint8)
        self._file.tensors[f"blk.{self.layer}.engram_embd.weight"].read_rows_into(rows.data, indices.tolist())
        return rows

    def free(self) -> None:
        """Give the device memory back and close the file."""
        try:
            self.weights.free()
        finally:
            if self._file is not None:
                self._file.close()


def load_engram_layer(
    gpu: GpuBackend,
    path: str | os.PathLike[str],
    layer: int,
    *,
    resident: bool = True,
    several_tokens: bool = True,
) -> LoadedEngramLayer:
    """Load engram layer ``layer`` of the DeepSeek-V4.1 GGUF file at ``path``.

    The table goes to the device, for ``rows_from_ids``; or stays in the file with ``resident=False``, for
    ``rows_from_q2k(layer, loaded.read_rows(ids))``. A projection in Q2_K blocks is kept as it is and, for
    ``several_tokens``, expanded to bf16 too. Refuses what ``engram_layer_spec`` refuses, before anything is allocated;
    ``OutOfMemoryError`` if the layer does not fit, with nothing left behind.
    """
    gguf = GgufFile(path)
    try:
        loaded = upload_engram_layer(
            gpu, engram_layer_spec(gguf, layer), resident=resident, several_tokens=several_tokens
        )
    except BaseException:
        gguf.close()
        raise
    if resident:
        gguf.close()
        return loaded
    return replace(loaded, _file=gguf)


def upload_engram_layer(
    gpu: GpuBackend, spec: EngramLayerSpec, *, resident: bool = True, several_tokens: bool = True
) -> LoadedEngramLayer:
    """``load_engram_layer`` for a layer that is described already, of an open file or made in memory."""
    n, k = spec.wkv.shape
    with Owner(gpu, "EngramV41LayerWeights") as own:
        qk = upload_qk(own, spec.q.numpy(), spec.k.numpy())
        name = "wkv_q2k" if spec.wkv.type is Q2_K else "wkv"
        stored = ResidentMat.upload(own, name, spec.wkv.type, (n, k), spec.wkv.data)
        wkv = stored if stored.kind is BF16 else _expanded(own, stored) if several_tokens else None
        table = None
        if resident:
            table = EngramTable(spec.table.shape[0], own.alloc("table", Q2_K.block_bytes * spec.table.shape[0]))
            gpu.copy_h2d(spec.table.data, table.ptr)
        weights = EngramV41LayerWeights(spec.layer, qk, wkv, stored if stored.kind is Q2_K else None, table, own)
    shape = {name: getattr(spec, name) for name in ("dim", "hc", "head_dim", "cols", "eps")}
    return LoadedEngramLayer(spec.layer, spec.site, shape, spec.hash, weights)


def _expanded(own: Owner, matrix: ResidentMat) -> ResidentMat:
    """The matrix as bf16."""
    gpu, row_bytes = own.gpu, Q2_K.row_bytes(matrix.k)
    ptr = own.alloc("wkv", matrix.n * BF16.row_bytes(matrix.k))
    kernel = gpu.kernel("dequant_gguf_bf16", "dequant_q2_k_to_bf16")
    ops.dequant_q2_k_to_bf16(gpu, kernel, matrix.ptr, ptr, matrix.n * matrix.k // SUPER_BLOCK, row_bytes, None)
    gpu.synchronize()  # whatever stream it is used on
    return ResidentMat(BF16, matrix.n, matrix.k, ptr)
