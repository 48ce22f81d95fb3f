# SPDX-License-Identifier: MIT OR Apache-2.0
"""A captured step that finds its experts in a table on the device, over an arena that does not hold them all: what
missed is seen in the header, fetched, and the step is run again."""

import numpy as np
import pytest
from experts import LAYOUT, arena_of, contents, slot_bytes

from metrale import ops
from metrale.gpu import Graph
from metrale.gpu.owner import Owner
from metrale.moe_v41._select import NOT_RESIDENT

EXPERTS, PICKS, SLOTS, TOKENS = 24, 3, 7, 60


class Step:
    """The selection of one token, captured, with the table that it looks in."""

    def __init__(self, gpu, arena):
        self.gpu, self.arena = gpu, arena
        self.set_slots = gpu.kernel("moe_v41", "moe_v41_slot_table_set")
        self.own = own = Owner(gpu, "Step")
        self.stream = own.stream()
        self.table, self.logits = own.alloc("table", 4 * EXPERTS), own.alloc("logits", 4 * EXPERTS)
        self.triples = own.alloc("triples", 12 * 2 * EXPERTS)
        self.header, self.ptrs = own.alloc("header", 4 * (1 + 3 * PICKS)), own.alloc("ptrs", 8 * 3 * PICKS)
        weights, rows = own.alloc("weights", 4 * PICKS), own.alloc("rows", 4 * PICKS)
        gpu.memset(self.table, 0xFF, 4 * EXPERTS)
        select = gpu.kernel("moe_v41", "moe_v41_route_select")
        with Graph(gpu, self.stream) as self.graph:
            ops.moe_v41_route_select(
                gpu, select, self.logits, None, EXPERTS, PICKS, 1.0, 1.0, True, self.table, arena.base,
                LAYOUT.slot_bytes, 0, LAYOUT.up_offset, LAYOUT.down_offset, self.header, weights, rows, self.ptrs,
                self.stream,
            )  # fmt: skip

    def run(self):
        """``(flags, picks in plan order)`` of a launch on the table as it is."""
        changes = self.arena.take_changes(self.stream)
        if len(changes):
            self.gpu.copy_h2d_async(changes, self.triples, self.stream)
            ops.moe_v41_slot_table_set(
                self.gpu, self.set_slots, self.table, EXPERTS, self.triples, len(changes), self.stream
            )
        self.graph.launch(self.stream)
        self.arena.release(self.stream)
        header = np.empty(1 + 3 * PICKS, np.uint32)
        self.gpu.copy_d2h_on_stream(self.header, header, self.stream)
        return int(header[0]), sorted(header[1 : 1 + PICKS].tolist())

    def addresses(self):
        found = np.empty((3, PICKS), np.uint64)
        self.gpu.copy_d2h_on_stream(self.ptrs, found, self.stream)
        return found.tolist()

    def free(self):
        self.graph.free()
        self.own.free()


@pytest.mark.parametrize("prefetch", [False, True], ids=["misses", "prefetch"])
def test_after_a_fetch_of_what_missed_the_step_finds_the_right_experts(device, prefetch):
    rng = np.random.default_rng(5)
    with arena_of(device, SLOTS, random_share=0.5) as (arena, _):
        step, replayed = Step(device, arena), 0
        try:
            for _ in range(TOKENS):
                logits = rng.standard_normal(EXPERTS).astype(np.float32)
                logits[:4] += 3  # some are picked more often
                device.copy_h2d(logits, step.logits)
                flags, picks = step.run()
                known = arena.stats.misses
                slots = arena.fetch([(0, e) for e in picks], step.stream)
                assert flags & NOT_RESIDENT or arena.stats.misses == known
                if flags & NOT_RESIDENT:
                    replayed += 1
                    flags, picks = step.run()
                assert flags == 0
                offsets = (0, LAYOUT.up_offset, LAYOUT.down_offset)
                bases = [int(arena.base) + slot * LAYOUT.slot_bytes for slot in slots]
                assert step.addresses() == [[base + offset for base in bases] for offset in offsets]
                for expert, slot in zip(picks, slots, strict=True):
                    np.testing.assert_array_equal(contents(arena, slot, step.stream), slot_bytes(0, expert))
                arena.release(step.stream)
                if prefetch:
                    arena.prefetch([(0, int(e)) for e in rng.choice(EXPERTS, 2, replace=False)])
            assert 0 < replayed < TOKENS, replayed
        finally:
            step.free()
