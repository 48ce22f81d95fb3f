# SPDX-License-Identifier: MIT OR Apache-2.0
"""Experts that tell which they are, from sources that tests hold up or make fail."""

import threading
from contextlib import contextmanager

import numpy as np

from metrale.moe_v41 import ExpertArena, SlotLayout

LAYOUT = SlotLayout(256, 256)
PARTS = {"gate": LAYOUT.up_offset, "up": LAYOUT.up_offset, "down": LAYOUT.slot_bytes - LAYOUT.down_offset}


def blocks(layer, expert, part):
    """A part's bytes: a word that no other part of any expert has, all the way."""
    word = 1 + (layer * 1024 + expert) * 3 + list(PARTS).index(part)
    return np.full(PARTS[part] // 4, word, np.uint32).view(np.uint8)


def slot_bytes(layer, expert):
    return np.concatenate([blocks(layer, expert, part) for part in PARTS])


class Experts:
    """A source of ``blocks``. ``fail[layer, expert, part]`` is what is raised for it, ``short`` how many bytes are said
    to have come; a part in ``held`` is read once ``go`` is set."""

    def __init__(self):
        self.fail, self.short, self.held = {}, {}, set()
        self.go = threading.Event()
        self.reading = threading.Semaphore(0)  # released for each part that is held
        self.seen = []

    def read_into(self, layer, expert, part, memory):
        key = layer, expert, part
        self.seen.append(key)
        if key in self.held:
            self.reading.release()
            assert self.go.wait(60)
        if key in self.fail:
            raise self.fail[key]
        np.frombuffer(memory, np.uint8)[:] = blocks(*key)
        return self.short.get(key, memory.nbytes)

    def hold(self, *keys):
        self.held |= {(*key, part) for key in keys for part in PARTS}


@contextmanager
def arena_of(gpu, n_slots, source=None, **options):
    """``(arena, source)``, given back at the end."""
    source = Experts() if source is None else source
    arena = ExpertArena(gpu, LAYOUT, n_slots, source, **options)
    try:
        yield arena, source
    finally:
        if isinstance(source, Experts):
            source.go.set()
        arena.free()


def contents(arena, slot, stream=None):
    """A slot's bytes, read in the order of ``stream``."""
    found = np.zeros(LAYOUT.slot_bytes, np.uint8)
    arena.gpu.copy_d2h_on_stream(arena.base.offset(slot * LAYOUT.slot_bytes), found, stream)
    return found


def fetched(arena, keys, stream=None):
    """Fetch, check every byte in the order of the stream, and release; the slots."""
    slots = arena.fetch(keys, stream)
    for key, slot in zip(keys, slots, strict=True):
        np.testing.assert_array_equal(contents(arena, slot, stream), slot_bytes(*key))
    arena.release(stream)
    return slots


def resident(arena, layers=2):
    return {(layer, expert): slot for layer in range(layers) for expert, slot in arena.slots_of(layer).items()}
