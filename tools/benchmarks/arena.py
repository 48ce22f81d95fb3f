# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times ExpertArena.fetch: experts of the real shape that are missing, from a file in the page cache to the device, and
experts that are resident."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import metrale
from metrale.moe_v41 import ExpertArena, SlotLayout

__all__ = ["run", "table"]

LAYOUT = SlotLayout(5120, 2304)
EXPERTS = 48  # in the file
PICKS = 6  # of a token
STAGING = 6  # the arena's default
READERS = (1, 3, 6, 12)
ROUNDS = 5  # through the file
HITS = 2000  # calls
HIT_US = 10  # microseconds a token: the target


class FileExperts:
    """A file of slots, one expert after another."""

    def __init__(self, descriptor: int, layout: SlotLayout) -> None:
        self.descriptor = descriptor
        self.slot_bytes = layout.slot_bytes
        self.offsets = {"gate": 0, "up": layout.up_offset, "down": layout.down_offset}

    def read_into(self, layer: int, expert: int, part: str, memory: memoryview) -> int:
        """A part, in one call."""
        return os.preadv(self.descriptor, [memory], expert * self.slot_bytes + self.offsets[part])


def run(gpu: metrale.GpuBackend, layout: SlotLayout = LAYOUT) -> dict[str, Any]:
    """GB/s of misses by the number of readers, beside what bounds them; microseconds of one miss, and of hits."""
    with tempfile.TemporaryFile() as file:
        rng = np.random.default_rng(0)
        for _ in range(EXPERTS):
            file.write(rng.bytes(layout.slot_bytes))
        file.flush()
        source = FileExperts(file.fileno(), layout)
        misses = {readers: _misses(gpu, layout, source, readers, PICKS) for readers in READERS}
        return {
            "slot_bytes": layout.slot_bytes,
            "read_gb_s": {readers: _gb_s(layout, _reads(layout, source, readers)) for readers in READERS},
            "copy_gb_s": _gb_s(layout, _copies(gpu, layout)),
            "misses_gb_s": {readers: _gb_s(layout, seconds) for readers, seconds in misses.items()},
            "miss_us": {r: 1e6 * _misses(gpu, layout, source, r, 1) for r in READERS},
            "hit_us": 1e6 * _hits(gpu, layout, source),
        }


def _misses(gpu: metrale.GpuBackend, layout: SlotLayout, source: FileExperts, readers: int, picks: int) -> float:
    """Seconds an expert, with so many in a call, until all are on the device."""
    arena = ExpertArena(gpu, layout, 2 * PICKS, source, random_share=0, readers=readers)
    try:

        def through_the_file() -> None:
            for first in range(0, EXPERTS, picks):
                arena.fetch([(0, first + n) for n in range(picks)])
                gpu.synchronize()
                arena.release()

        return _median(through_the_file, ROUNDS) / EXPERTS
    finally:
        assert arena.stats.hits == 0
        arena.free()


def _reads(layout: SlotLayout, source: FileExperts, readers: int) -> float:
    """Seconds an expert, read to memory that nobody copies, as much as the arena's."""
    memory = [memoryview(bytearray(layout.slot_bytes)) for _ in range(STAGING)]
    spans = {"gate": (0, layout.up_offset), "up": (layout.up_offset, layout.down_offset),
             "down": (layout.down_offset, layout.slot_bytes)}  # fmt: skip

    def thread(n: int) -> None:
        for part in range(n, 3 * EXPERTS, readers):
            name = list(spans)[part % 3]
            source.read_into(0, part // 3, name, memory[part // 3 % STAGING][slice(*spans[name])])

    with ThreadPoolExecutor(readers) as pool:
        return _median(lambda: list(pool.map(thread, range(readers))), ROUNDS) / EXPERTS


def _copies(gpu: metrale.GpuBackend, layout: SlotLayout) -> float:
    """Seconds a copy of an expert from page-locked memory, many in a row."""
    nbytes = layout.slot_bytes
    with gpu.pinned_buffer(STAGING * nbytes) as pinned, gpu.buffer(EXPERTS * nbytes) as device:

        def copies() -> None:
            for n in range(EXPERTS):
                src = n % STAGING * nbytes
                gpu.copy_h2d_async(memoryview(pinned)[src : src + nbytes], device.ptr.offset(n * nbytes), None)
            gpu.synchronize()

        return _median(copies, ROUNDS) / EXPERTS


def _hits(gpu: metrale.GpuBackend, layout: SlotLayout, source: FileExperts) -> float:
    """Seconds of the host for a token whose experts are resident: ``fetch`` and ``release``."""
    arena = ExpertArena(gpu, layout, 2 * PICKS, source)
    keys, stream = [(0, n) for n in range(PICKS)], gpu.default_stream()
    try:
        arena.fetch(keys, stream)
        arena.release(stream)
        gpu.synchronize()

        def tokens() -> None:
            for _ in range(HITS):
                arena.fetch(keys, stream)
                arena.release(stream)

        return _median(tokens, ROUNDS) / HITS
    finally:
        arena.free()


def _median(work: Callable[[], Any], rounds: int) -> float:
    """Seconds, after a first time that does not count."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gb_s(layout: SlotLayout, seconds: float) -> float:
    return layout.slot_bytes / seconds / 1e9


def table(facts: dict[str, Any]) -> str:
    """Markdown of the results."""
    lines = [
        f"Experts of {facts['slot_bytes']:,} bytes, from a file in the page cache to the device; {PICKS} a call, and "
        f"one alone. Medians of {ROUNDS} rounds.\n",
        "| reader threads | reading alone, GB/s | fetch of misses, GB/s | one miss, us |",
        "|---:|---:|---:|---:|",
    ]
    for readers, gb_s in facts["misses_gb_s"].items():
        read, miss = facts["read_gb_s"][readers], facts["miss_us"][readers]
        lines.append(f"| {readers} | {read:.1f} | {gb_s:.1f} | {miss:,.0f} |")
    said = "met" if facts["hit_us"] <= HIT_US else "not met"
    lines += [
        f"\nCopies from page-locked memory alone: {facts['copy_gb_s']:.1f} GB/s.\n",
        f"`fetch` and `release` of {PICKS} resident experts: {facts['hit_us']:.2f} us of the host; target {HIT_US}: "
        f"{said}.",
    ]
    return "\n".join(lines)
