# SPDX-License-Identifier: MIT OR Apache-2.0
"""The launchers of the gated delta rule and the convolution, for the tests of what launchers refuse."""

from metrale import ops

AT_LEAST_1 = "1 or more"
ONE_SEQUENCE = "1 for states without a table; for more stage pointer tables"

SIZES_OF_A_CALL = {
    **{"batch_size": 1, "num_k_heads": 2, "num_v_heads": 4, "k_dim": 8, "v_dim": 5},
    **{"qk_stride": 16, "v_stride": 20, "gb_stride": 4},
}
GDN = dict.fromkeys(("query", "key", "value", "gate", "beta", "output"), "ptr")
RAW = {"a_log": None, "dt_bias": None, "unit_rows": False}
CONV = {
    **{"conv_state": "ptr", "input": "ptr", "weight": "ptr", "output": "ptr", "conv_state_intermediate": "ptr"},
    **{"d_inner": 8, "d_conv": 4, "batch_size": 1, "bias": 0},
}
CONV_DEFERRED = {"conv_state": "ptr", "input": "ptr", "tokens": 3, "d_inner": 8, "d_conv": 4, "batch_size": 1}
SEPARATE = {2: ops.gdn_decode_wy2, 3: ops.gdn_decode_wy3, 4: ops.gdn_decode_wy4}


def wy(tokens):
    module = f"gated_delta_rule_wy{'' if tokens == 2 else tokens}"
    inters = {f"h_state_inter{i}": "ptr" for i in range(tokens - 1)}
    arguments = {"h_state": "ptr", **GDN, **inters, **SIZES_OF_A_CALL, "state_is_table": False}
    return module, f"gated_delta_rule_wy{tokens}", arguments


# launcher -> (module, kernel, its arguments, each valid, "ptr" for a pointer)
CALLS = {
    ops.conv1d_update_chunk2: ("causal_conv1d", "causal_conv1d_update_chunk2", CONV),
    ops.conv1d_update_chunkn: ("causal_conv1d", "causal_conv1d_update_chunk3", CONV),
    ops.conv1d_verify: (
        "causal_conv1d",
        "causal_conv1d_verify",
        {**CONV_DEFERRED, "weight": "ptr", "output": "ptr", "bias": 0},
    ),
    ops.conv1d_commit: ("causal_conv1d", "causal_conv1d_commit", {**CONV_DEFERRED, "accepted": "ptr"}),
    **{launcher: wy(tokens) for tokens, launcher in SEPARATE.items()},
    ops.gdn_decode_wyn: (
        "gated_delta_rule_wyn",
        "gated_delta_rule_wy5",
        {"h_state": "ptr", **GDN, "h_state_inter_base": "ptr", "inter_stride_floats": 160, **SIZES_OF_A_CALL},
    ),
    ops.gdn_decode_wyn_table: (
        "gated_delta_rule_wyn",
        "gated_delta_rule_wy5_table",
        {"h_tables": "ptr", **GDN, "hi_tables": "ptr", "slab_entry_stride": 32, **SIZES_OF_A_CALL},
    ),
    ops.gated_delta_rule_verify: (
        "gated_delta_rule_verify",
        "gated_delta_rule_verify3",
        {"H": "ptr", **GDN, "corrections": "ptr", **SIZES_OF_A_CALL, **RAW},
    ),
    ops.gated_delta_rule_commit: (
        "gated_delta_rule_verify",
        "gated_delta_rule_commit",
        {
            **{"H": "ptr", "key": "ptr", "gate": "ptr", "corrections": "ptr", "accepted": "ptr", "tokens": 3},
            **SIZES_OF_A_CALL,
            **RAW,
        },
    ),
}


def deferred(name):
    return [f"gated_delta_rule_{name}{table}{f16}" for table in ("", "_table") for f16 in ("", "_f16")]


def many(tail):
    names = [f"gated_delta_rule_wy{'n' if tokens < 5 else ''}{tokens}" for tokens in range(2, 18)]
    return [f"{name}{f16}{tail}" for name in names for f16 in ("", "_f16")]


# The launchers of several kernels.
KERNELS = {
    **{
        launcher: [f"gated_delta_rule_wy{tokens}", f"gated_delta_rule_wy{tokens}_f16"]
        for tokens, launcher in SEPARATE.items()
    },
    ops.gdn_decode_wyn: many(""),
    ops.gdn_decode_wyn_table: many("_table"),
    ops.gated_delta_rule_verify: [name for tokens in range(2, 18) for name in deferred(f"verify{tokens}")],
    ops.gated_delta_rule_commit: deferred("commit"),
    ops.conv1d_update_chunkn: [
        f"causal_conv1d_update_chunk{tokens}{table}" for tokens in range(1, 18) for table in ("", "_table")
    ],
    ops.conv1d_verify: ["causal_conv1d_verify", "causal_conv1d_verify_table"],
    ops.conv1d_commit: ["causal_conv1d_commit", "causal_conv1d_commit_table"],
}
TABLE_KERNELS = [
    (ops.conv1d_update_chunkn, "causal_conv1d", "causal_conv1d_update_chunk3_table"),
    (ops.conv1d_verify, "causal_conv1d", "causal_conv1d_verify_table"),
    (ops.conv1d_commit, "causal_conv1d", "causal_conv1d_commit_table"),
    (ops.gdn_decode_wyn_table, "gated_delta_rule_wyn", "gated_delta_rule_wy17_f16_table"),
    (ops.gated_delta_rule_verify, "gated_delta_rule_verify", "gated_delta_rule_verify2_table"),
    (ops.gated_delta_rule_commit, "gated_delta_rule_verify", "gated_delta_rule_commit_table_f16"),
]

OF_GDN = [
    *[("k_dim", dim, "a multiple of 4, 4 to 128") for dim in (0, 2, 6, 132)],
    *[("v_dim", dim, "1 to 128") for dim in (0, 129)],
    *[("num_v_heads", heads, "a positive multiple of 2") for heads in (0, 1, 3)],
    *[(name, 0, AT_LEAST_1) for name in ("num_k_heads", "batch_size", "qk_stride", "v_stride", "gb_stride")],
]
OF_CONV = [
    *[("d_inner", 0, AT_LEAST_1), ("batch_size", 0, AT_LEAST_1)],
    *[("d_conv", width, "4") for width in (0, 3, 5)],
]
OF_TOKENS = [("tokens", n, "1 to 17") for n in (0, 18)]

# launcher -> (argument, value, what is allowed instead)
SIZES = {
    ops.conv1d_update_chunk2: OF_CONV,
    ops.conv1d_update_chunkn: OF_CONV,
    ops.conv1d_verify: [*OF_CONV, *OF_TOKENS],
    ops.conv1d_commit: [*OF_CONV, *OF_TOKENS],
    **{launcher: [*OF_GDN, *[("batch_size", n, ONE_SEQUENCE) for n in (2, 32)]] for launcher in SEPARATE.values()},
    ops.gdn_decode_wyn: [*OF_GDN, ("batch_size", 2, ONE_SEQUENCE), ("inter_stride_floats", 0, AT_LEAST_1)],
    ops.gdn_decode_wyn_table: [
        *[*OF_GDN, ("batch_size", 33, "1 to 32")],
        *[("slab_entry_stride", n, "32") for n in (0, 31, 33)],
    ],
    ops.gated_delta_rule_verify: OF_GDN,
    ops.gated_delta_rule_commit: [*OF_GDN, *OF_TOKENS],
}
