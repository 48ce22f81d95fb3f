# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launchers: one function a kernel, which checks its arguments, knows the geometry, and queues the launch.

A launcher refuses kernels of other names than it launches, and pointers that are not aligned to what lies there:
2 bytes for bf16, 4 for f32, 8 for addresses, or as it says. From Cython, ``cimport`` the ``c_`` functions of
``metrale.ops.dense``, ``engram``, ``kquant``, ``mmq``, ``moe``, ``grouped``, ``conv1d`` and ``gdn``: the same launches
on plain integers.
"""

from metrale.ops.conv1d import conv1d_commit, conv1d_update_chunk2, conv1d_update_chunkn, conv1d_verify
from metrale.ops.dense import dense_gemm, dense_gemv
from metrale.ops.engram import (
    dequant_q2_k_to_bf16,
    engram_v41_gate,
    engram_v41_hash,
    engram_v41_rows_gather,
    engram_v41_wkv_q2k_gemv,
    engram_v41_wkv_q2k_gemv_gather,
)
from metrale.ops.gdn import (
    gated_delta_rule_commit,
    gated_delta_rule_verify,
    gdn_decode_wy2,
    gdn_decode_wy3,
    gdn_decode_wy4,
    gdn_decode_wyn,
    gdn_decode_wyn_table,
)
from metrale.ops.grouped import (
    kquant_mmq_grouped,
    kquant_mmvq_grouped,
    moe_grouped_combine,
    moe_grouped_rows,
    moe_grouped_tiles,
)
from metrale.ops.kquant import (
    kquant_mmvq_experts_w,
    kquant_mmvq_w,
    kquant_q8_1_rows_bf16,
    kquant_swiglu_q8_1_rows_bf16,
)
from metrale.ops.mmq import kquant_mmq128, metrale_q8_1_quantize_bf16
from metrale.ops.moe import (
    moe_v41_accumulate,
    moe_v41_finish,
    moe_v41_gather_rows,
    moe_v41_route_select,
    moe_v41_route_select_tokens,
    moe_v41_router_gemv_f32out,
    moe_v41_router_gemv_f32out_products,
    moe_v41_scatter_add,
    moe_v41_slot_table_set,
    moe_v41_sum_rows,
    moe_v41_swiglu,
)

__all__ = [
    "conv1d_commit",
    "conv1d_update_chunk2",
    "conv1d_update_chunkn",
    "conv1d_verify",
    "dense_gemm",
    "dense_gemv",
    "dequant_q2_k_to_bf16",
    "engram_v41_gate",
    "engram_v41_hash",
    "engram_v41_rows_gather",
    "engram_v41_wkv_q2k_gemv",
    "engram_v41_wkv_q2k_gemv_gather",
    "gated_delta_rule_commit",
    "gated_delta_rule_verify",
    "gdn_decode_wy2",
    "gdn_decode_wy3",
    "gdn_decode_wy4",
    "gdn_decode_wyn",
    "gdn_decode_wyn_table",
    "kquant_mmq128",
    "kquant_mmq_grouped",
    "kquant_mmvq_experts_w",
    "kquant_mmvq_grouped",
    "kquant_mmvq_w",
    "kquant_q8_1_rows_bf16",
    "kquant_swiglu_q8_1_rows_bf16",
    "metrale_q8_1_quantize_bf16",
    "moe_grouped_combine",
    "moe_grouped_rows",
    "moe_grouped_tiles",
    "moe_v41_accumulate",
    "moe_v41_finish",
    "moe_v41_gather_rows",
    "moe_v41_route_select",
    "moe_v41_route_select_tokens",
    "moe_v41_router_gemv_f32out",
    "moe_v41_router_gemv_f32out_products",
    "moe_v41_scatter_add",
    "moe_v41_slot_table_set",
    "moe_v41_sum_rows",
    "moe_v41_swiglu",
]
