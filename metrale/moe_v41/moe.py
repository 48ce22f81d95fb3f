# SPDX-License-Identifier: MIT OR Apache-2.0
"""MoeV41: the DeepSeek-V4.1 mixture of experts."""

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.errors import MetraleError, refuse
from metrale.gpu import DevicePtr, GpuBackend
from metrale.gpu.owner import Owner
from metrale.moe_v41._select import NOT_FINITE, NOT_RESIDENT
from metrale.moe_v41._staging import stream_handle
from metrale.moe_v41.arena import ExpertArena
from metrale.moe_v41.config import (
    F32_BYTES,
    SLOT_TABLE_LAYERS,
    U32_BYTES,
    MoeV41Cfg,
    integer,
)
from metrale.moe_v41.grouped import Grouped, check_path
from metrale.moe_v41.single import Single
from metrale.moe_v41.weights import MoeV41LayerWeights, RouterWeights

__all__ = ["MoeV41", "RoutedToken"]

SELECTIONS = ("device", "host")
ALL: list[int] = []
"""Stands for all experts: none has to be fetched."""
TRIPLE_BYTES = 12
SEVERAL = 0xFFFFFFFF
"""Where a layer's header has its flags: the step was for several tokens, whose headers are in many_hdr. The device says
which step was the last: it may be that of a graph."""
ONE = "gemv"
"""The path of a step for one token"""


class RoutedToken(NamedTuple):
    """The selection behind the last output of a layer: ``picks`` and ``weights`` best first, ``slots`` in plan
    order (ascending expert id); each ``[topk]``, or ``[tokens, topk]`` after a step for several tokens."""

    picks: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    slots: npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer of ``add_layer``: what it runs on, and where the device keeps what it routes by."""

    weights: MoeV41LayerWeights
    experts: ExpertArena
    slots: npt.NDArray[np.int32]
    """Of each expert, -1 where it is not resident: the layer's row of the slot table"""
    slots_ptr: DevicePtr
    header: DevicePtr
    ran: bool = False
    tokens: int = 0
    """Of its last step for several tokens"""
    fetched: bool = False
    """Whether what was not resident then has been fetched"""


class MoeV41:
    """The workspace and the step of a DeepSeek-V4.1 MoE; layers share it.

    ``add_layer(layer, weights, experts)`` once for each layer, then ``forward(layer, x)``. Weights and experts stay
    their owners'. ``free()`` gives back every buffer, the side stream and both events.

    Where the experts' arena has a source, a step waits for the selection, has what is missing fetched, and goes on;
    ``stage`` and ``compute`` are its two halves. In a capture it goes on with what is there: after each launch of the
    graph ``settle`` says whether all experts were, and fetches those that were not for the next.

    ``METRALE_DS41_EXPERT_WARPS`` (2, 4 or 8) picks the expert GEMV; with ``METRALE_DS41_DIAG=1`` every step waits
    for its parts and leaves their milliseconds in ``last_timing``.
    """

    def __init__(self, gpu: GpuBackend, cfg: MoeV41Cfg) -> None:
        self.gpu = gpu
        self.cfg = cfg
        self.last_timing: dict[str, float] = {}
        self._diagnose = os.environ.get("METRALE_DS41_DIAG") == "1"
        self._mark = 0.0
        self._layers: dict[int, _Layer] = {}
        self._apart = False  # the side stream has work that no other stream waits for
        self._slot_table_set = gpu.kernel("moe_v41", "moe_v41_slot_table_set")
        with Owner(gpu, "MoeV41") as own:
            self._buffers = {spec.name: own.alloc(spec.name, spec.nbytes) for spec in cfg.buffer_table()}
            self._side = own.stream()
            self._ev_in, self._ev_out = own.event(), own.event()
            table_bytes = U32_BYTES * SLOT_TABLE_LAYERS * cfg.n_routed
            gpu.memset(self._buffers["slot_table"], 0xFF, table_bytes)
            self._single = Single(gpu, cfg, self._buffers)
            self._grouped = Grouped(gpu, cfg, self._buffers) if cfg.max_tokens > 1 else None
        self._own = own
        self._many_of: int | None = None  # the layer whose selections lie in many_hdr
        self._staged: tuple[int, int, str] | None = None  # layer, tokens and path that compute can go on with
        self._held: set[tuple[ExpertArena, int]] = set()  # what has been fetched for a stream and not released
        self._changes: dict[tuple[int, int], int] = {}  # slots that are not in the device's table yet

    def add_layer(self, layer: SupportsIndex, weights: MoeV41LayerWeights, experts: ExpertArena) -> None:
        """Use ``weights`` and the experts that ``experts`` holds now for ``layer`` (0 to 63), in place of earlier ones.

        Refuses weights and slots of another shape than the configuration's, freed ones, those of another backend, and
        an arena with a source that serves another MoeV41.
        After another error the layer has to be added again.
        """
        cfg, b = self.cfg, self._live()
        layer = integer("layer", layer, 0, SLOT_TABLE_LAYERS - 1)
        for name, held in (("weights", weights.own), ("experts", experts.own)):
            if held.gpu is not self.gpu:
                refuse(f"{name}: backend", held.gpu, f"the MoeV41's own, {self.gpu!r}")
        _check_held(layer, weights, experts)
        if (weights.router.n_routed, weights.router.dim) != (cfg.n_routed, cfg.dim):
            got = f"router ({weights.router.n_routed}, {weights.router.dim})"
            refuse("weights", got, f"router ({cfg.n_routed}, {cfg.dim})")
        if weights.shared_gate.n > cfg.inter:
            refuse(
                "weights",
                f"a shared expert of inner width {weights.shared_gate.n}",
                f"at most inter, {cfg.inter}",
            )
        if (experts.layout.dim, experts.layout.inter) != (cfg.dim, cfg.inter):
            got = f"slots of dim {experts.layout.dim}, inter {experts.layout.inter}"
            refuse("experts", got, f"dim {cfg.dim}, inter {cfg.inter}")
        if experts.source is not None and experts.n_slots < cfg.topk:
            refuse("experts", f"{experts.n_slots} slots", f"at least one token's picks, {cfg.topk}")
        other = None if experts.table_of is None else experts.table_of()
        if other is not None and other is not self and not other._own.freed:
            refuse("experts", "an arena whose changes go to another MoeV41's slot table", "an arena of its own")
        slots = np.full(cfg.n_routed, -1, np.int32)
        for expert, slot in experts.slots_of(layer).items():
            if not 0 <= expert < cfg.n_routed:
                refuse("experts", f"expert {expert} of layer {layer}", f"0 to {cfg.n_routed - 1}")
            slots[expert] = slot
        if experts.source is not None:
            experts.table_of = weakref.ref(self)
        triples = np.empty((cfg.n_routed, 3), np.int32)
        triples[:, 0], triples[:, 1], triples[:, 2] = layer, np.arange(cfg.n_routed), slots
        self._layers.pop(layer, None)  # should the next fail, the device's table may be neither the old nor the new
        self._changes = {key: slot for key, slot in self._changes.items() if key[0] != layer}
        self._staged = None
        with self.gpu.upload(triples, "MoeV41.triples") as staged:
            ops.moe_v41_slot_table_set(
                self.gpu, self._slot_table_set, b["slot_table"], cfg.n_routed, staged, len(triples), None
            )
            self.gpu.synchronize()
        self._layers[layer] = _Layer(
            weights,
            experts,
            slots,
            slots_ptr=b["slot_table"].offset(layer * slots.nbytes),
            header=b["route_hdr"].offset(layer * U32_BYTES * cfg.header_words),
        )

    def forward(
        self, layer: int, x: Any, stream: Any = None, *, tokens: int = 1, selection: str = "device",
        side_stream: bool = True, path: str = "auto",
    ) -> DevicePtr:  # fmt: skip
        """The layer's output: ``x`` bf16 ``[tokens, dim]`` on the device -> ``out_ptr()`` bf16 ``[tokens, dim]``.

        Queued on ``stream``. ``selection`` "device" needs no wait where all experts are resident, and can be captured;
        "host", for one token, waits for the logits, selects with the same bits, and raises at once where "device"
        leaves it to ``routed``. The shared expert runs beside the routed ones on the side stream, or with
        ``side_stream=False`` behind them, with the same bits.

        ``path`` "gemv" multiplies q8_1 rows, "mmq" (for ``max_tokens`` above 1) uses the int8 tensor cores; under each
        a token's bits do not depend on the others. "auto" is "gemv" for one token and "mmq" for several. Tokens
        whose picks are more than the arena has slots go through it in waves of ascending expert, with the same bits.

        Refuses ``tokens`` outside 1..max_tokens, a layer that was not added, or whose weights or experts have been
        freed. Raises what the arena's source does, naming layer and expert; the next step works.
        """
        state, stream = self._ready(layer, tokens, selection, path, stream)
        if not self._is_many(tokens, path):
            self._stage_one(layer, state, x, selection, stream)
            return self._compute_one(state, x, side_stream, stream)
        many = self._stage_many(layer, state, x, tokens, path, stream)
        waves = self._waves(layer, state, many, stream)
        return self._compute_many(layer, state, x, tokens, side_stream, path, waves, stream)

    def stage(
        self, layer: int, x: Any, stream: Any = None, *, tokens: int = 1, selection: str = "device", path: str = "auto"
    ) -> None:  # fmt: skip
        """The first half of ``forward``: selection, fetch, addresses. Refuses picks that take more than one wave."""
        state, stream = self._ready(layer, tokens, selection, path, stream)
        if not self._is_many(tokens, path):
            self._stage_one(layer, state, x, selection, stream)
            return
        many = self._stage_many(layer, state, x, tokens, path, stream)
        waves = self._waves(layer, state, many, stream)
        if len(waves) > 1:
            picked = sum(len(wave) for wave in waves)
            refuse(
                "tokens", f"{tokens} that pick {picked} experts", f"as many experts as slots, {state.experts.n_slots}"
            )
        if self._fetch(layer, state, waves[0], stream):
            self._many().select(state.weights.router, state.slots_ptr, tokens, stream)
        self._staged = layer, tokens, _many_path(path)

    def compute(
        self, layer: int, x: Any, stream: Any = None, *, tokens: int = 1, side_stream: bool = True, path: str = "auto"
    ) -> DevicePtr:  # fmt: skip
        """The second half, on what ``stage`` left there for the same arguments: work on the device alone. Refuses
        arguments that ``stage`` was not the last to be called with."""
        state, stream = self._ready(layer, tokens, SELECTIONS[0], path, stream)
        many = self._is_many(tokens, path)
        wanted = layer, tokens, _many_path(path) if many else ONE
        if wanted != self._staged:
            allowed = "what stage left last, " + ("nothing" if self._staged is None else _named(*self._staged))
            refuse("step", _named(*wanted), allowed)
        if not many:
            return self._compute_one(state, x, side_stream, stream)
        return self._compute_many(layer, state, x, tokens, side_stream, path, [ALL], stream)

    def settle(self, *layers: int, stream: Any = None) -> bool:
        """After a launch on ``stream`` of a graph in which steps of ``layers`` were captured: whether every expert
        that they picked was resident. If not, the output is worthless, and what was missing has been fetched: launch
        the graph again.

        Waits for ``stream``. Raises ``MetraleError`` for logits that were not finite, and what the arena's source
        raises. Refuses layers that were not added, or have not run.
        """
        self._live()
        stream = self.gpu.default_stream() if stream is None else stream
        for arena in {self._added(layer).experts for layer in layers}:
            if arena.source is not None:
                self._held.add((arena, stream_handle(self.gpu, stream)))
                self._let_go(arena, stream)
        resident = True
        wanted: dict[ExpertArena, list[tuple[int, int]]] = {}
        for layer in layers:
            state = self._has_run(layer)
            headers = self._headers(layer, state, stream)
            for token, header in enumerate(np.atleast_2d(headers)):
                flags = int(header[0])
                resident = resident and not flags & NOT_RESIDENT
                _check_flags(layer, token, flags & ~(0 if state.experts.source is None else NOT_RESIDENT))
            keys = [(layer, int(e)) for e in np.unique(headers[..., 1 : 1 + self.cfg.topk])]
            wanted.setdefault(state.experts, []).extend(keys)
        for arena, keys in wanted.items():
            if arena.source is not None:
                self._fetch_keys(arena, keys, stream)
        return resident

    def predict(
        self, layer: int, x: Any, stream: Any = None, *, router: RouterWeights | None = None
    ) -> list[tuple[int, int]]:
        """What ``layer`` would pick for one token ``x``, usually the input of the layer before it: its keys
        ``(layer, expert)``, best first, for ``ExpertArena.prefetch``. Waits for ``stream``.

        ``router`` serves a layer that was not added. Raises ``MetraleError`` for logits that are not finite. Refuses
        a layer whose weights or experts have been freed.
        """
        b, cfg = self._live(), self.cfg
        if router is None:
            state = self._added(layer)
            _check_held(layer, state.weights, state.experts)
            router = state.weights.router
        if (router.n_routed, router.dim) != (cfg.n_routed, cfg.dim):
            refuse("router", (router.n_routed, router.dim), f"({cfg.n_routed}, {cfg.dim})")
        stream = self.gpu.default_stream() if stream is None else stream
        self._single.logits(router, x, b["pred_logits"], stream)
        picks = self._single.pick(router, b["pred_logits"], stream)
        _check_flags(layer, 0, picks.flags)
        return [(layer, expert) for expert in picks.experts.tolist()]

    def routed(self, layer: int, stream: Any = None) -> RoutedToken:
        """The selection behind the layer's last output; waits for ``stream``.

        Refuses a layer that was not added, or has not run since, and one whose selections for several tokens another
        layer's have replaced. Raises ``MetraleError``, naming layer and token, if its logits were not finite or a pick
        was not resident: the output is then worthless.
        """
        self._live()
        state = self._has_run(layer)
        headers = self._headers(layer, state, stream)
        known = NOT_RESIDENT if headers.ndim == 2 and state.fetched else 0
        for token, header in enumerate(np.atleast_2d(headers)):
            _check_flags(layer, token, int(header[0]) & ~known)
        picks, weights, slots = (part.copy() for part in np.split(headers[..., 1:], 3, axis=-1))
        return RoutedToken(picks.view(np.int32), weights.view(np.float32), slots.view(np.int32))

    def out_ptr(self) -> DevicePtr:
        """Where ``forward`` leaves its output, bf16 ``[tokens, dim]``."""
        return self._live()["out"]

    def buffer(self, name: str) -> DevicePtr:
        """A buffer of ``cfg.buffer_table()`` by name; its contents are those of the last step."""
        buffers = self._live()
        if name not in buffers:
            refuse("name", name, ", ".join(buffers))
        return buffers[name]

    def free(self) -> None:
        """Give everything back. A second call does nothing."""
        self._layers.clear()
        self._held.clear()
        self._own.free()

    def _live(self) -> dict[str, DevicePtr]:
        """The buffers; refuses use after ``free()``."""
        if self._own.freed:
            raise MetraleError("the MoeV41 has been freed")
        return self._buffers

    def _added(self, layer: int) -> _Layer:
        if layer not in self._layers:
            added = ", ".join(map(str, sorted(self._layers))) or "none yet"
            refuse("layer", layer, f"a layer of add_layer ({added})")
        return self._layers[layer]

    def _ready(
        self, layer: int, tokens: int, selection: str, path: str, stream: Any
    ) -> tuple[_Layer, int]:  # fmt: skip
        """The layer and the stream of a step, once all that can be refused has been."""
        self._live()
        integer("tokens", tokens, 1, self.cfg.max_tokens)
        if selection not in SELECTIONS:
            refuse("selection", selection, " or ".join(SELECTIONS))
        check_path(path, self._grouped is not None)
        if selection == "host" and self._is_many(tokens, path):
            refuse("selection", selection, "device, for several tokens and for the path mmq")
        state = self._added(layer)
        _check_held(layer, state.weights, state.experts)
        stream = self.gpu.default_stream() if stream is None else stream
        self._mark = time.perf_counter()
        if self._apart:
            self.gpu.synchronize(self._side)
            self._apart = False
        return state, stream

    def _is_many(self, tokens: int, path: str) -> bool:
        return tokens > 1 or path == "mmq"

    # one token

    def _stage_one(self, layer: int, state: _Layer, x: Any, selection: str, stream: int) -> None:
        one, router, experts = self._single, state.weights.router, state.experts
        may_miss = self._begin(state, stream)
        one.logits(router, x, self._buffers["logits"], stream)
        if selection == "host":
            picks = one.pick(router, self._buffers["logits"], stream)
            _check_flags(layer, 0, picks.flags)
            if may_miss:
                self._fetch(layer, state, sorted(picks.experts.tolist()), stream)
            _check_flags(layer, 0, NOT_RESIDENT if (state.slots[picks.experts] < 0).any() else 0)
            one.stage(picks, state.slots, experts.base, experts.layout, state.header, stream)
        else:
            at = (experts.base, experts.layout, state.slots_ptr, state.header, stream)
            one.select(router, *at)
            if may_miss:
                header = np.empty((1, self.cfg.header_words), np.uint32)
                self.gpu.copy_d2h_on_stream(state.header, header, stream)
                if self._fetch(layer, state, self._picked(layer, header), stream):
                    one.select(router, *at)
        state.ran = True
        self._staged = layer, 1, ONE
        self._span("route", stream)

    def _compute_one(self, state: _Layer, x: Any, side_stream: bool, stream: int) -> DevicePtr:
        one, (limit, shared_limit) = self._single, self._limits(state)
        one.quantise(x, stream)
        self._both(
            lambda on: one.experts(limit, on), lambda on: one.shared(state.weights, x, shared_limit, on), side_stream,
            stream,
        )  # fmt: skip
        one.combine(stream)
        self._release(state, stream)
        self._span("shared", stream)
        return self._buffers["out"]

    def _limits(self, state: _Layer) -> tuple[float, float]:
        """The clamps of the routed and of the shared experts."""
        own = (state.weights.swiglu_limit, state.weights.shared_swiglu_limit)
        first, second = (self.cfg.swiglu_limit if limit is None else limit for limit in own)
        return first, second

    def _both(
        self, routed: Callable[[int], None], shared: Callable[[int], None], side_stream: bool, stream: int
    ) -> None:  # fmt: skip
        """The routed experts on ``stream``, and the shared one beside or behind them."""
        if not side_stream:
            routed(stream)
            self._span("routed", stream)
            shared(stream)
            return
        self.gpu.record_event(self._ev_in, stream)
        self.gpu.stream_wait_event(self._side, self._ev_in)
        self._apart = True
        try:
            shared(self._side)
            routed(stream)
            self._span("routed", stream)
        finally:  # after an error too, what is on the side stream lies before all that comes next
            self.gpu.record_event(self._ev_out, self._side)
            self.gpu.stream_wait_event(stream, self._ev_out)
            self._apart = False

    # several tokens

    def _stage_many(
        self, layer: int, state: _Layer, x: Any, tokens: int, path: str, stream: int
    ) -> "npt.NDArray[np.uint32] | None":  # fmt: skip
        """Route all tokens; their headers, where experts may have to be fetched."""
        grouped, may_miss = self._many(), self._begin(state, stream)
        grouped.logits(state.weights.router, x, tokens, stream)
        grouped.select(state.weights.router, state.slots_ptr, tokens, stream)
        grouped.quantise(x, tokens, _many_path(path), stream)
        self.gpu.memset_async(state.header, SEVERAL & 0xFF, U32_BYTES, stream)
        state.ran, state.tokens, state.fetched, self._many_of = True, tokens, may_miss, layer
        headers = grouped.headers(tokens, stream) if may_miss else None
        self._span("route", stream)
        return headers

    def _waves(
        self, layer: int, state: _Layer, headers: "npt.NDArray[np.uint32] | None", stream: int
    ) -> list[list[int]]:  # fmt: skip
        """The experts of each pass over the arena, ascending; ``ALL`` where none has to be fetched."""
        if headers is None:
            return [ALL]
        picked = self._picked(layer, headers)
        step = state.experts.n_slots
        return [picked[first : first + step] for first in range(0, len(picked), step)]

    def _compute_many(
        self, layer: int, state: _Layer, x: Any, tokens: int, side_stream: bool, path: str, waves: list[list[int]],
        stream: int,
    ) -> DevicePtr:  # fmt: skip
        grouped, cfg, weights, layout = self._many(), self.cfg, state.weights, state.experts.layout
        path = _many_path(path)
        limit, shared_limit = self._limits(state)

        def routed(on: int) -> None:
            for wave in waves:
                first, last = 0, cfg.n_routed
                if wave is not ALL:
                    if self._fetch(layer, state, wave, on):
                        grouped.select(weights.router, state.slots_ptr, tokens, on)
                    first, last = wave[0], wave[-1] + 1
                grouped.experts(
                    state.experts.base, layout, state.slots_ptr, limit, tokens, path, on, first, last
                )  # fmt: skip
                self._release(state, on)

        self._both(
            routed, lambda on: grouped.shared(weights, x, shared_limit, tokens, path, on), side_stream, stream
        )  # fmt: skip
        grouped.combine(tokens, stream)
        self._span("shared", stream)
        return self._buffers["out"]

    def _many(self) -> Grouped:
        assert self._grouped is not None  # _ready refuses several tokens without it
        return self._grouped

    # the arena

    def _begin(self, state: _Layer, stream: int) -> bool:
        """Whether the host has to see the picks of the step that begins. Then what an earlier one holds in the arena,
        which failed, or came to no second half, is let go."""
        self._staged = None
        may_miss = self._may_miss(state, stream)
        if may_miss:
            self._let_go(state.experts, stream)
        return may_miss

    def _may_miss(self, state: _Layer, stream: int) -> bool:
        """Whether the host has to see the picks. In a capture it cannot."""
        return state.experts.source is not None and not self.gpu.stream_is_capturing(stream)

    def _picked(self, layer: int, headers: npt.NDArray[np.uint32]) -> list[int]:
        """The experts of headers ``[tokens, .]``, ascending."""
        for token, header in enumerate(headers):
            _check_flags(layer, token, int(header[0]) & NOT_FINITE)
        return [int(e) for e in np.unique(headers[:, 1 : 1 + self.cfg.topk])]

    def _fetch(self, layer: int, state: _Layer, experts: list[int], stream: int) -> bool:
        """Make them resident; whether slots have changed since the selection."""
        if experts is ALL:
            return False
        return self._fetch_keys(state.experts, [(layer, expert) for expert in experts], stream)

    def _fetch_keys(self, arena: ExpertArena, keys: list[tuple[int, int]], stream: int) -> bool:
        self._held.add((arena, stream_handle(self.gpu, stream)))
        arena.fetch(keys, stream)
        return self._apply_changes(arena, stream)

    def _release(self, state: _Layer, stream: int) -> None:
        if self._may_miss(state, stream):
            self._let_go(state.experts, stream)

    def _let_go(self, arena: ExpertArena, stream: int) -> None:
        """Release what is held in the arena, by work that ``stream`` is behind: one workspace serves all steps."""
        for held in [held for held in self._held if held[0] is arena]:
            arena.release(stream, of=held[1])
            self._held.remove(held)

    def _apply_changes(self, arena: ExpertArena, stream: int) -> bool:
        """Bring the slot tables up to date, on the device in stream order; whether there was anything to do. The rows
        go through pred_logits."""
        for layer, expert, slot in arena.take_changes(stream).tolist():
            state = self._layers.get(layer)  # the arena may hold experts of others
            if state is not None and state.experts is arena and expert < self.cfg.n_routed:
                state.slots[expert] = self._changes[layer, expert] = slot
        if not self._changes:
            return False
        changes = np.array([(*key, slot) for key, slot in self._changes.items()], np.int32)
        staged, cfg = self._buffers["pred_logits"], self.cfg
        at_once = max(F32_BYTES * cfg.n_routed // TRIPLE_BYTES, 1)
        for first in range(0, len(changes), at_once):
            part = changes[first : first + at_once]
            self.gpu.copy_h2d_async(part, staged, stream)
            ops.moe_v41_slot_table_set(
                self.gpu, self._slot_table_set, self._buffers["slot_table"], cfg.n_routed, staged, len(part), stream
            )
        self._changes.clear()
        return True

    # the last step

    def _has_run(self, layer: int) -> _Layer:
        state = self._added(layer)
        if not state.ran:
            refuse("layer", layer, "a layer that has run")
        return state

    def _headers(self, layer: int, state: _Layer, stream: Any) -> npt.NDArray[np.uint32]:
        """``[.]``, or ``[tokens, .]`` of a step for several tokens."""
        header = np.empty(self.cfg.header_words, np.uint32)
        self.gpu.copy_d2h_on_stream(state.header, header, stream)
        if header[0] != SEVERAL:
            return header
        if self._many_of != layer:
            refuse("layer", layer, f"layer {self._many_of}, the last that ran for several tokens")
        return self._many().headers(state.tokens, stream)

    def _span(self, name: str, stream: int) -> None:
        if self._diagnose:
            self.gpu.synchronize(stream)
            now = time.perf_counter()
            self.last_timing[name] = (now - self._mark) * 1e3
            self._mark = now


def _check_held(layer: int, weights: MoeV41LayerWeights, experts: ExpertArena) -> None:
    if weights.own.freed:
        raise MetraleError(f"layer {layer}: its weights have been freed")
    if experts.own.freed:
        raise MetraleError(f"layer {layer}: its experts have been freed")


def _check_flags(layer: int, token: int, flags: int) -> None:
    if flags & NOT_FINITE:
        raise MetraleError(f"layer {layer}, token {token}: a router logit is NaN or infinite; no expert was picked")
    if flags & NOT_RESIDENT:
        raise MetraleError(f"layer {layer}, token {token}: a picked expert is not resident")


def _named(layer: int, tokens: int, path: str) -> str:
    return f"layer {layer}, tokens {tokens}, path {path}"


def _many_path(path: str) -> str:
    return "mmq" if path == "auto" else path
