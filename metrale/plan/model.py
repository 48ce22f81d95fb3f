# SPDX-License-Identifier: MIT OR Apache-2.0
"""`model_plan`: what a model takes of a GPU's memory, and the bytes that a token has to read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metrale.errors import ArgumentError, FormatError, malformed, refuse
from metrale.formats.gguf import GgufFile, Tensor
from metrale.plan import kinds
from metrale.plan.keys import Keys, MissingKey
from metrale.plan.kinds import Amount, Contents
from metrale.plan.state import State, model_state

__all__ = ["H200_COPY_BANDWIDTH", "Buffer", "Experts", "Fit", "ModelPlan", "Read", "Table", "Workspace", "model_plan"]

H200_COPY_BANDWIDTH = 4.24e12
"""Bytes a second, read and written, of a device-to-device copy on an H200, measured."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of all layers. A slot holds any of them, so it has the size of the largest."""

    layers: int
    experts_a_layer: int
    used_a_token: int
    total: int
    slot_bytes: int
    smallest_bytes: int
    token_slots_bytes: int
    """Of the slots that one token's experts of a layer take: the fewest that a step can run with."""


@dataclass(frozen=True, slots=True)
class Table:
    """An engram table: a token reads ``rows_a_token`` of its ``rows``."""

    layer: int
    rows: int
    row_bytes: int
    nbytes: int
    rows_a_token: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a workspace and the formula of its size."""

    name: str
    formula: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """The buffers of a model part, one set for all its layers."""

    part: str
    shape: dict[str, int]
    buffers: tuple[Buffer, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The expert slots that fit beside all that must be resident and beside the engram tables of ``engram_layers``."""

    engram_layers: tuple[int, ...]
    engram_bytes: int
    slots: int
    slots_a_layer: float | None
    share_of_experts: float | None
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes that a decoded token reads of one thing."""

    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything that ``metrale plan`` says."""

    path: str
    architecture: str
    blocks: int | None
    total: Amount
    kinds: dict[str, Amount]
    types: dict[str, Amount]
    other_names: tuple[str, ...]
    streamed_kinds: tuple[str, ...]
    resident_bytes: int
    streamed_bytes: int
    experts: Experts | None
    tables: tuple[Table, ...]
    context: int
    seqs: int
    states: tuple[State, ...]
    state_bytes: int
    workspace: Workspace | None
    all_resident_bytes: int
    """Everything: weights, every expert in a slot, all tables, states, workspace."""
    least_bytes: int
    """What must be resident, states, workspace, and slots for the experts of one token."""
    gpu_memory: int | None
    fits: tuple[Fit, ...]
    """With no engram table resident, with one, ... as far as they fit; none without ``gpu_memory``."""
    reads: tuple[Read, ...]
    token_bytes: int
    bandwidth: float
    token_seconds: float
    notes: tuple[str, ...]
    """What the file does not say, and what is therefore not counted."""


def model_plan(
    gguf: GgufFile,
    *,
    gpu_memory: int | None = None,
    context: int = 4096,
    seqs: int = 1,
    bandwidth: float = H200_COPY_BANDWIDTH,
) -> ModelPlan:
    """Plan the model of an open file for ``gpu_memory`` bytes, ``seqs`` sequences of ``context`` tokens each, and
    ``bandwidth`` bytes a second.

    Refuses a ``gpu_memory`` that is too small for the least that has to be there, and says by how much. A key that
    contradicts the tensors is a ``FormatError``. Only the header is read.
    """
    for name, value in (("context", context), ("seqs", seqs)):
        if value < 1:
            refuse(name, value, "1 or more")
    if not 0 < bandwidth < math.inf:
        refuse("bandwidth", bandwidth, "more than 0 bytes a second")
    keys = Keys(gguf)
    blocks = keys.get("block_count") if "block_count" in keys else None
    drafts = keys.get("nextn_predict_layers", default=0)
    found = kinds.contents(gguf, range(blocks - drafts, blocks) if blocks is not None and drafts else ())
    experts, tables = _experts(gguf, keys, found), _tables(keys, found)
    states, notes = model_state(keys, found.layers, context, seqs)
    workspace, why_not = _workspace(gguf, keys, found, seqs)

    resident = found.total.nbytes - found.nbytes(*kinds.STREAMED)
    state_bytes = sum(state.nbytes for state in states)
    fixed = resident + state_bytes + (workspace.nbytes if workspace else 0)
    least = fixed + (experts.token_slots_bytes if experts else 0)
    if gpu_memory is not None and gpu_memory < least:
        parts = f"weights {resident:,}, state {state_bytes:,}, workspace {workspace.nbytes if workspace else 0:,}"
        parts += f", slots for the experts of a token {least - fixed:,}"
        needed = f"{least:,} bytes or more ({least / GIB:.3f} GiB: {parts}); {least - gpu_memory:,} are missing"
        refuse("gpu_memory", gpu_memory, needed)
    reads = _reads(keys, found, experts, tables, states)
    token_bytes = sum(read.nbytes for read in reads)
    return ModelPlan(
        path=gguf.path,
        architecture=keys.architecture,
        blocks=blocks,
        total=found.total,
        kinds=found.kinds,
        types=found.types,
        other_names=tuple(tensor.name for tensor in found.by_kind[kinds.OTHER]),
        streamed_kinds=tuple(kind for kind in found.kinds if kind in kinds.STREAMED),
        resident_bytes=resident,
        streamed_bytes=found.total.nbytes - resident,
        experts=experts,
        tables=tables,
        context=context,
        seqs=seqs,
        states=states,
        state_bytes=state_bytes,
        workspace=workspace,
        all_resident_bytes=fixed
        + sum(table.nbytes for table in tables)
        + (experts.total * experts.slot_bytes if experts else 0),
        least_bytes=least,
        gpu_memory=gpu_memory,
        fits=() if gpu_memory is None else _fits(gpu_memory - fixed, experts, tables),
        reads=reads,
        token_bytes=token_bytes,
        bandwidth=bandwidth,
        token_seconds=token_bytes / bandwidth,
        notes=(*_beyond(keys, context), *notes, *why_not),
    )


def _experts(gguf: GgufFile, keys: Keys, found: Contents) -> Experts | None:
    tensors = found.by_kind[kinds.ROUTED]
    if not tensors:
        return None
    try:
        count, used = keys.get("expert_count"), keys.get("expert_used_count")
    except MissingKey as missing:
        malformed(gguf.path, f"key {missing.key!r}", "none in the file", "it, as the file has routed experts")
    if not 1 <= used <= count:
        malformed(gguf.path, f"key {keys.name('expert_used_count')!r}", used, f"1 to the {count} experts")
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != count:
            needed = f"{count} experts, by key {keys.name('expert_count')!r}"
            malformed(tensor.path, f"tensor {tensor.name!r}", f"shape {list(tensor.shape)}", needed)
        layer = kinds.layer_of(tensor.name) or 0
        sizes[layer] = sizes.get(layer, 0) + tensor.slice_nbytes
    largest, smallest = max(sizes.values()), min(sizes.values())
    return Experts(len(sizes), count, used, len(sizes) * count, largest, smallest, used * largest)


def _tables(keys: Keys, found: Contents) -> tuple[Table, ...]:
    """Smallest first: the order in which they are made resident."""
    tables = [_table(keys, tensor) for tensor in found.by_kind[kinds.ENGRAM_TABLES]]
    return tuple(sorted(tables, key=lambda table: (table.nbytes, table.layer)))


def _table(keys: Keys, tensor: Tensor) -> Table:
    names = ("engram.max_ngram_size", "engram.head_count")
    try:
        ngram, heads = (keys.get(name) for name in names)
    except MissingKey as missing:
        malformed(tensor.path, f"key {missing.key!r}", "none in the file", "it, as the file has engram tables")
    if ngram < 1:
        malformed(tensor.path, f"key {keys.name(names[0])!r}", ngram, "1 or more")
    return Table(
        layer=kinds.layer_of(tensor.name) or 0,
        rows=tensor.shape[0] if tensor.shape else 1,
        row_bytes=tensor.slice_nbytes,
        nbytes=tensor.nbytes,
        rows_a_token=(ngram - 1) * heads,
    )


def _fits(left: int, experts: Experts | None, tables: Sequence[Table]) -> tuple[Fit, ...]:
    fits = []
    for count in range(len(tables) + 1):
        chosen = tables[:count]
        nbytes = sum(table.nbytes for table in chosen)
        rest = left - nbytes
        if rest < (experts.token_slots_bytes if experts else 0):
            break
        slots = min(rest // experts.slot_bytes, experts.total) if experts else 0
        fits.append(
            Fit(
                engram_layers=tuple(sorted(table.layer for table in chosen)),
                engram_bytes=nbytes,
                slots=slots,
                slots_a_layer=slots / experts.layers if experts else None,
                share_of_experts=slots / experts.total if experts else None,
                unused_bytes=rest - (slots * experts.slot_bytes if experts else 0),
            )
        )
    return tuple(fits)


def _reads(
    keys: Keys, found: Contents, experts: Experts | None, tables: Sequence[Table], states: Sequence[State]
) -> tuple[Read, ...]:
    """What one token of one sequence reads, each byte once."""
    apart = (kinds.SHARED, kinds.EMBEDDING, kinds.DRAFT, kinds.ENCODERS, *kinds.STREAMED)
    dense = found.nbytes(*(kind for kind in found.kinds if kind not in apart))
    rows = whole = 0
    for tensor in found.by_kind[kinds.EMBEDDING]:
        if tensor.name == "token_embd.weight" and not found.by_kind[kinds.OUTPUT]:
            whole += tensor.nbytes
        else:
            rows += tensor.slice_nbytes
    reads = [Read("dense weights", dense)]
    if rows:
        reads.append(Read("embedding rows", rows))
    if whole:
        reads.append(Read("embedding as output", whole))
    if experts:
        routed = found.nbytes(kinds.ROUTED) // experts.experts_a_layer * experts.used_a_token
        reads.append(Read(f"routed experts, {experts.used_a_token} a layer", routed))
    if kinds.SHARED in found.kinds:
        reads.append(Read("shared expert", found.nbytes(kinds.SHARED)))
    if tables:
        reads.append(Read("engram rows", sum(table.rows_a_token * table.row_bytes for table in tables)))
    reads += [Read(f"state: {state.form}", state.read_bytes) for state in states]
    return tuple(reads)


def _workspace(gguf: GgufFile, keys: Keys, found: Contents, tokens: int) -> tuple[Workspace | None, tuple[str, ...]]:
    """The buffers of ``MoeV41`` for a step of so many tokens; else why there are none."""
    from metrale.formats.deepseek41 import ARCHITECTURE, moe_layer_spec

    if keys.architecture != ARCHITECTURE:
        needed = f"a workspace is counted for the architecture {ARCHITECTURE!r} only"
        return None, (f"architecture {keys.architecture!r}: {needed}",)
    layers = [layer for layer, names in found.layers.items() if "ffn_gate_exps" in names]
    if not layers:
        return None, ("no layer has routed experts: no workspace is counted",)
    from metrale.moe_v41.config import MoeV41Cfg

    try:
        spec = moe_layer_spec(gguf, min(layers))
        shape = {name: getattr(spec, name) for name in ("dim", "inter", "n_routed", "topk")}
        shape["max_tokens"] = tokens
        cfg = MoeV41Cfg(**shape)
    except (FormatError, ArgumentError) as error:
        return None, (f"no workspace is counted, as MoeV41 does not take layer {min(layers)}: {error}",)
    buffers = tuple(Buffer(*spec) for spec in cfg.buffer_table())
    return Workspace("MoeV41", shape, buffers, sum(buffer.nbytes for buffer in buffers)), ()


def _beyond(keys: Keys, context: int) -> tuple[str, ...]:
    longest = keys.get("context_length", default=0)
    if not 0 < longest < context:
        return ()
    return (f"a context of {context} is more than key {keys.name('context_length')!r} allows: {longest}",)
