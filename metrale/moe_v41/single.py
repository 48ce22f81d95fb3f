# SPDX-License-Identifier: MIT OR Apache-2.0
"""The step for one token: the picks' products in one launch each, over a table of their addresses."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.formats.kquant import BF16, Q2_K, Q3_K, kquant_q8_1_rows_bytes
from metrale.gpu import DevicePtr, GpuBackend, KernelHandle
from metrale.moe_v41._select import route_select
from metrale.moe_v41.config import BF16_BYTES, F32_BYTES, PTR_BYTES, MoeV41Cfg, expert_warps
from metrale.moe_v41.weights import MoeV41LayerWeights, ResidentMat, RouterWeights, SlotLayout

__all__ = ["Picks", "Single"]

WARPS_SUFFIX = {2: "2", 4: "", 8: "8"}


class Picks(NamedTuple):
    """A selection on the host: flags, and what was picked with its weight, best first."""

    flags: int
    experts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


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
        )


class Single:
    """The launches of a step for one token, over the buffers of a ``MoeV41``. It owns nothing."""

    def __init__(self, gpu: GpuBackend, cfg: MoeV41Cfg, buffers: dict[str, DevicePtr]) -> None:
        self.gpu, self.cfg, self._buffers = gpu, cfg, buffers
        self._warps = expert_warps()
        self._k = _Kernels.of(gpu, self._warps)

    def logits(self, router: RouterWeights, x: Any, out: DevicePtr, stream: int) -> None:
        """Router logits."""
        ops.moe_v41_router_gemv_f32out(
            self.gpu, self._k.router_gemv, x, router.weight, out, 1, self.cfg.n_routed, self.cfg.dim, stream
        )

    def select(
        self, router: RouterWeights, arena_base: DevicePtr, layout: SlotLayout, slots: DevicePtr, header: DevicePtr,
        stream: int,
    ) -> None:  # fmt: skip
        """The selection on the device: the header, and the plan's weights and addresses."""
        cfg, b = self.cfg, self._buffers
        ops.moe_v41_route_select(
            self.gpu, self._k.route_select, b["logits"], router.bias, cfg.n_routed, cfg.topk, cfg.gate_temp,
            cfg.route_scale, cfg.norm_topk_prob, slots, arena_base, layout.slot_bytes, 0, layout.up_offset,
            layout.down_offset, header, b["weight_dev"], b["rows_dev"], b["ptrs_dev"], stream,
        )  # fmt: skip

    def pick(self, router: RouterWeights, logits: DevicePtr, stream: int) -> Picks:
        """The selection on the host, with the same bits; waits for ``stream``."""
        cfg, values = self.cfg, np.empty(self.cfg.n_routed, np.float32)
        self.gpu.copy_d2h_on_stream(logits, values, stream)
        return Picks(
            *route_select(values, router.host_bias, cfg.topk, cfg.gate_temp, cfg.route_scale, cfg.norm_topk_prob)
        )

    def stage(
        self, picks: Picks, slots: npt.NDArray[np.int32], arena_base: DevicePtr, layout: SlotLayout,
        header: DevicePtr, stream: int,
    ) -> None:  # fmt: skip
        """Copy a selection on the host to where ``select`` leaves one; ``slots`` of every expert."""
        cfg, b = self.cfg, self._buffers
        plan = np.argsort(picks.experts)
        planned = slots[picks.experts[plan]]
        blocks = int(arena_base) + planned.astype(np.uint64) * np.uint64(layout.slot_bytes)
        offsets = np.array([0, layout.up_offset, layout.down_offset], np.uint64)
        words = (picks.experts.view(np.uint32), picks.weights.view(np.uint32), planned.view(np.uint32))
        for data, ptr in (
            (np.concatenate([[picks.flags], *words]).astype(np.uint32), header),
            (picks.weights[plan], b["weight_dev"]),
            (np.zeros(cfg.topk, np.uint32), b["rows_dev"]),
            (offsets[:, None] + blocks, b["ptrs_dev"]),
        ):
            self.gpu.copy_h2d_async(data, ptr, stream)

    def quantise(self, x: Any, stream: int) -> None:
        """The token as K-quant matrices read it."""
        ops.kquant_q8_1_rows_bf16(self.gpu, self._k.q8_rows, x, self._buffers["a_q8"], self.cfg.dim, 1, stream)

    def experts(self, limit: float, stream: int) -> None:
        """The picks' rows, and their sum in plan order."""
        gpu, k, cfg, b, picks = self.gpu, self._k, self.cfg, self._buffers, self.cfg.topk
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

    def shared(self, weights: MoeV41LayerWeights, x: Any, limit: float, stream: int) -> None:
        """The shared expert's row."""
        gpu, k, b, down = self.gpu, self._k, self._buffers, weights.shared_down
        self._project(weights.shared_gate, x, b["a_q8"], b["sg"], stream)
        self._project(weights.shared_up, x, b["a_q8"], b["su"], stream)
        if down.kind is BF16:
            ops.moe_v41_swiglu(gpu, k.swiglu, b["sg"], b["su"], None, b["sh"], 1, down.k, limit, stream)
        else:
            ops.kquant_swiglu_q8_1_rows_bf16(
                gpu, k.swiglu_q8, b["sg"], b["su"], None, b["sh"], b["sh_q8"], 1, down.k, limit, stream
            )
        self._project(down, b["sh"], b["sh_q8"], b["sd"], stream)

    def combine(self, stream: int) -> None:
        """The shared expert's row behind the others'."""
        gpu, k, b, dim = self.gpu, self._k, self._buffers, self.cfg.dim
        ops.moe_v41_accumulate(gpu, k.accumulate, b["acc"], b["sd"], dim, stream)
        ops.moe_v41_finish(gpu, k.finish, b["acc"], b["out"], dim, stream)

    def _project(self, matrix: ResidentMat, x: Any, x_q8: DevicePtr, out: DevicePtr, stream: int) -> None:
        if matrix.kind is BF16:
            ops.dense_gemv(self.gpu, self._k.gemv, x, matrix.ptr, out, matrix.n, matrix.k, stream)
            return
        kernel = {Q2_K: self._k.mmvq_q2k, Q3_K: self._k.mmvq_q3k}[matrix.kind]
        ops.kquant_mmvq_w(self.gpu, kernel, matrix.ptr, x_q8, out, matrix.k, matrix.n, 1, stream)
