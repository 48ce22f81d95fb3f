# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale plan``: what a model file takes of a GPU, as a table or as JSON."""

from dataclasses import asdict

from metrale.cli.json_text import print_json
from metrale.columns import aligned
from metrale.formats.gguf import GgufFile
from metrale.plan import H200_COPY_BANDWIDTH, ModelPlan, model_plan

__all__ = ["plan"]

GIB = 1 << 30
TERA = 10**12


def plan(
    model: str, gpu_memory: float | None, context: int, seqs: int, bandwidth: float | None, *, as_json: bool
) -> int:
    """Print the plan for ``gpu_memory`` GiB and ``bandwidth`` TB/s (None: the H200's)."""
    with GgufFile(model) as gguf:
        made = model_plan(
            gguf,
            gpu_memory=None if gpu_memory is None else int(gpu_memory * GIB),
            context=context,
            seqs=seqs,
            bandwidth=H200_COPY_BANDWIDTH if bandwidth is None else bandwidth * TERA,
        )
    if as_json:
        print_json(asdict(made))
        return 0
    sections = (_contents(made), _placement(made), _states(made), _workspace(made), _fits(made), _token(made))
    print("\n\n".join("\n".join(lines) for lines in (*sections, _notes(made)) if lines))
    return 0


def _contents(made: ModelPlan) -> list[str]:
    layers = "" if made.blocks is None else f", {made.blocks} layers"
    total = made.total
    lines = [f"{made.path}: {made.architecture}{layers}, {total.tensors:,} tensors, {_amount(total.nbytes)}"]
    for title, amounts in (("kind", made.kinds), ("type", made.types)):
        rows = [
            (
                name,
                f"{amount.tensors:,}",
                f"{amount.nbytes:,}",
                f"{100 * amount.nbytes / max(total.nbytes, 1):.1f}%",
                "  may be streamed" if name in made.streamed_kinds else "",
            )
            for name, amount in amounts.items()
        ]
        lines += ["", *aligned([(title, "tensors", "bytes", "share", ""), *rows], left=(0, 4))]
    if made.other_names:
        lines += ["", f"other: {', '.join(made.other_names)}"]
    return lines


def _placement(made: ModelPlan) -> list[str]:
    experts = made.experts
    rows = [
        ("weights that must be resident", f"{made.resident_bytes:,}"),
        (f"state of {made.seqs:,} x {made.context:,} tokens", f"{made.state_bytes:,}"),
    ]
    if made.workspace:
        rows.append((f"workspace of {made.workspace.part}", f"{made.workspace.nbytes:,}"))
    if experts:
        slots = f"slots for the {experts.used_a_token} experts of a token"
        rows.append((slots, f"{experts.token_slots_bytes:,}"))
    rows.append(("the least that fits", f"{made.least_bytes:,}"))
    rows.append(("weights that may be streamed", f"{made.streamed_bytes:,}"))
    rows.append(("everything resident", f"{made.all_resident_bytes:,}"))
    lines = aligned([("memory", "bytes"), *rows], left=(0,))
    if experts:
        shape = f"{experts.layers} layers x {experts.experts_a_layer}"
        line = f"routed experts: {shape}, {experts.slot_bytes:,} bytes a slot"
        if experts.smallest_bytes != experts.slot_bytes:
            line += f" (the smallest expert has {experts.smallest_bytes:,})"
        lines += ["", line]
    for table in made.tables:
        rows_read = f"{table.rows_a_token} of {table.rows:,} rows of {table.row_bytes:,} bytes a token"
        lines += [f"engram table of layer {table.layer}: {table.nbytes:,} bytes, {rows_read}"]
    return lines


def _states(made: ModelPlan) -> list[str]:
    if not made.states:
        return []
    rows, sources = [], []
    for state in made.states:
        values = state.fixed_values or state.values_a_token
        tokens = "-" if state.fixed_values else f"{state.tokens:,}"
        rows.append((state.form, f"{len(state.layers)}", f"{values:,}", tokens, f"{state.nbytes:,}"))
        sources.append(f"{state.form}: from {', '.join(state.keys)}")
    lines = aligned([("state", "layers", "values", "tokens", "bytes"), *rows], left=(0,))
    return [
        *lines,
        *dict.fromkeys(sources),
        "values: of a layer, for each token or of the whole state; 2 bytes if cached, 4 in a state",
    ]


def _workspace(made: ModelPlan) -> list[str]:
    work = made.workspace
    if work is None:
        return []
    shape = ", ".join(f"{name} {value}" for name, value in work.shape.items())
    rows = [(buffer.name, f"{buffer.nbytes:,}", f"  {buffer.formula}") for buffer in work.buffers]
    title = f"workspace of {work.part}: {shape}; me is max(max_tokens, topk), rows max_tokens * topk"
    return [title, *aligned([("buffer", "bytes", "  formula"), *rows], left=(0, 2))]


def _fits(made: ModelPlan) -> list[str]:
    if made.gpu_memory is None:
        return []
    rows: list[tuple[str, ...]] = []
    for fit in made.fits:
        layers = ", ".join(map(str, fit.engram_layers)) or "none"
        experts = ("-", "-", "-")
        if fit.slots_a_layer is not None and fit.share_of_experts is not None:
            experts = (f"{fit.slots:,}", f"{fit.slots_a_layer:.1f}", f"{100 * fit.share_of_experts:.1f}%")
        rows.append((layers, f"{fit.engram_bytes:,}", *experts, f"{fit.unused_bytes:,}"))
    header: tuple[str, ...] = ("engram tables of layers", "bytes", "expert slots", "a layer", "of all", "unused bytes")
    if not made.tables:
        header, rows = header[2:], [row[2:] for row in rows]
    title = f"what fits in {made.gpu_memory / GIB:g} GiB"
    return [title, *aligned([header, *rows], left=(0,))]


def _token(made: ModelPlan) -> list[str]:
    rows = [(read.what, f"{read.nbytes:,}") for read in made.reads]
    rows.append(("a token", f"{made.token_bytes:,}"))
    source = ""
    if made.bandwidth == H200_COPY_BANDWIDTH:
        source = ", as measured for a copy on an H200"
    floor = f"at least {made.token_seconds * 1e6:,.1f} us a token at {made.bandwidth / TERA:g} TB/s{source}"
    title = f"a decoded token of one sequence, {made.context:,} tokens behind it, all in the GPU's memory"
    return [title, *aligned([("read once", "bytes"), *rows], left=(0,)), floor]


def _notes(made: ModelPlan) -> list[str]:
    return [f"note: {note}" for note in made.notes]


def _amount(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / GIB:.2f} GiB)"
