# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shape of a DeepSeek-V4.1 MoE and the buffers it needs."""

import math
import operator
import os
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

from metrale.errors import refuse
from metrale.formats.kquant import SUPER_BLOCK, kquant_mmq_act_bytes, kquant_q8_1_rows_bytes
from metrale.moe_v41._select import MAX_ROUTED, MAX_TOPK

__all__ = ["SLOT_TABLE_LAYERS", "BufferSpec", "MoeV41Cfg", "expert_warps", "integer"]

SLOT_TABLE_LAYERS = 64
EXPERT_WARPS = (2, 4, 8)
MAX_TOKENS = 65_535
"""What the second dimension of a grid holds."""

BF16_BYTES, F32_BYTES, U32_BYTES, PTR_BYTES, TILE_BYTES = 2, 4, 4, 8, 16
GEMV_TILE_ROWS = 8


class BufferSpec(NamedTuple):
    """One buffer: its name, the formula of its size in the configuration's words, and its bytes."""

    name: str
    formula: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class MoeV41Cfg:
    """Shape and routing constants of a MoE layer.

    ``dim`` is the model's width and ``inter`` an expert's inner width, both multiples of 256; ``n_routed`` experts
    (up to 1024), of which ``topk`` (up to 32) serve a token; ``max_tokens`` (up to 65535) sizes the workspace.
    ``swiglu_limit`` is the clamp of a layer that brings none of its own; 0 means no clamp.
    """

    dim: int
    inter: int
    n_routed: int
    topk: int
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    route_scale: float = 1.0
    swiglu_limit: float = 0.0
    max_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("dim", "inter"):
            value = getattr(self, name)
            if value <= 0 or value % SUPER_BLOCK:
                refuse(
                    name,
                    value,
                    f"a positive multiple of {SUPER_BLOCK}: K-quant experts are made of such blocks",
                )
        integer("n_routed", self.n_routed, 1, MAX_ROUTED)
        integer("topk", self.topk, 1, min(self.n_routed, MAX_TOPK))
        integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        if not 0 < self.gate_temp < math.inf:
            refuse("gate_temp", self.gate_temp, "more than 0, and finite")
        if not math.isfinite(self.route_scale):
            refuse("route_scale", self.route_scale, "a finite number")
        if not self.swiglu_limit >= 0:
            refuse("swiglu_limit", self.swiglu_limit, "0 (no clamp) or more")

    @property
    def rows(self) -> int:
        """Rows that the experts compute at most: an assignment each."""
        return self.max_tokens * self.topk

    @property
    def header_words(self) -> int:
        """u32 words of a token's selection: the flags, then topk picks, weights and slots."""
        return 1 + 3 * self.topk

    def buffer_table(self) -> list[BufferSpec]:
        """Every buffer of a ``MoeV41``, in the order of allocation. ``me`` is ``max(max_tokens, topk)``, ``rows`` is
        ``max_tokens * topk``."""
        m, k, n, rows = self.max_tokens, self.topk, self.n_routed, self.rows
        dim, inter = self.dim, self.inter
        me = max(m, k)
        act = "max(mmq_act_bytes({0}, {1}), q8_1_rows_bytes({0}, {1}))"
        table = [
            ("logits", "4 * max_tokens * n_routed", F32_BYTES * m * n),
            ("pred_logits", "4 * n_routed", F32_BYTES * n),
            ("a_rows", "2 * max_tokens * dim", BF16_BYTES * m * dim),
            ("a_q8", act.format("max_tokens", "dim"), _act_bytes(m, dim)),
            # Gate and up run as one batch: up lies as many rows behind gate as there are.
            ("gate_out", "2 * 2 * rows * inter", BF16_BYTES * 2 * rows * inter),
            ("up_out", "2 * me * inter", BF16_BYTES * me * inter),
            ("h", "2 * rows * inter", BF16_BYTES * rows * inter),
            ("h_q8", act.format("rows", "inter"), _act_bytes(rows, inter)),
            ("down_out", "2 * rows * dim", BF16_BYTES * rows * dim),
            ("rows_dev", "4 * rows", U32_BYTES * rows),
            ("weight_dev", "4 * rows", F32_BYTES * rows),
            ("route_hdr", "4 * 64 * (1 + 3 * topk)", U32_BYTES * SLOT_TABLE_LAYERS * self.header_words),
            ("slot_table", "4 * 64 * n_routed", U32_BYTES * SLOT_TABLE_LAYERS * n),
            ("ptrs_dev", "8 * 3 * topk", PTR_BYTES * 3 * k),
            ("sg", "2 * max_tokens * inter", BF16_BYTES * m * inter),
            ("su", "2 * max_tokens * inter", BF16_BYTES * m * inter),
            ("sh", "2 * max_tokens * inter", BF16_BYTES * m * inter),
            ("sd", "2 * max_tokens * dim", BF16_BYTES * m * dim),
            ("acc", "4 * max_tokens * dim", F32_BYTES * m * dim),
            ("out", "2 * max_tokens * dim", BF16_BYTES * m * dim),
            ("sh_q8", "q8_1_rows_bytes(1, inter)", kquant_q8_1_rows_bytes(1, inter)),
        ]
        if m > 1:
            table += [
                ("many_hdr", "4 * max_tokens * (1 + 3 * topk)", U32_BYTES * m * self.header_words),
                ("many_ptrs", "8 * 3 * n_routed", PTR_BYTES * 3 * n),
                ("offsets", "4 * (n_routed + 1)", U32_BYTES * (n + 1)),
                ("tiles", "16 * (min(n_routed, rows) + rows // 8)", TILE_BYTES * self.most_tiles(m, GEMV_TILE_ROWS)),
                ("n_tiles", "4 * 1", U32_BYTES),
                ("token_rows", "4 * rows", U32_BYTES * rows),
                ("sx_q8", act.format("max_tokens", "dim"), _act_bytes(m, dim)),
                ("many_sh_q8", act.format("max_tokens", "inter"), _act_bytes(m, inter)),
            ]
        return [BufferSpec(*row) for row in table]

    def most_tiles(self, tokens: int, tile_rows: int) -> int:
        """Tiles of up to ``tile_rows`` rows that the picks of ``tokens`` make at most: each expert has one that is not
        full."""
        rows = tokens * self.topk
        return min(self.n_routed, rows) + rows // tile_rows


def integer(name: str, value: SupportsIndex, first: int, last: int) -> int:
    """``value`` as an int. Refuses what is no integer, booleans too, and what lies outside ``first`` to ``last``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = first - 1
    if isinstance(value, bool) or not first <= number <= last:
        refuse(name, value, f"an integer, {first} to {last}")
    return number


def expert_warps() -> int:
    """Warps a block of the expert GEMVs: ``METRALE_DS41_EXPERT_WARPS``, 8 when unset."""
    text = os.environ.get("METRALE_DS41_EXPERT_WARPS", "8")
    if text not in map(str, EXPERT_WARPS):
        refuse("METRALE_DS41_EXPERT_WARPS", text, ", ".join(map(str, EXPERT_WARPS)))
    return int(text)


def _act_bytes(rows: int, k: int) -> int:
    return max(kquant_mmq_act_bytes(rows, k), kquant_q8_1_rows_bytes(rows, k))
