# SPDX-License-Identifier: MIT OR Apache-2.0
"""The step for several tokens: each projection one launch over all experts that have rows."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.errors import refuse
from metrale.formats.kquant import BF16, Q2_K, Q3_K, kquant_q8_1_rows_bytes
from metrale.gpu import DevicePtr, GpuBackend, KernelHandle
from metrale.moe_v41.config import BF16_BYTES, GEMV_TILE_ROWS, PTR_BYTES, MoeV41Cfg
from metrale.moe_v41.weights import MoeV41LayerWeights, ResidentMat, RouterWeights, SlotLayout

__all__ = ["PATHS", "Grouped"]

PATHS = ("auto", "gemv", "mmq")
GEMV_MOST_ROWS = 8
MMQ_TILES = (16, 128)
FEW_ROWS = 12
"""Up to so many rows an expert on average, tiles of 16 rows waste less than those of 128 would save."""


class _Kernels(NamedTuple):
    router: KernelHandle
    select: KernelHandle
    tiles: KernelHandle
    rows: KernelHandle
    combine: KernelHandle
    swiglu: KernelHandle
    gemv: KernelHandle
    gemm: KernelHandle
    q8_rows: KernelHandle
    swiglu_q8: KernelHandle
    quantise: dict[Any, KernelHandle]
    mmvq: dict[Any, KernelHandle]
    mmq: dict[Any, KernelHandle]
    mmvq_grouped: dict[Any, KernelHandle]
    mmq_grouped: dict[Any, KernelHandle]

    @classmethod
    def of(cls, gpu: GpuBackend) -> "_Kernels":
        kinds = {Q2_K: "q2_k", Q3_K: "q3_k"}
        layouts = {Q2_K: "d2s6", Q3_K: "d4"}
        return cls(
            router=gpu.kernel("gemm", "dense_gemm_bf16_f32out"),
            select=gpu.kernel("moe_v41", "moe_v41_route_select_tokens"),
            tiles=gpu.kernel("moe_grouped", "moe_grouped_tiles"),
            rows=gpu.kernel("moe_grouped", "moe_grouped_rows"),
            combine=gpu.kernel("moe_grouped", "moe_grouped_combine"),
            swiglu=gpu.kernel("moe_v41", "moe_v41_swiglu"),
            gemv=gpu.kernel("gemv", "dense_gemv_bf16"),
            gemm=gpu.kernel("gemm", "dense_gemm_bf16"),
            q8_rows=gpu.kernel("kquant_moe", "kquant_q8_1_rows_bf16"),
            swiglu_q8=gpu.kernel("kquant_moe", "kquant_swiglu_q8_1_rows_bf16"),
            quantise={k: gpu.kernel("kquant_moe", f"metrale_q8_1_quantize_{at}_bf16") for k, at in layouts.items()},
            mmvq={k: gpu.kernel("kquant_moe", f"kquant_mmvq_{name}_w") for k, name in kinds.items()},
            mmq={k: gpu.kernel("kquant_moe", f"metrale_{name}_mmq128_wc") for k, name in kinds.items()},
            mmvq_grouped={k: gpu.kernel("moe_grouped", f"kquant_mmvq_{name}_grouped") for k, name in kinds.items()},
            mmq_grouped={
                (k, rows): gpu.kernel("moe_grouped", f"kquant_mmq_{name}_grouped{rows}")
                for k, name in kinds.items()
                for rows in MMQ_TILES
            },
        )


class Grouped:
    """The launches of a step for several tokens, over the buffers of a ``MoeV41``. It owns nothing.

    Under one ``path`` a token's bits depend on nothing but the token: "gemv" multiplies q8_1 rows, and has the bits of
    the step for one token; "mmq" uses the int8 tensor cores; "auto" is "mmq".
    """

    def __init__(self, gpu: GpuBackend, cfg: MoeV41Cfg, buffers: dict[str, DevicePtr]) -> None:
        self.gpu, self.cfg, self._buffers = gpu, cfg, buffers
        self._k = _Kernels.of(gpu)

    def logits(self, router: RouterWeights, x: Any, tokens: int, stream: int) -> None:
        """Router logits of every token."""
        cfg = self.cfg
        ops.dense_gemm(
            self.gpu, self._k.router, x, router.weight, self._buffers["logits"], tokens, cfg.n_routed, cfg.dim, stream
        )

    def select(self, router: RouterWeights, slots: DevicePtr, tokens: int, stream: int) -> None:
        """Every token's header, from the logits."""
        cfg, b = self.cfg, self._buffers
        ops.moe_v41_route_select_tokens(
            self.gpu, self._k.select, b["logits"], router.bias, cfg.n_routed, cfg.topk, cfg.gate_temp, cfg.route_scale,
            cfg.norm_topk_prob, slots, b["many_hdr"], tokens, stream,
        )  # fmt: skip

    def headers(self, tokens: int, stream: int) -> npt.NDArray[np.uint32]:
        """``[tokens, 1 + 3 * topk]``; waits for ``stream``."""
        headers = np.empty((tokens, self.cfg.header_words), np.uint32)
        self.gpu.copy_d2h_on_stream(self._buffers["many_hdr"], headers, stream)
        return headers

    def quantise(self, x: Any, tokens: int, path: str, stream: int) -> None:
        """The tokens as the experts' gate and up read them."""
        b = self._buffers
        if path == "gemv":
            ops.kquant_q8_1_rows_bf16(self.gpu, self._k.q8_rows, x, b["a_q8"], self.cfg.dim, tokens, stream)
        else:
            self._quantise(Q2_K, x, b["a_q8"], self.cfg.dim, tokens, stream)

    def experts(
        self, arena_base: DevicePtr, layout: SlotLayout, slots: DevicePtr, limit: float, tokens: int, path: str,
        stream: int, first: int, last: int,
    ) -> None:  # fmt: skip
        """The rows of the experts ``first`` to ``last - 1``; the others' stay as they are."""
        gpu, k, cfg, b = self.gpu, self._k, self.cfg, self._buffers
        rows = tokens * cfg.topk
        tile_rows = GEMV_TILE_ROWS if path == "gemv" else MMQ_TILES[rows > FEW_ROWS * cfg.n_routed]
        most = cfg.most_tiles(tokens, tile_rows)
        ops.moe_grouped_tiles(
            gpu, k.tiles, b["many_hdr"], tokens, cfg.topk, cfg.n_routed, first, last, tile_rows, b["offsets"],
            b["tiles"], b["n_tiles"], stream,
        )  # fmt: skip
        ops.moe_grouped_rows(
            gpu, k.rows, b["many_hdr"], tokens, cfg.topk, cfg.n_routed, b["offsets"], slots, arena_base,
            layout.slot_bytes, 0, layout.up_offset, layout.down_offset, b["rows_dev"], b["weight_dev"],
            b["token_rows"], b["many_ptrs"], stream,
        )  # fmt: skip
        gate = b["gate_out"]
        up = gate.offset(rows * cfg.inter * BF16_BYTES)
        down_ptrs = b["many_ptrs"].offset(2 * cfg.n_routed * PTR_BYTES)
        scheduled = (b["tiles"], b["n_tiles"])
        if path == "gemv":
            ops.kquant_mmvq_grouped(
                gpu, k.mmvq_grouped[Q2_K], b["many_ptrs"], b["a_q8"], b["rows_dev"], gate, *scheduled, cfg.dim,
                cfg.inter, cfg.n_routed, rows, most, 2, stream,
            )  # fmt: skip
            ops.kquant_swiglu_q8_1_rows_bf16(
                gpu, k.swiglu_q8, gate, up, b["weight_dev"], b["h"], b["h_q8"], rows, cfg.inter, limit, stream
            )
            ops.kquant_mmvq_grouped(
                gpu, k.mmvq_grouped[Q3_K], down_ptrs, b["h_q8"], None, b["down_out"], *scheduled, cfg.inter, cfg.dim,
                cfg.n_routed, rows, most, 1, stream,
            )  # fmt: skip
        else:
            ops.kquant_mmq_grouped(
                gpu, k.mmq_grouped[Q2_K, tile_rows], b["many_ptrs"], b["a_q8"], b["rows_dev"], gate, *scheduled,
                cfg.dim, cfg.inter, cfg.n_routed, rows, tokens, most, 2, stream,
            )  # fmt: skip
            ops.moe_v41_swiglu(gpu, k.swiglu, gate, up, b["weight_dev"], b["h"], rows, cfg.inter, limit, stream)
            self._quantise(Q3_K, b["h"], b["h_q8"], cfg.inter, rows, stream)
            ops.kquant_mmq_grouped(
                gpu, k.mmq_grouped[Q3_K, tile_rows], down_ptrs, b["h_q8"], None, b["down_out"], *scheduled, cfg.inter,
                cfg.dim, cfg.n_routed, rows, rows, most, 1, stream,
            )  # fmt: skip

    def shared(
        self, weights: MoeV41LayerWeights, x: Any, limit: float, tokens: int, path: str, stream: int
    ) -> None:  # fmt: skip
        """The shared expert's rows."""
        b, inter = self._buffers, weights.shared_gate.n
        if path == "gemv" and BF16 in (weights.shared_gate.kind, weights.shared_up.kind):  # each token's row is wanted
            self.gpu.copy_d2d_async(x, b["a_rows"], tokens * self.cfg.dim * BF16_BYTES, stream)
            x = b["a_rows"]
        seen = {Q2_K: b["a_q8"]} if path != "gemv" else dict.fromkeys((Q2_K, Q3_K), b["a_q8"])
        if Q3_K in (weights.shared_gate.kind, weights.shared_up.kind) and Q3_K not in seen:
            seen[Q3_K] = b["sx_q8"]
            self._quantise(Q3_K, x, b["sx_q8"], self.cfg.dim, tokens, stream)
        for matrix, out in ((weights.shared_gate, b["sg"]), (weights.shared_up, b["su"])):
            self._project(matrix, x, seen, out, tokens, path, stream)
        ops.moe_v41_swiglu(self.gpu, self._k.swiglu, b["sg"], b["su"], None, b["sh"], tokens, inter, limit, stream)
        down, h_q8 = weights.shared_down, b["many_sh_q8"]
        if down.kind is not BF16 and path == "gemv":
            ops.kquant_q8_1_rows_bf16(self.gpu, self._k.q8_rows, b["sh"], h_q8, inter, tokens, stream)
        elif down.kind is not BF16:
            self._quantise(down.kind, b["sh"], h_q8, inter, tokens, stream)
        self._project(down, b["sh"], {down.kind: h_q8}, b["sd"], tokens, path, stream)

    def combine(self, tokens: int, stream: int) -> None:
        """Each token's rows in ascending expert, then the shared expert's."""
        b, cfg = self._buffers, self.cfg
        ops.moe_grouped_combine(
            self.gpu, self._k.combine, b["down_out"], b["token_rows"], b["sd"], b["acc"], b["out"], tokens, cfg.topk,
            cfg.dim, stream,
        )  # fmt: skip

    def _quantise(self, kind: Any, x: Any, y: DevicePtr, k: int, rows: int, stream: int) -> None:
        ops.metrale_q8_1_quantize_bf16(self.gpu, self._k.quantise[kind], x, y, k, rows, stream)

    def _project(
        self, matrix: ResidentMat, x: Any, quantised: dict[Any, DevicePtr], out: DevicePtr, tokens: int, path: str,
        stream: int,
    ) -> None:  # fmt: skip
        gpu, k, (n, width) = self.gpu, self._k, (matrix.n, matrix.k)
        if matrix.kind is BF16 and path != "gemv":
            ops.dense_gemm(gpu, k.gemm, x, matrix.ptr, out, tokens, n, width, stream)
        elif matrix.kind is BF16:
            for token in range(tokens):
                row = x.offset(token * width * BF16_BYTES)
                ops.dense_gemv(gpu, k.gemv, row, matrix.ptr, out.offset(token * n * BF16_BYTES), n, width, stream)
        elif path == "gemv":
            y, row_bytes = quantised[matrix.kind], kquant_q8_1_rows_bytes(1, width)
            for first in range(0, tokens, GEMV_MOST_ROWS):
                m = min(GEMV_MOST_ROWS, tokens - first)
                ops.kquant_mmvq_w(
                    gpu, k.mmvq[matrix.kind], matrix.ptr, y.offset(first * row_bytes),
                    out.offset(first * n * BF16_BYTES), width, n, m, stream,
                )  # fmt: skip
        else:
            ops.kquant_mmq128(
                gpu, k.mmq[matrix.kind], matrix.ptr, quantised[matrix.kind], out, n, tokens, width, width // 256,
                tokens, n, stream,
            )  # fmt: skip


def check_path(path: str, many: bool) -> None:
    """Refuses what is no path, and those that only a workspace for several tokens has."""
    allowed = PATHS if many else PATHS[:2]
    if path not in allowed:
        refuse("path", path, " or ".join(allowed) + ("" if many else " (max_tokens is 1)"))
