# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers from a GGUF file into device memory."""

import os
from dataclasses import dataclass

from metrale.formats.deepseek41 import MoeLayerSpec, StoredTensor, moe_layer_spec
from metrale.formats.gguf import GgufFile
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

__all__ = ["LoadedMoeLayer", "expert_source", "load_moe_layer", "upload_moe_layer"]


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
