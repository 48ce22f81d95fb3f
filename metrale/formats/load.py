# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers from a GGUF file into device memory."""

import os
from dataclasses import dataclass

from metrale.formats.deepseek41 import MoeLayerSpec, StoredTensor, moe_layer_spec
from metrale.formats.gguf import GgufFile
from metrale.gpu import GpuBackend
from metrale.gpu.owner import Owner
from metrale.moe_v41 import ExpertArena, MoeV41Cfg, MoeV41LayerWeights, ResidentMat, RouterWeights, SlotLayout

__all__ = ["LoadedMoeLayer", "load_moe_layer", "upload_moe_layer"]


@dataclass(frozen=True, slots=True)
class LoadedMoeLayer:
    """A MoE layer in device memory with all its experts resident; expert e is in slot e. ``free()`` gives it back."""

    layer: int
    cfg: MoeV41Cfg
    weights: MoeV41LayerWeights
    experts: ExpertArena

    def free(self) -> None:
        """Give the device memory of weights and experts back."""
        try:
            self.weights.free()
        finally:
            self.experts.free()


def load_moe_layer(gpu: GpuBackend, path: str | os.PathLike[str], layer: int) -> LoadedMoeLayer:
    """Load MoE layer ``layer`` of the DeepSeek-V4.1 GGUF file at ``path``, all experts resident.

    Refuses what ``moe_layer_spec`` refuses, before anything is allocated; ``OutOfMemoryError`` if the layer does not
    fit, with nothing left behind.
    """
    with GgufFile(path) as gguf:
        return upload_moe_layer(gpu, moe_layer_spec(gguf, layer))


def upload_moe_layer(gpu: GpuBackend, spec: MoeLayerSpec) -> LoadedMoeLayer:
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
