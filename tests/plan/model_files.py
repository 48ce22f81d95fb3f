# SPDX-License-Identifier: MIT OR Apache-2.0
"""Model files of any size with the gguf package's writer: headers, and sparse data behind them."""

from math import prod

import gguf
import numpy as np


def nbytes(kind, shape):
    """Bytes of a tensor by the gguf package's table."""
    values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return prod(shape) // values * block_bytes


def write_model(folder, architecture, keys, tensors, parts=1):
    """Write `tensors` (`{name: (type, row-major shape)}`) and the keys, those of the architecture without its name;
    returns the first of the `parts`."""
    names = list(tensors)
    each = -(-len(names) // parts)
    paths = []
    for number in range(parts):
        split = f"-{number + 1:05}-of-{parts:05}" if parts > 1 else ""
        path = folder / f"{architecture}{split}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
        if number == 0:
            for name, value in keys.items():
                add_key(writer, name if name.startswith("tokenizer.") else f"{architecture}.{name}", value)
        size = 0
        for name in names[number * each : (number + 1) * each]:
            kind, shape = tensors[name]
            type_id, length = gguf.GGMLQuantizationType[kind], nbytes(kind, shape)
            row = length // prod(shape[:-1])
            writer.add_tensor_info(name, [*shape[:-1], row], np.dtype(np.uint8), length, raw_dtype=type_id)
            size += -(-length // 32) * 32
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with path.open("r+b") as file:
            file.truncate(-(-file.seek(0, 2) // 32) * 32 + size)
        paths.append(path)
    return paths[0]


def add_key(writer, name, value):
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def moe_tensors(layer, dim, inter, experts):
    """A DeepSeek-V4.1 MoE layer."""
    block = f"blk.{layer}"
    return {
        f"{block}.ffn_gate_inp.weight": ("BF16", (experts, dim)),
        f"{block}.exp_probs_b.bias": ("F32", (experts,)),
        f"{block}.ffn_gate_exps.weight": ("Q2_K", (experts, inter, dim)),
        f"{block}.ffn_up_exps.weight": ("Q2_K", (experts, inter, dim)),
        f"{block}.ffn_down_exps.weight": ("Q3_K", (experts, dim, inter)),
        f"{block}.ffn_gate_shexp.weight": ("Q2_K", (inter, dim)),
        f"{block}.ffn_up_shexp.weight": ("Q2_K", (inter, dim)),
        f"{block}.ffn_down_shexp.weight": ("Q3_K", (dim, inter)),
    }


ENGRAM_ROWS = {1: 384_006_168, 14: 384_016_682}
VOCABULARY = 129_280


def v41_flash(folder, layers=40, parts=6):
    """The parts that are known of DeepSeek-V4.1-Flash, at their real sizes: 261 GB."""
    tensors = {"token_embd.weight": ("Q6_K", (VOCABULARY, 5120)), "output.weight": ("Q6_K", (VOCABULARY, 5120))}
    for layer in range(layers):
        tensors |= moe_tensors(layer, 5120, 2304, 384)
        if layer in ENGRAM_ROWS:
            tensors[f"blk.{layer}.engram_embd.weight"] = ("Q2_K", (ENGRAM_ROWS[layer], 256))
            tensors[f"blk.{layer}.engram_wkv.weight"] = ("Q2_K", (25_600, 6144))
    keys = {
        "block_count": layers,
        "embedding_length": 5120,
        "expert_count": 384,
        "expert_used_count": 6,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 2304,
        "expert_shared_feed_forward_length": 2304,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_scoring_func": "sqrtsoftplus",
        "swiglu_clamp_exp": [10.0] * layers,
        "swiglu_clamp_shexp": [10.0] * layers,
        "engram.max_ngram_size": 4,
        "engram.head_count": 8,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(VOCABULARY)],
        "tokenizer.ggml.token_type": [1] * VOCABULARY,
    }
    return write_model(folder, "deepseek41", keys, tensors, parts)
