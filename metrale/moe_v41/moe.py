# SPDX-License-Identifier: MIT OR Apache-2.0
"""MoeV41: the DeepSeek-V4.1 mixture of experts for one token."""

import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.errors import MetraleError, refuse
from metrale.formats.kquant import BF16, Q2_K, Q3_K, kquant_q8_1_rows_bytes
from metrale.gpu import DevicePtr, GpuBackend, KernelHandle
from metrale.gpu.owner import Owner
from metrale.moe_v41._select import NOT_FINITE, NOT_RESIDENT, route_select
from metrale.moe_v41.arena import ExpertArena
from metrale.moe_v41.config import (
    BF16_BYTES,
    F32_BYTES,
    PTR_BYTES,
    SLOT_TABLE_LAYERS,
    U32_BYTES,
    MoeV41Cfg,
    expert_warps,
    integer,
)
from metrale.moe_v41.weights import MoeV41LayerWeights, ResidentMat

__all__ = ["MoeV41", "RoutedToken"]

SELECTIONS = ("device", "host")
WARPS_SUFFIX = {2: "2", 4: "", 8: "8"}


class RoutedToken(NamedTuple):
    """The selection behind the last output of a layer: ``picks`` and ``weights`` best first, ``slots`` in plan
    order (ascending expert id)."""

    picks: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    slots: npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer of ``add_layer``: what it runs on, and where the device keeps what it routes by."""

    weights: MoeV41LayerWeights
    experts: ExpertArena
    slots: npt.NDArray[np.int32]
    """Of each expert, -1 where it is not resident: the layer's row of the slot table"""
    slots_ptr: DevicePtr
    header: DevicePtr
    has_run: bool = False


class _Kernels(NamedTuple):
    gemv: KernelHandle
    router_gemv: KernelHandle
    q8_rows: KernelHandle
    mmvq_q2k: KernelHandle
    mmvq_q3k: KernelHandle
    mmvq_q2k_experts: KernelHandle
    mmvq_q3k_experts: KernelHandle
    swiglu: KernelHandle
    swiglu_q8: KernelHandle
    accumulate: KernelHandle
    finish: KernelHandle
    sum_rows: KernelHandle
    route_select: KernelHandle
    slot_table_set: KernelHandle

    @classmethod
    def of(cls, gpu: GpuBackend, warps: int) -> "_Kernels":
        suffix = WARPS_SUFFIX[warps]
        return cls(
            gemv=gpu.kernel("gemv", "dense_gemv_bf16"),
            router_gemv=gpu.kernel("moe_v41", "moe_v41_router_gemv_f32out"),
            q8_rows=gpu.kernel("kquant_moe", "kquant_q8_1_rows_bf16"),
            mmvq_q2k=gpu.kernel("kquant_moe", "kquant_mmvq_q2_k_w"),
            mmvq_q3k=gpu.kernel("kquant_moe", "kquant_mmvq_q3_k_w"),
            mmvq_q2k_experts=gpu.kernel("kquant_moe", f"kquant_mmvq_q2_k_experts_w{suffix}"),
            mmvq_q3k_experts=gpu.kernel("kquant_moe", f"kquant_mmvq_q3_k_experts_w{suffix}"),
            swiglu=gpu.kernel("moe_v41", "moe_v41_swiglu"),
            swiglu_q8=gpu.kernel("kquant_moe", "kquant_swiglu_q8_1_rows_bf16"),
            accumulate=gpu.kernel("moe_v41", "moe_v41_accumulate"),
            finish=gpu.kernel("moe_v41", "moe_v41_finish"),
            sum_rows=gpu.kernel("moe_v41", "moe_v41_sum_rows"),
            route_select=gpu.kernel("moe_v41", "moe_v41_route_select"),
            slot_table_set=gpu.kernel("moe_v41", "moe_v41_slot_table_set"),
        )


class MoeV41:
    """The workspace and the step of a DeepSeek-V4.1 MoE; layers share it.

    ``add_layer(layer, weights, experts)`` once for each layer, then ``forward(layer, x)``. Weights and experts stay
    their owners'. ``free()`` gives back every buffer, the side stream and both events.

    ``METRALE_DS41_EXPERT_WARPS`` (2, 4 or 8) picks the expert GEMV; with ``METRALE_DS41_DIAG=1`` every step waits
    for its parts and leaves their milliseconds in ``last_timing``.
    """

    def __init__(self, gpu: GpuBackend, cfg: MoeV41Cfg) -> None:
        self.gpu = gpu
        self.cfg = cfg
        self.last_timing: dict[str, float] = {}
        self._diagnose = os.environ.get("METRALE_DS41_DIAG") == "1"
        self._mark = 0.0
        self._layers: dict[int, _Layer] = {}
        self._apart = False  # the side stream has work that no other stream waits for
        self._warps = expert_warps()
        self._k = _Kernels.of(gpu, self._warps)
        with Owner(gpu, "MoeV41") as own:
            self._buffers = {spec.name: own.alloc(spec.name, spec.nbytes) for spec in cfg.buffer_table()}
            self._side = own.stream()
            self._ev_in, self._ev_out = own.event(), own.event()
            table_bytes = U32_BYTES * SLOT_TABLE_LAYERS * cfg.n_routed
            gpu.memset(self._buffers["slot_table"], 0xFF, table_bytes)
        self._own = own

    def add_layer(self, layer: SupportsIndex, weights: MoeV41LayerWeights, experts: ExpertArena) -> None:
        """Use ``weights`` and the experts that ``experts`` holds now for ``layer`` (0 to 63), in place of earlier ones.

        Refuses weights and slots of another shape than the configuration's, freed ones, and those of another backend.
        After another error the layer has to be added again.
        """
        cfg, b = self.cfg, self._live()
        layer = integer("layer", layer, 0, SLOT_TABLE_LAYERS - 1)
        for name, held in (("weights", weights.own), ("experts", experts.own)):
            if held.gpu is not self.gpu:
                refuse(f"{name}: backend", held.gpu, f"the MoeV41's own, {self.gpu!r}")
        _check_held(layer, weights, experts)
        if (weights.router.n_routed, weights.router.dim) != (cfg.n_routed, cfg.dim):
            got = f"router ({weights.router.n_routed}, {weights.router.dim})"
            refuse("weights", got, f"router ({cfg.n_routed}, {cfg.dim})")
        if weights.shared_gate.n > cfg.inter:
            refuse(
                "weights",
                f"a shared expert of inner width {weights.shared_gate.n}",
                f"at most inter, {cfg.inter}",
            )
        if (experts.layout.dim, experts.layout.inter) != (cfg.dim, cfg.inter):
            got = f"slots of dim {experts.layout.dim}, inter {experts.layout.inter}"
            refuse("experts", got, f"dim {cfg.dim}, inter {cfg.inter}")
        slots = np.full(cfg.n_routed, -1, np.int32)
        for expert, slot in experts.slots_of(layer).items():
            if not 0 <= expert < cfg.n_routed:
                refuse("experts", f"expert {expert} of layer {layer}", f"0 to {cfg.n_routed - 1}")
            slots[expert] = slot
        triples = np.empty((cfg.n_routed, 3), np.int32)
        triples[:, 0], triples[:, 1], triples[:, 2] = layer, np.arange(cfg.n_routed), slots
        self._layers.pop(layer, None)  # should the next fail, the device's table may be neither the old nor the new
        with self.gpu.upload(triples, "MoeV41.triples") as staged:
            ops.moe_v41_slot_table_set(
                self.gpu, self._k.slot_table_set, b["slot_table"], cfg.n_routed, staged, len(triples), None
            )
            self.gpu.synchronize()
        self._layers[layer] = _Layer(
            weights,
            experts,
            slots,
            slots_ptr=b["slot_table"].offset(layer * slots.nbytes),
            header=b["route_hdr"].offset(layer * U32_BYTES * cfg.header_words),
        )

    def forward(
        self, layer: int, x: Any, stream: Any = None, *, selection: str = "device", side_stream: bool = True
    ) -> DevicePtr:
        """The layer's output for one token: ``x`` bf16 ``[dim]`` on the device -> ``out_ptr()`` bf16 ``[dim]``.

        Queued on ``stream``. ``selection`` "device" needs no wait and can be captured; "host" waits for the
        logits, selects with the same bits, and raises at once where "device" leaves it to ``routed``. The shared
        expert runs beside the routed ones on the side stream, or with ``side_stream=False`` behind them, with the
        same bits. Refuses a layer that was not added, or whose weights or experts have been freed.
        """
        b = self._live()
        if selection not in SELECTIONS:
            refuse("selection", selection, " or ".join(SELECTIONS))
        state = self._added(layer)
        weights = state.weights
        _check_held(layer, weights, state.experts)
        gpu, k, cfg = self.gpu, self._k, self.cfg
        stream = gpu.default_stream() if stream is None else stream
        self._mark = time.perf_counter()
        if self._apart:
            gpu.synchronize(self._side)
            self._apart = False

        ops.moe_v41_router_gemv_f32out(
            gpu, k.router_gemv, x, weights.router.weight, b["logits"], 1, cfg.n_routed, cfg.dim, stream
        )
        if selection == "device":
            self._select_on_device(state, stream)
        else:
            self._select_on_host(layer, state, stream)
        state.has_run = True
        self._span("route", stream)

        ops.kquant_q8_1_rows_bf16(gpu, k.q8_rows, x, b["a_q8"], cfg.dim, 1, stream)
        if side_stream:
            gpu.record_event(self._ev_in, stream)
            gpu.stream_wait_event(self._side, self._ev_in)
            self._apart = True
            try:
                self._shared_expert(weights, x, self._side)
                self._routed_experts(weights, stream)
            finally:  # after an error too, what is on the side stream lies before all that comes next
                gpu.record_event(self._ev_out, self._side)
                gpu.stream_wait_event(stream, self._ev_out)
                self._apart = False
        else:
            self._routed_experts(weights, stream)
            self._shared_expert(weights, x, stream)
        ops.moe_v41_accumulate(gpu, k.accumulate, b["acc"], b["sd"], cfg.dim, stream)
        ops.moe_v41_finish(gpu, k.finish, b["acc"], b["out"], cfg.dim, stream)
        self._span("shared", stream)
        return b["out"]

    def routed(self, layer: int, stream: Any = None) -> RoutedToken:
        """The selection behind the layer's last output; waits for ``stream``.

        Refuses a layer that was not added, or has not run since. Raises ``MetraleError``, naming layer and token, if
        its logits were not finite or a pick was not resident: the output is then worthless.
        """
        self._live()
        state = self._added(layer)
        if not state.has_run:
            refuse("layer", layer, "a layer that has run")
        header = np.empty(self.cfg.header_words, np.uint32)
        self.gpu.copy_d2h_on_stream(state.header, header, stream)
        _check_flags(layer, int(header[0]))
        picks, weights, slots = header[1:].reshape(3, self.cfg.topk)
        return RoutedToken(picks.view(np.int32), weights.view(np.float32), slots.view(np.int32))

    def out_ptr(self) -> DevicePtr:
        """Where ``forward`` leaves its output, bf16 ``[dim]``."""
        return self._live()["out"]

    def buffer(self, name: str) -> DevicePtr:
        """A buffer of ``cfg.buffer_table()`` by name; its contents are those of the last step."""
        buffers = self._live()
        if name not in buffers:
            refuse("name", name, ", ".join(buffers))
        return buffers[name]

    def free(self) -> None:
        """Give everything back. A second call does nothing."""
        self._layers.clear()
        self._own.free()

    def _live(self) -> dict[str, DevicePtr]:
        """The buffers; refuses use after ``free()``."""
        if self._own.freed:
            raise MetraleError("the MoeV41 has been freed")
        return self._buffers

    def _added(self, layer: int) -> _Layer:
        if layer not in self._layers:
            added = ", ".join(map(str, sorted(self._layers))) or "none yet"
            refuse("layer", layer, f"a layer of add_layer ({added})")
        return self._layers[layer]

    def _select_on_device(self, state: _Layer, stream: int) -> None:
        cfg, b, layout = self.cfg, self._buffers, state.experts.layout
        ops.moe_v41_route_select(
            self.gpu,
            self._k.route_select,
            b["logits"],
            state.weights.router.bias,
            cfg.n_routed,
            cfg.topk,
            cfg.gate_temp,
            cfg.route_scale,
            cfg.norm_topk_prob,
            state.slots_ptr,
            state.experts.base,
            layout.slot_bytes,
            0,
            layout.up_offset,
            layout.down_offset,
            state.header,
            b["weight_dev"],
            b["rows_dev"],
            b["ptrs_dev"],
            stream,
        )

    def _select_on_host(self, layer: int, state: _Layer, stream: int) -> None:
        gpu, cfg, b, layout = self.gpu, self.cfg, self._buffers, state.experts.layout
        logits = np.empty(cfg.n_routed, np.float32)
        gpu.copy_d2h_on_stream(b["logits"], logits, stream)
        flags, picks, pick_weights = route_select(
            logits, state.weights.router.host_bias, cfg.topk, cfg.gate_temp, cfg.route_scale, cfg.norm_topk_prob
        )
        _check_flags(layer, flags)
        plan = np.argsort(picks)
        slots = state.slots[picks[plan]]
        _check_flags(layer, NOT_RESIDENT if (slots < 0).any() else 0)
        blocks = int(state.experts.base) + slots.astype(np.uint64) * np.uint64(layout.slot_bytes)
        offsets = np.array([0, layout.up_offset, layout.down_offset], np.uint64)
        header = np.concatenate([[flags], picks.view(np.uint32), pick_weights.view(np.uint32), slots.view(np.uint32)])
        for data, ptr in (
            (header.astype(np.uint32), state.header),
            (pick_weights[plan], b["weight_dev"]),
            (np.zeros(cfg.topk, np.uint32), b["rows_dev"]),
            (offsets[:, None] + blocks, b["ptrs_dev"]),
        ):
            gpu.copy_h2d_async(data, ptr, stream)

    def _routed_experts(self, weights: MoeV41LayerWeights, stream: int) -> None:
        gpu, k, cfg, b, picks = self.gpu, self._k, self.cfg, self._buffers, self.cfg.topk
        limit = cfg.swiglu_limit if weights.swiglu_limit is None else weights.swiglu_limit
        gate, ptrs = b["gate_out"], b["ptrs_dev"]
        up, down_ptrs = gate.offset(picks * cfg.inter * BF16_BYTES), ptrs.offset(2 * picks * PTR_BYTES)
        ops.kquant_mmvq_experts_w(
            gpu,
            k.mmvq_q2k_experts,
            ptrs,
            b["a_q8"],
            gate,
            cfg.dim,
            cfg.inter,
            1,
            0,
            2 * picks,
            self._warps,
            stream,
        )
        ops.kquant_swiglu_q8_1_rows_bf16(
            gpu, k.swiglu_q8, gate, up, b["weight_dev"], b["h"], b["h_q8"], picks, cfg.inter, limit, stream
        )
        row_bytes = kquant_q8_1_rows_bytes(1, cfg.inter)
        ops.kquant_mmvq_experts_w(
            gpu, k.mmvq_q3k_experts, down_ptrs, b["h_q8"], b["down_out"], cfg.inter, cfg.dim, 1, row_bytes, picks,
            self._warps, stream,
        )  # fmt: skip
        gpu.memset_async(b["acc"], 0, F32_BYTES * cfg.dim, stream)
        ops.moe_v41_sum_rows(gpu, k.sum_rows, b["acc"], b["down_out"], picks, cfg.dim, stream)
        self._span("routed", stream)

    def _shared_expert(self, weights: MoeV41LayerWeights, x: Any, stream: int) -> None:
        gpu, k, b, down = self.gpu, self._k, self._buffers, weights.shared_down
        limit = weights.shared_swiglu_limit
        limit = self.cfg.swiglu_limit if limit is None else limit
        self._project(weights.shared_gate, x, b["a_q8"], b["sg"], stream)
        self._project(weights.shared_up, x, b["a_q8"], b["su"], stream)
        if down.kind is BF16:
            ops.moe_v41_swiglu(gpu, k.swiglu, b["sg"], b["su"], None, b["sh"], 1, down.k, limit, stream)
        else:
            ops.kquant_swiglu_q8_1_rows_bf16(
                gpu, k.swiglu_q8, b["sg"], b["su"], None, b["sh"], b["sh_q8"], 1, down.k, limit, stream
            )
        self._project(down, b["sh"], b["sh_q8"], b["sd"], stream)

    def _project(self, matrix: ResidentMat, x: Any, x_q8: DevicePtr, out: DevicePtr, stream: int) -> None:
        if matrix.kind is BF16:
            ops.dense_gemv(self.gpu, self._k.gemv, x, matrix.ptr, out, matrix.n, matrix.k, stream)
            return
        kernel = {Q2_K: self._k.mmvq_q2k, Q3_K: self._k.mmvq_q3k}[matrix.kind]
        ops.kquant_mmvq_w(self.gpu, kernel, matrix.ptr, x_q8, out, matrix.k, matrix.n, 1, stream)

    def _span(self, name: str, stream: int) -> None:
        if self._diagnose:
            self.gpu.synchronize(stream)
            now = time.perf_counter()
            self.last_timing[name] = (now - self._mark) * 1e3
            self._mark = now


def _check_held(layer: int, weights: MoeV41LayerWeights, experts: ExpertArena) -> None:
    if weights.own.freed:
        raise MetraleError(f"layer {layer}: its weights have been freed")
    if experts.own.freed:
        raise MetraleError(f"layer {layer}: its experts have been freed")


def _check_flags(layer: int, flags: int) -> None:
    if flags & NOT_FINITE:
        raise MetraleError(f"layer {layer}, token 0: a router logit is NaN or infinite; no expert was picked")
    if flags & NOT_RESIDENT:
        raise MetraleError(f"layer {layer}, token 0: a picked expert is not resident")
