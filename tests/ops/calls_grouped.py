# SPDX-License-Identifier: MIT OR Apache-2.0
"""Valid calls of the launchers for many rows, and sizes that they refuse; see test_launcher_refusals."""

from metrale import ops

AT_LEAST_1 = "1 or more"
OF_256, OF_32 = "a positive multiple of 256", "a positive multiple of 32"

SELECTIONS = {"hdr": "ptr", "tokens": 4, "topk": 2, "n_routed": 8}
GROUPED = {
    **{"tables": "ptr", "y": "ptr", "rows": None, "out": "ptr", "tiles": "ptr", "n_tiles": "ptr"},
    **{"K": 256, "N": 8, "n_routed": 8, "out_rows": 8},
}
LAUNCHES = {"max_tiles": 4, "projections": 2}

CALLS = {
    ops.metrale_q8_1_quantize_bf16: (
        "kquant_moe",
        "metrale_q8_1_quantize_d4_bf16",
        {"x": "ptr", "y": "ptr", "K": 64, "M": 1},
    ),
    ops.kquant_mmq128: (
        "kquant_moe",
        "metrale_q2_k_mmq128_nc",
        {
            **{"w": "ptr", "y": "ptr", "out": "ptr", "N": 128, "M": 2, "K": 512},
            **{"blocks_per_row": 2, "y_rows": 2, "out_stride": 128},
        },
    ),
    ops.moe_v41_route_select_tokens: (
        "moe_v41",
        "moe_v41_route_select_tokens",
        {
            **{"logits": "ptr", "bias": None, "n_routed": 8, "topk": 3, "gate_temp": 1.0, "route_scale": 1.5},
            **{"norm_topk": True, "slot_of": "ptr", "hdr": "ptr", "tokens": 2},
        },
    ),
    ops.moe_v41_gather_rows: (
        "moe_v41",
        "moe_v41_gather_rows",
        {"x": "ptr", "rows": "ptr", "out": "ptr", "n_rows": 2, "dim": 8},
    ),
    ops.moe_v41_scatter_add: (
        "moe_v41",
        "moe_v41_scatter_add",
        {"acc": "ptr", "src": "ptr", "rows": "ptr", "n_rows": 2, "dim": 8},
    ),
    ops.moe_grouped_tiles: (
        "moe_grouped",
        "moe_grouped_tiles",
        {
            **SELECTIONS,
            **{"first": 0, "last": 8, "tile_rows": 8, "offsets": "ptr", "tiles": "ptr", "n_tiles": "ptr"},
        },
    ),
    ops.moe_grouped_rows: (
        "moe_grouped",
        "moe_grouped_rows",
        {
            **SELECTIONS,
            **{"offsets": "ptr", "slot_of": "ptr", "arena_base": "ptr", "slot_bytes": 96},
            **{"gate_off": 0, "up_off": 32, "down_off": 64},
            **{"row_token": "ptr", "row_weight": "ptr", "token_rows": "ptr", "ptrs": "ptr"},
        },
    ),
    ops.moe_grouped_combine: (
        "moe_grouped",
        "moe_grouped_combine",
        {
            **{"src": "ptr", "token_rows": "ptr", "shared": "ptr", "acc": "ptr", "out": "ptr"},
            **{"tokens": 2, "topk": 2, "dim": 8},
        },
    ),
    ops.kquant_mmvq_grouped: ("moe_grouped", "kquant_mmvq_q2_k_grouped", {**GROUPED, **LAUNCHES}),
    ops.kquant_mmq_grouped: ("moe_grouped", "kquant_mmq_q2_k_grouped16", {**GROUPED, "y_rows": 4, **LAUNCHES}),
}

KERNELS = {
    ops.metrale_q8_1_quantize_bf16: [f"metrale_q8_1_quantize_{layout}_bf16" for layout in ("d4", "d2s6")],
    ops.kquant_mmq128: [f"metrale_{kind}_mmq128_{form}" for kind in ("q2_k", "q3_k") for form in ("nc", "wc")],
    ops.kquant_mmvq_grouped: [f"kquant_mmvq_{kind}_grouped" for kind in ("q2_k", "q3_k")],
    ops.kquant_mmq_grouped: [f"kquant_mmq_{kind}_grouped{rows}" for kind in ("q2_k", "q3_k") for rows in (16, 128)],
}

_SELECTIONS = [
    ("tokens", 0, AT_LEAST_1),
    *[("topk", k, "1 to 8") for k in (0, 9)],
    *[("n_routed", n, "1 to 1024") for n in (0, 1025)],
]
_ROWS = [*[("n_rows", n, "1 to 65535") for n in (0, 65_536)], ("dim", 0, AT_LEAST_1)]
_GROUPED = [
    *[("K", k, OF_256) for k in (0, 32, 300)],
    *[("n_routed", n, "1 to 1024") for n in (0, 1025)],
    *[(name, 0, AT_LEAST_1) for name in ("N", "out_rows", "max_tiles", "projections")],
]
SIZES = {
    ops.metrale_q8_1_quantize_bf16: [*[("K", k, OF_32) for k in (0, 16, 33)], ("M", 0, AT_LEAST_1)],
    ops.kquant_mmq128: [
        *[("K", k, OF_256) for k in (0, 32, 300)],
        *[("N", n, "a positive multiple of 128") for n in (0, 64)],
        *[("M", 0, AT_LEAST_1), ("blocks_per_row", 1, "at least 2"), ("y_rows", 1, "at least 2")],
        ("out_stride", 127, "at least 128"),
    ],
    ops.moe_v41_route_select_tokens: [
        *[("n_routed", n, "1 to 1024") for n in (0, 1025)],
        *[("topk", k, "1 to 8") for k in (0, 9)],
        *[("gate_temp", t, "more than 0") for t in (0.0, -1.0, float("nan"))],
        ("tokens", 0, AT_LEAST_1),
    ],
    ops.moe_v41_gather_rows: _ROWS,
    ops.moe_v41_scatter_add: _ROWS,
    ops.moe_grouped_tiles: [
        *_SELECTIONS,
        *[("last", e, "1 to 8") for e in (0, 9)],
        *[("first", 8, "less than 8"), ("tile_rows", 0, AT_LEAST_1)],
    ],
    ops.moe_grouped_rows: _SELECTIONS,
    ops.moe_grouped_combine: [(name, 0, AT_LEAST_1) for name in ("tokens", "topk", "dim")],
    ops.kquant_mmvq_grouped: _GROUPED,
    ops.kquant_mmq_grouped: [*_GROUPED, ("y_rows", 0, AT_LEAST_1)],
}
