# SPDX-License-Identifier: MIT OR Apache-2.0
"""What launchers refuse: before anything runs, naming the argument, its value and the values it takes."""

import re

import calls_gdn
import calls_grouped
import numpy as np
import pytest

from metrale import ops
from metrale.errors import ArgumentError, LaunchError, MetraleError
from metrale.gpu._signatures import KERNELS as KERNEL_SIGNATURES

POINTERS = {
    *(
        "input",
        "weight",
        "output",
        "conv_state",
        "conv_state_intermediate",
        "bias",
        "x",
        "y",
        "w",
        "out",
        "tables",
    ),
    *(
        "gate",
        "up",
        "h",
        "acc",
        "src",
        "A",
        "B",
        "C",
        "logits",
        "slot_of",
        "hdr",
        "plan_w",
        "plan_rows",
        "ptrs",
    ),
    *("table", "triples", "arena_base", "rows", "offsets", "tiles", "n_tiles"),
    *("row_token", "row_weight", "token_rows", "shared"),
    *("raw", "streams", "kv", "qk", "ids", "flag", "compressed", "multipliers", "primes"),
    *("h_state", "query", "key", "value", "beta", "h_state_inter0", "h_state_inter1", "h_state_inter2"),
    *("h_state_inter_base", "h_tables", "hi_tables", "H", "corrections", "accepted", "a_log", "dt_bias"),
}
WIDE = {"slot_bytes", "gate_off", "up_off", "down_off", "table_rows"}
FLOATS = {"limit", "gate_temp", "route_scale", "eps"}
NUMBERS = {
    *("m", "n", "k", "d_inner", "d_conv", "batch_size", "K", "M", "N", "y_stride_bytes", "experts", "warps"),
    *("rows", "inter", "n_rows", "dim", "n_routed", "topk", "tokens", "first", "last", "tile_rows"),
    *("blocks_per_row", "y_rows", "out_stride", "out_rows", "max_tiles", "projections"),
    *("n_blocks", "row_bytes", "hc", "start", "sites", "ngram", "heads", "pad"),
    *("num_k_heads", "num_v_heads", "k_dim", "v_dim", "qk_stride", "v_stride", "gb_stride"),
    *("inter_stride_floats", "slab_entry_stride"),
}
FLAGS = {"norm_topk", "state_is_table", "unit_rows"}
POINTER = "a device pointer that is not null"
AT_LEAST_1 = calls_gdn.AT_LEAST_1

ROUTE = {
    **{"logits": "ptr", "bias": None, "n_routed": 8, "topk": 3, "gate_temp": 1.0, "route_scale": 1.5},
    **{
        "norm_topk": True,
        "slot_of": "ptr",
        "arena_base": "ptr",
        "slot_bytes": 96,
        "gate_off": 0,
        "up_off": 32,
    },
    **{"down_off": 64, "hdr": "ptr", "plan_w": "ptr", "plan_rows": "ptr", "ptrs": "ptr"},
}
ROUTER = {"A": "ptr", "B": "ptr", "C": "ptr", "M": 2, "N": 4, "K": 8}
MMVQ = {"y": "ptr", "out": "ptr", "K": 256, "N": 4, "M": 2}
# launcher -> (module, kernel, its arguments, each valid, "ptr" for a pointer)
CALLS = {
    ops.dense_gemv: (
        "gemv",
        "dense_gemv_bf16",
        {"input": "ptr", "weight": "ptr", "output": "ptr", "n": 4, "k": 8},
    ),
    ops.dense_gemm: (
        "gemm",
        "dense_gemm_bf16",
        {"input": "ptr", "weight": "ptr", "output": "ptr", "m": 2, "n": 4, "k": 8},
    ),
    ops.dequant_q2_k_to_bf16: (
        "dequant_gguf_bf16",
        "dequant_q2_k_to_bf16",
        {"raw": "ptr", "out": "ptr", "n_blocks": 2, "row_bytes": 84},
    ),
    ops.engram_v41_wkv_q2k_gemv: (
        "engram_v41",
        "engram_v41_wkv_q2k_gemv",
        {"A": "ptr", "B": "ptr", "C": "ptr", "N": 4, "K": 256},
    ),
    ops.engram_v41_wkv_q2k_gemv_gather: (
        "engram_v41",
        "engram_v41_wkv_q2k_gemv_gather",
        {
            **{"ids": "ptr", "table": "ptr", "B": "ptr", "C": "ptr", "N": 4, "K": 256},
            **{"table_rows": 40, "flag": "ptr"},
        },
    ),
    ops.engram_v41_gate: (
        "engram_v41",
        "engram_v41_gate",
        {"streams": "ptr", "kv": "ptr", "qk": "ptr", "dim": 32, "hc": 4, "eps": 1e-6, "tokens": 2},
    ),
    ops.engram_v41_rows_gather: (
        "engram_v41",
        "engram_v41_rows_gather",
        {"ids": "ptr", "table": "ptr", "out": "ptr", "n_rows": 4, "table_rows": 40, "flag": "ptr"},
    ),
    ops.engram_v41_hash: (
        "engram_v41",
        "engram_v41_hash",
        {
            **{"compressed": "ptr", "out": "ptr", "tokens": 2, "start": 1, "multipliers": "ptr", "primes": "ptr"},
            **{"offsets": "ptr", "sites": 2, "ngram": 3, "heads": 2, "pad": 0},
        },
    ),
    ops.kquant_q8_1_rows_bf16: (
        "kquant_moe",
        "kquant_q8_1_rows_bf16",
        {"x": "ptr", "y": "ptr", "K": 64, "M": 1},
    ),
    ops.kquant_swiglu_q8_1_rows_bf16: (
        "kquant_moe",
        "kquant_swiglu_q8_1_rows_bf16",
        {"gate": "ptr", "up": "ptr", "w": 0, "h": "ptr", "y": "ptr", "rows": 1, "inter": 64, "limit": 1.0},
    ),
    ops.kquant_mmvq_w: ("kquant_moe", "kquant_mmvq_q3_k_w", {"w": "ptr", **MMVQ}),
    ops.kquant_mmvq_experts_w: (
        "kquant_moe",
        "kquant_mmvq_q2_k_experts_w",
        {"tables": "ptr", **MMVQ, "y_stride_bytes": 0, "experts": 2, "warps": 4},
    ),
    ops.moe_v41_swiglu: (
        "moe_v41",
        "moe_v41_swiglu",
        {"gate": "ptr", "up": "ptr", "w": None, "h": "ptr", "rows": 1, "inter": 8, "limit": 0.0},
    ),
    ops.moe_v41_accumulate: ("moe_v41", "moe_v41_accumulate", {"acc": "ptr", "src": "ptr", "n": 8}),
    ops.moe_v41_finish: ("moe_v41", "moe_v41_finish", {"acc": "ptr", "out": "ptr", "n": 8}),
    ops.moe_v41_sum_rows: (
        "moe_v41",
        "moe_v41_sum_rows",
        {"acc": "ptr", "src": "ptr", "n_rows": 2, "dim": 8},
    ),
    ops.moe_v41_router_gemv_f32out: ("moe_v41", "moe_v41_router_gemv_f32out", ROUTER),
    ops.moe_v41_router_gemv_f32out_products: ("moe_v41", "moe_v41_router_gemv_f32out_products", ROUTER),
    ops.moe_v41_route_select: ("moe_v41", "moe_v41_route_select", ROUTE),
    ops.moe_v41_slot_table_set: (
        "moe_v41",
        "moe_v41_slot_table_set",
        {"table": "ptr", "n_routed": 8, "triples": "ptr", "n": 2},
    ),
    **calls_grouped.CALLS,
    **calls_gdn.CALLS,
}
# The launchers of several kernels.
KERNELS = {
    ops.dense_gemm: ["dense_gemm_bf16", "dense_gemm_bf16_tc_f32out", "dense_gemm_bf16_f32out"],
    ops.kquant_mmvq_w: [f"kquant_mmvq_{kind}_w" for kind in ("q2_k", "q3_k", "q6_k")],
    ops.kquant_mmvq_experts_w: [
        f"kquant_mmvq_{kind}_experts_w{warps}" for kind in ("q2_k", "q3_k") for warps in ("2", "", "8")
    ],
    **calls_grouped.KERNELS,
    **calls_gdn.KERNELS,
}
OF_256 = "a positive multiple of 256"
OF_32 = "a positive multiple of 32"
# launcher -> (argument, value, what is allowed instead)
SIZES = {
    ops.dense_gemv: [("n", 0, AT_LEAST_1), ("k", 0, AT_LEAST_1)],
    ops.dense_gemm: [("m", 0, AT_LEAST_1), ("n", 0, AT_LEAST_1), ("k", 0, AT_LEAST_1)],
    ops.dequant_q2_k_to_bf16: [
        ("n_blocks", 0, AT_LEAST_1),
        *[("row_bytes", n, "84 or more, a multiple of 4") for n in (0, 80, 86)],
    ],
    ops.engram_v41_wkv_q2k_gemv: [("N", 0, AT_LEAST_1), *[("K", k, OF_256) for k in (0, 128, 300)]],
    ops.engram_v41_wkv_q2k_gemv_gather: [
        *[("N", 0, AT_LEAST_1), ("table_rows", 0, AT_LEAST_1)],
        *[("K", k, OF_256) for k in (0, 128, 300)],
    ],
    ops.engram_v41_gate: [
        *[("dim", 0, AT_LEAST_1), ("tokens", 0, AT_LEAST_1)],
        *[("hc", n, "1 to 4") for n in (0, 5)],
        *[("eps", value, "0 or more") for value in (-1.0, float("nan"))],
    ],
    ops.engram_v41_rows_gather: [("n_rows", 0, AT_LEAST_1), ("table_rows", 0, AT_LEAST_1)],
    ops.engram_v41_hash: [
        *[("tokens", 0, AT_LEAST_1), ("heads", 0, AT_LEAST_1)],
        *[("sites", n, "1 to 65535") for n in (0, 65_536)],
        *[("ngram", n, "2 to 64") for n in (0, 1, 65)],
    ],
    ops.kquant_q8_1_rows_bf16: [*[("K", k, OF_32) for k in (0, 16, 33)], ("M", 0, AT_LEAST_1)],
    ops.kquant_swiglu_q8_1_rows_bf16: [*[("inter", k, OF_32) for k in (0, 16, 33)], ("rows", 0, AT_LEAST_1)],
    ops.kquant_mmvq_w: [
        *[("K", k, OF_256) for k in (0, 32, 128, 300)],
        *[("M", m, "1 to 8") for m in (0, 9)],
        ("N", 0, AT_LEAST_1),
    ],
    ops.kquant_mmvq_experts_w: [
        *[("K", k, OF_256) for k in (0, 32, 128, 300)],
        *[("M", m, "1 to 8") for m in (0, 9)],
        *[("N", 0, AT_LEAST_1), ("experts", 0, AT_LEAST_1)],
        *[("warps", warps, "2, 4 or 8") for warps in (0, 1, 3, 16)],
        *[("warps", warps, "the warps of kernel kquant_mmvq_q2_k_experts_w") for warps in (2, 8)],
        *[("y_stride_bytes", stride, "a multiple of 4") for stride in (2, 73)],
    ],
    ops.moe_v41_swiglu: [("rows", 0, AT_LEAST_1), ("inter", 0, AT_LEAST_1)],
    ops.moe_v41_accumulate: [("n", 0, AT_LEAST_1)],
    ops.moe_v41_finish: [("n", 0, AT_LEAST_1)],
    ops.moe_v41_sum_rows: [("n_rows", 0, AT_LEAST_1), ("dim", 0, AT_LEAST_1)],
    **{
        router: [*[("M", m, "1 to 8") for m in (0, 9)], ("N", 0, AT_LEAST_1), ("K", 0, AT_LEAST_1)]
        for router in (ops.moe_v41_router_gemv_f32out, ops.moe_v41_router_gemv_f32out_products)
    },
    ops.moe_v41_route_select: [
        *[("n_routed", n, "1 to 1024") for n in (0, 1025)],
        *[("topk", k, "1 to 8") for k in (0, 9)],
        *[("gate_temp", t, "more than 0") for t in (0.0, -1.0, float("nan"))],
    ],
    ops.moe_v41_slot_table_set: [*[("n_routed", n, "1 to 1024") for n in (0, 1025)], ("n", 0, AT_LEAST_1)],
    **calls_grouped.SIZES,
    **calls_gdn.SIZES,
}


@pytest.fixture
def call(device):
    """`call(launcher, **changed)`: a call that is valid but for what is changed. No byte may be written."""
    pattern = np.full(20 << 12, 0x3F, np.uint8)
    with device.upload(pattern) as arena:

        def launch(launcher, kernel=None, **changed):
            module, name, valid = CALLS[launcher]
            addresses = iter(range(arena.ptr, arena.ptr + arena.nbytes, 1 << 12))
            values = {name: next(addresses) if value == "ptr" else value for name, value in valid.items()}
            launcher(device, device.kernel(*(kernel or (module, name))), stream=None, **values | changed)

        yield launch
        assert (arena.numpy() == pattern).all()


def named(launchers_and_more):
    return [pytest.param(*row, id="-".join([row[0].__name__, *map(str, row[1:3])])) for row in launchers_and_more]


def arguments(names):
    """`(launcher, name)` of the arguments of these names. `rows` is a number of some and a pointer of others."""
    return [
        (launcher, name)
        for launcher, (_, _, args) in CALLS.items()
        for name, valid in args.items()
        if name in names and (name != "rows" or (names is NUMBERS) == isinstance(valid, int))
    ]


def test_every_launcher_is_here():
    assert {launcher.__name__ for launcher in CALLS} == set(ops.__all__) == {launcher.__name__ for launcher in SIZES}


def test_every_argument_is_of_a_kind():
    kinds = POINTERS | WIDE | FLOATS | NUMBERS | FLAGS
    assert {name for _, _, args in CALLS.values() for name in args} == kinds


@pytest.mark.parametrize(
    ("launcher", "name"), named(row for row in arguments(POINTERS) if CALLS[row[0]][2][row[1]] == "ptr")
)
@pytest.mark.parametrize("null", [None, 0])
def test_null_pointers(call, launcher, name, null):
    with pytest.raises(ArgumentError, match=f"^{name}: got None, allowed: {POINTER}$"):
        call(launcher, **{name: null})


@pytest.mark.parametrize(
    ("launcher", "name", "value", "allowed"), named((at, *row) for at, rows in SIZES.items() for row in rows)
)
def test_sizes(call, launcher, name, value, allowed):
    with pytest.raises(ArgumentError, match=f"^{name}: got {value!r}, allowed: {allowed}$"):
        call(launcher, **{name: value})


def test_topk_beyond_32(call):
    with pytest.raises(ArgumentError, match=r"^topk: got 33, allowed: 1 to 32$"):
        call(ops.moe_v41_route_select, n_routed=1024, topk=33)


@pytest.mark.parametrize("launcher", calls_gdn.SEPARATE.values())
def test_tables_of_more_than_32_sequences(call, launcher):
    with pytest.raises(ArgumentError, match=r"^batch_size: got 33, allowed: 1 to 32$"):
        call(launcher, batch_size=33, state_is_table=True)


@pytest.mark.parametrize(("launcher", "module", "name"), calls_gdn.TABLE_KERNELS)
def test_kernels_with_tables_of_more_than_32_sequences(call, launcher, module, name):
    with pytest.raises(ArgumentError, match=r"^batch_size: got 33, allowed: 1 to 32$"):
        call(launcher, kernel=(module, name), batch_size=33)


@pytest.mark.parametrize("launcher", [ops.gated_delta_rule_verify, ops.gated_delta_rule_commit])
@pytest.mark.parametrize(("given", "got"), [({"a_log": 4096}, None), ({"dt_bias": 4096}, 4096)])
def test_one_parameter_of_raw_gates_without_the_other(call, launcher, given, got):
    with pytest.raises(
        ArgumentError, match=f"^dt_bias: got {got}, allowed: a device pointer with a_log, and null without$"
    ):
        call(launcher, **given)


@pytest.mark.parametrize(("launcher", "name"), named(arguments(NUMBERS)))
@pytest.mark.parametrize("value", [-1, 1 << 32, 1 << 64, 4.0, "4", None, True])
def test_numbers_that_are_not_u32(call, launcher, name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: got {value!r}, allowed: an integer, 0 to 4294967295$"):
        call(launcher, **{name: value})


@pytest.mark.parametrize(("launcher", "name"), named(arguments(WIDE)))
@pytest.mark.parametrize("value", [-1, 1 << 64, 4.0, "4", True])
def test_numbers_that_are_not_u64(call, launcher, name, value):
    with pytest.raises(ArgumentError, match=re.escape(f"{name}: got {value!r}, allowed: an integer, 0 to 2**64 - 1")):
        call(launcher, **{name: value})


@pytest.mark.parametrize(("launcher", "name"), named(arguments(FLOATS)))
@pytest.mark.parametrize("value", ["1.0", None])
def test_numbers_that_are_not_floats(call, launcher, name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: got {value!r}, allowed: a float$"):
        call(launcher, **{name: value})


@pytest.mark.parametrize(("launcher", "name"), named(arguments(FLOATS)))
def test_an_integer_beyond_every_float(call, launcher, name):
    with pytest.raises(ArgumentError, match=f"^{name}: got 10.*, allowed: a float$"):
        call(launcher, **{name: 10**400})


@pytest.mark.parametrize(("launcher", "name"), named(arguments(POINTERS)))
@pytest.mark.parametrize("value", [-1, 1 << 64, "0x1000", 1.0])
def test_what_is_no_pointer(call, launcher, name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: got {re.escape(repr(value))}, allowed: "):
        call(launcher, **{name: value})


@pytest.mark.parametrize(("launcher", "name"), named(arguments(POINTERS)))
def test_a_pointer_between_elements(call, launcher, name):
    with pytest.raises(
        ArgumentError, match=rf"^{name}: got 4097, allowed: a device pointer to a multiple of \d+ bytes$"
    ):
        call(launcher, **{name: 4097})


@pytest.mark.parametrize("launcher", CALLS)
def test_a_freed_buffer(call, device, launcher):
    buffer = device.buffer(64)
    buffer.free()
    pointer = next(name for name, value in CALLS[launcher][2].items() if value == "ptr")
    with pytest.raises(MetraleError, match="the DeviceBuffer has been freed"):
        call(launcher, **{pointer: buffer})


@pytest.mark.parametrize("launcher", CALLS)
def test_every_other_kernel_of_the_package(call, device, launcher):
    allowed = KERNELS.get(launcher, [CALLS[launcher][1]])
    message = f", allowed: {' or '.join(allowed)}$"
    for module, kernels in KERNEL_SIGNATURES.items():
        for name in kernels.keys() - set(allowed):
            with pytest.raises(ArgumentError, match=f"^kernel: got '{name}'{message}"):
                call(launcher, kernel=(module, name))


@pytest.mark.parametrize(
    ("launcher", "sizes"),
    [
        (ops.kquant_q8_1_rows_bf16, {"K": 1 << 31, "M": 1 << 31}),
        (ops.kquant_swiglu_q8_1_rows_bf16, {"inter": 1 << 31, "rows": 1 << 31}),
        (ops.kquant_mmvq_experts_w, {"experts": 65_536}),
        (ops.moe_v41_router_gemv_f32out_products, {"N": 1 << 31}),
        (ops.conv1d_update_chunk2, {"batch_size": 65_536}),
        (ops.dense_gemm, {"n": 65_536 * 128}),
        (ops.engram_v41_gate, {"tokens": 1 << 31}),
        (ops.gated_delta_rule_verify, {"batch_size": 65_536}),
    ],
)
def test_more_than_a_grid_holds(call, launcher, sizes):
    with pytest.raises(LaunchError, match=f"{CALLS[launcher][1]}: grid: got "):
        call(launcher, **sizes)


@pytest.mark.parametrize("launcher", [ops.engram_v41_wkv_q2k_gemv, ops.engram_v41_wkv_q2k_gemv_gather])
def test_more_than_shared_memory_holds(call, launcher):
    with pytest.raises(LaunchError, match=f"{CALLS[launcher][1]}: shared_mem: got 2140672 bytes"):
        call(launcher, K=1 << 20)
