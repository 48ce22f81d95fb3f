# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a sequence keeps from token to token: cached keys and values, latents, and recurrent states.

The form of a layer's state is told by its tensors, the sizes by keys of the file. What the file does not say is not
guessed, but noted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from metrale.plan.keys import Keys, MissingKey

__all__ = ["State", "model_state"]

CACHE_BYTES = 2
"""Of a cached value: f16 or bf16."""
STATE_BYTES = 4
"""Of a value of a recurrent state and its convolution window: f32."""

LATENT = "latent"
KEYS_VALUES = "keys and values"
INDEXER = "indexer keys"
DELTA_RULE = "gated delta rule"
STATE_SPACE = "state space"


class _Shape(NamedTuple):
    """One layer's state: a number of values for each token, or of a fixed size."""

    form: str
    keys: tuple[str, ...]
    values_a_token: int = 0
    tokens: int = 0
    tokens_read: int = 0
    fixed_values: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """The state of some layers of one form and size, and the keys that say so.

    Of ``values_a_token`` a layer holds those of ``tokens`` tokens, of which the next token reads ``tokens_read``; a
    recurrent state has ``fixed_values`` instead. ``nbytes`` is for all the layers and sequences, ``read_bytes`` what
    one token of one sequence reads.
    """

    form: str
    layers: tuple[int, ...]
    keys: tuple[str, ...]
    values_a_token: int
    tokens: int
    tokens_read: int
    fixed_values: int
    nbytes: int
    read_bytes: int


def model_state(
    keys: Keys, layers: Mapping[int, set[str]], context: int, seqs: int
) -> tuple[tuple[State, ...], tuple[str, ...]]:
    """The states of a model whose layers have tensors of these names, and notes on what is not counted."""
    shapes: dict[_Shape, list[int]] = {}
    problems: dict[str, list[int]] = {}
    for layer, names in sorted(layers.items()):
        try:
            for shape in _layer_shapes(keys, layer, names, context):
                shapes.setdefault(shape, []).append(layer)
        except MissingKey as missing:
            problems.setdefault(f"their state is not counted: the file has no key {missing.key!r}", []).append(layer)
        unknown = _unknown(names)
        if unknown:
            form = f"the state of {', '.join(unknown)} is not counted: its form is not known"
            problems.setdefault(form, []).append(layer)
    notes = [f"{_ranges(at)}: {problem}" for problem, at in problems.items()]
    notes += _window_notes(keys)
    if not shapes and not problems:
        notes.append("no layer has attention or a recurrent state: no cache is counted")
    return tuple(_state(shape, at, seqs) for shape, at in shapes.items()), tuple(notes)


def _state(shape: _Shape, layers: list[int], seqs: int) -> State:
    fixed = STATE_BYTES * shape.fixed_values
    a_token = CACHE_BYTES * shape.values_a_token
    held, read = fixed + a_token * shape.tokens, fixed + a_token * shape.tokens_read
    return State(
        form=shape.form,
        layers=tuple(layers),
        keys=shape.keys,
        values_a_token=shape.values_a_token,
        tokens=shape.tokens,
        tokens_read=shape.tokens_read,
        fixed_values=shape.fixed_values,
        nbytes=held * len(layers) * seqs,
        read_bytes=read * len(layers),
    )


def _layer_shapes(keys: Keys, layer: int, names: set[str], context: int) -> Iterator[_Shape]:
    recurrent = any(name.startswith("ssm_") for name in names)
    if recurrent:
        yield _recurrent(keys, names)
    if "attn_kv_a_mqa" in names:
        yield _latent(keys, names, context)
    elif "attn_k" in names or ("attn_qkv" in names and not recurrent):
        yield from _keys_values(keys, layer, context)
    if "indexer.attn_k" in names:
        width = keys.get("attention.indexer.key_length")
        yield _Shape(INDEXER, (keys.name("attention.indexer.key_length"),), width, context, context)


def _latent(keys: Keys, names: set[str], context: int) -> _Shape:
    used = ["attention.kv_lora_rank", "rope.dimension_count"]
    width = sum(keys.get(name) for name in used)
    read = context
    # With an indexer a token attends to the best top_k tokens only.
    if "indexer.attn_k" in names and "attention.indexer.top_k" in keys:
        used.append("attention.indexer.top_k")
        read = min(context, keys.get("attention.indexer.top_k"))
    return _Shape(LATENT, tuple(map(keys.name, used)), width, context, read)


def _keys_values(keys: Keys, layer: int, context: int) -> Iterator[_Shape]:
    blocks = keys.get("block_count")
    if layer >= blocks - keys.get("attention.shared_kv_layers", default=0):
        return  # it attends to what an earlier layer has cached
    used = ["attention.head_count_kv" if "attention.head_count_kv" in keys else "attention.head_count"]
    heads = keys.get(used[0], layer)
    if heads == 0:
        return
    tokens = context
    windowed = keys.flags("attention.sliding_window_pattern")
    in_window = False
    if windowed is not None and layer < len(windowed) and "attention.sliding_window" in keys:
        used += ["attention.sliding_window_pattern", "attention.sliding_window"]
        in_window = windowed[layer]
        tokens = min(context, keys.get("attention.sliding_window")) if in_window else context
    width = 0
    for name in ("attention.key_length", "attention.value_length"):
        if in_window and f"{name}_swa" in keys:
            name = f"{name}_swa"
        if name in keys:
            width += keys.get(name)
            used.append(name)
        else:  # GGUF's definition of a missing length
            width += keys.get("embedding_length") // max(keys.get("attention.head_count", layer), 1)
            used += ["embedding_length", "attention.head_count"]
    yield _Shape(KEYS_VALUES, tuple(map(keys.name, dict.fromkeys(used))), heads * width, tokens, tokens)


def _recurrent(keys: Keys, names: set[str]) -> _Shape:
    """The state ``[inner_size][state_size]``, and the inputs that the convolution looks back on."""
    delta_rule = bool(names & {"ssm_ba", "ssm_beta", "ssm_alpha"})
    used = ["ssm.inner_size", "ssm.state_size", "ssm.conv_kernel"]
    inner, state, width = (keys.get(name) for name in used)
    groups = keys.get("ssm.group_count", default=None if delta_rule else 0)
    if "ssm.group_count" in keys:
        used.append("ssm.group_count")
    channels = inner + 2 * groups * state
    form = DELTA_RULE if delta_rule else STATE_SPACE
    return _Shape(form, tuple(map(keys.name, used)), fixed_values=inner * state + channels * width)


def _unknown(names: set[str]) -> list[str]:
    """Tensors that tell of a state of no form above."""
    known = {"attn_k", "attn_qkv", "attn_kv_a_mqa"}
    attention = sorted(name for name in names if name.startswith("attn_") and "norm" not in name)
    if names & known or any(name.startswith("ssm_") for name in names):
        attention = []
    prefixes = ("time_mix_", "channel_mix_", "shortconv.")
    return attention + [f"{prefix}*" for prefix in prefixes if any(name.startswith(prefix) for name in names)]


def _window_notes(keys: Keys) -> Iterator[str]:
    name, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    if name in keys and keys.get(name) and keys.flags(pattern) is None:
        yield (
            f"key {keys.name(name)!r} is {keys.get(name)}, but {keys.name(pattern)!r} does not list the layers that it "
            "is for: the whole context is counted for all"
        )


def _ranges(layers: list[int]) -> str:
    """``layers 0-3, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"
