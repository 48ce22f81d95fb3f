# SPDX-License-Identifier: MIT OR Apache-2.0
"""ExpertArena: routed experts in device memory, of more than it holds at a time."""

import os
import random
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from metrale.errors import MetraleError, refuse
from metrale.gpu import GpuBackend
from metrale.gpu.owner import Owner
from metrale.moe_v41._select import MAX_ROUTED
from metrale.moe_v41._staging import stream_handle
from metrale.moe_v41.config import SLOT_TABLE_LAYERS, integer
from metrale.moe_v41.readers import Read, Readers
from metrale.moe_v41.source import PARTS, ExpertSource, read_part
from metrale.moe_v41.staging import Place, Staging
from metrale.moe_v41.weights import SlotLayout, check_bytes

__all__ = ["ArenaStats", "ExpertArena"]

MOST_READERS = MOST_STAGES = 64

Key = tuple[int, int]  # layer, expert
AnyKey = tuple[SupportsIndex, SupportsIndex]


class ArenaStats(NamedTuple):
    """What an arena has done so far."""

    hits: int
    """Keys of ``fetch`` that were resident, or had been read in the background"""
    misses: int
    evictions: int
    bytes_read: int
    """From the source, by ``prefetch`` too"""
    seconds_waited: float
    """By ``fetch``, for what was not resident"""
    prefetches_useful: int
    """Experts of ``prefetch`` that were fetched"""
    prefetches_useless: int
    """Those that were evicted or dropped before they were, or could not be read"""


class ExpertArena:
    """``n_slots`` expert slots in one device allocation, for the experts of any layers.

    With a ``source``, ``fetch`` reads what is missing into page-locked memory, with ``readers`` threads, and copies it
    to the device on a stream of the arena's own. Where no slot is free, one of the experts that were fetched longest
    ago goes, drawn by ``random.Random(seed)`` from as many as are ``random_share`` of the slots, at least one: a share
    of 0 is strict LRU. Without a source there is what ``load`` was given, and nothing is evicted. ``staging`` is the
    number of experts that the page-locked memory holds.

    A step is ``fetch(keys, stream)``, work on ``stream`` that reads the slots, ``release(stream)``. A captured step
    finds its slots in a table on the device: before it, the changes of ``take_changes`` are queued on the stream; after
    it come ``release(stream)`` and, before any other call, a ``fetch`` of its picks, which says that they were used.
    Where one was missing the step is run again, in the same way. In a capture nothing is fetched or released.

    Any thread may call it; calls wait for each other. ``own`` holds the device memory; ``free()`` gives everything
    back, and leaves the source to its owner.
    """

    def __init__(
        self, gpu: GpuBackend, layout: SlotLayout, n_slots: int, source: ExpertSource | None = None, *,
        random_share: float = 0.05, seed: int = 0, readers: int = 6, staging: int = 6,
    ) -> None:  # fmt: skip
        if n_slots < 1:
            refuse("n_slots", n_slots, "1 or more")
        if source is not None and not callable(getattr(source, "read_into", None)):
            refuse("source", source, "None, or an object with read_into(layer, expert, part, memory)")
        if not 0 <= random_share <= 1:
            refuse("random_share", random_share, "0 (strict LRU) to 1")
        readers, staging = integer("readers", readers, 1, MOST_READERS), integer("staging", staging, 1, MOST_STAGES)
        self.gpu = gpu
        self.layout = layout
        self.n_slots = n_slots
        self.source = source
        self.table_of: weakref.ref[Any] | None = None
        """The ``MoeV41`` whose slot table follows the changes: they are handed out once."""
        self._pid = os.getpid()
        self._calls = threading.Lock()

        self._resident: OrderedDict[Key, int] = OrderedDict()  # what was fetched longest ago first
        self._free = list(range(n_slots))[::-1]
        self._window = max(1, int(random_share * n_slots))
        self._random = random.Random(seed)
        self._in_use: dict[int, set[Key]] = {}  # by stream
        self._changes: dict[Key, int] = {}
        self._unused: set[Key] = set()  # prefetched, and not fetched since

        self._reads: dict[Key, tuple[Read, Place]] = {}
        self._hits = self._misses = self._evictions = self._experts_read = self._useful = self._useless = 0
        self._waited = 0.0

        self._readers = Readers(gpu, readers)
        self._staging: Staging | None = None
        with Owner(gpu, "ExpertArena") as self.own:
            self.base = self.own.alloc("slots", n_slots * layout.slot_bytes)
            # An expert that is not resident stands in as slot 0, which may be free: zeros weigh nothing.
            gpu.memset(self.base, 0, layout.slot_bytes)
            if source is not None:
                self._staging = Staging(gpu, self.own, staging, layout.slot_bytes)

    def fetch(self, keys: Collection[AnyKey], stream: Any = None) -> list[int]:
        """The slots of ``keys``, each ``(layer, expert)``, for work that is queued on ``stream`` next.

        Waits until what is missing has been read; ``stream`` alone waits for the copies to the device. The keys are not
        evicted before ``release(stream)``. A key that is there twice is a hit the second time.

        Refuses more keys than slots, counting those that are not released. Where the source fails, a ``MetraleError``
        names layer and expert, and the call has no effect but that others may have become resident.
        """
        self._check_usable()
        with self._calls:
            handle = stream_handle(self.gpu, stream)
            resident, missed = self._resident, 0
            try:
                slots = [resident[key] for key in keys]  # type: ignore[index]
            except (KeyError, TypeError):
                keys = checked = [_key(key) for key in keys]
                missed = self._make_resident(dict.fromkeys(checked))
                slots = [resident[key] for key in checked]
            if self._staging is not None:
                self._staging.order_after(handle, slots)
            for key in keys:
                resident.move_to_end(key)  # type: ignore[arg-type]
            self._in_use.setdefault(handle, set()).update(keys)  # type: ignore[arg-type]
            self._hits += len(slots) - missed
            self._misses += missed
            if self._unused:
                useful = self._unused.intersection(keys)
                self._unused -= useful
                self._useful += len(useful)
            return slots

    def release(self, stream: Any = None, *, of: int | None = None) -> None:
        """What is queued on ``stream`` by now is all that reads the slots fetched for it, and what slots a table on the
        device had there. They may be evicted, and are written after that work. With ``of``, those that were fetched for
        that stream, which may be gone by now, and whose work ``stream`` comes after."""
        self._check_usable()
        with self._calls:
            handle = stream_handle(self.gpu, stream)
            if self._staging is not None:
                self._staging.release(handle)
            self._in_use.pop(handle if of is None else of, None)

    def prefetch(self, keys: Iterable[AnyKey]) -> int:
        """Begin to read experts that may be fetched soon, in the background; returns how many.

        Passes over those that are resident or being read. Ends where only one place of the page-locked memory is left,
        which is for misses. ``prefetch`` and ``take_changes`` make resident what has been read by then. What cannot be
        read is tried again by ``fetch``.
        """
        self._check_usable()
        begun = 0
        with self._calls:
            if self._staging is None:
                raise MetraleError("prefetch: the ExpertArena has no source")
            self._take_in()
            for key in map(_key, keys):
                if key in self._resident or key in self._reads:
                    continue
                self._staging.collect()
                if len(self._staging.idle) < 2:
                    break
                self._begin(key, self._staging.idle.pop(), background=True)
                self._unused.add(key)
                begun += 1
        return begun

    def take_changes(self, stream: Any = None) -> npt.NDArray[np.int32]:
        """``[n, 3]``, ``(layer, expert, slot)`` for each key whose slot may have changed since the last call, -1 for an
        expert that was evicted. ``stream`` waits for the copies to these slots."""
        self._check_usable()
        with self._calls:
            handle = stream_handle(self.gpu, stream)
            self._take_in()
            if self._staging is not None:
                self._staging.order_after(handle, self._changes.values())
            rows = [(layer, expert, slot) for (layer, expert), slot in self._changes.items()]
            self._changes.clear()
        return np.array(rows, np.int32).reshape(-1, 3)

    def load(self, layer: SupportsIndex, expert: SupportsIndex, gate: Any, up: Any, down: Any) -> int:
        """Copy an expert's raw blocks (contiguous buffers) into a free slot; returns the slot.

        Refuses a layer outside 0..63, an expert outside 0..1023 or there already, blocks of another size, a full arena.
        """
        self._check_usable()
        with self._calls:
            key = layer, expert = _key((layer, expert))
            if key in self._resident or key in self._reads:
                refuse("expert", expert, f"an expert of layer {layer} that is not in the arena yet")
            if not self._free:
                raise MetraleError(
                    f"expert arena: all {self.n_slots} slots are taken; layer {layer}, expert {expert} does not fit"
                )
            parts = list(zip(_spans(self.layout), (gate, up, down), strict=True))
            for (name, first, last), data in parts:
                check_bytes(name, data, last - first)
            if self._staging is not None:
                self._staging.settle()
            slot = self._free[-1]
            base = self.base.offset(slot * self.layout.slot_bytes)
            for (_, first, _), data in parts:
                self.gpu.copy_h2d(data, base.offset(first))
            self._free.pop()
            self._resident[key] = self._changes[key] = slot
            return slot

    def slots_of(self, layer: int) -> dict[int, int]:
        """``{expert: slot}`` of a layer."""
        with self._calls:
            return {expert: slot for (at, expert), slot in self._resident.items() if at == layer}

    @property
    def stats(self) -> ArenaStats:
        """Counts since the arena was made."""
        nbytes = self._experts_read * self.layout.slot_bytes
        return ArenaStats(
            self._hits, self._misses, self._evictions, nbytes, self._waited, self._useful, self._useless
        )  # fmt: skip

    def free(self) -> None:
        """Wait for reads and copies that are under way, and give everything back; the arena is empty and of no further
        use."""
        if self._pid != os.getpid():  # threads, and locks that they hold, are the parent's
            return
        self._readers.stop()
        with self._calls, ExitStack() as each:
            self._resident.clear()
            waits = self.gpu.usable and not self.own.freed
            if self._staging is not None:
                each.callback(self._staging.ring.free)
            each.callback(self.own.free)
            if self._staging is not None and waits:
                self._staging.wait()

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "own"):
            return
        if self._readers.is_current():  # the garbage was collected there: the last references give the memory back
            self._readers.stop()
        else:
            self.free()

    def _check_usable(self) -> None:
        """Before the lock, which a forked child may never get."""
        if self.own.freed:
            raise MetraleError("the ExpertArena has been freed")
        if not self.gpu.usable:
            self.gpu.default_stream()  # says why

    # what a miss takes

    def _make_resident(self, wanted: dict[Key, None]) -> int:
        """Read what is not resident; returns how many had to be waited for."""
        missing = [key for key in wanted if key not in self._resident]
        if missing and self.source is None:
            layer, expert = missing[0]
            raise MetraleError(f"layer {layer}, expert {expert} is not in the arena, which has no source")
        kept = set(wanted).union(*self._in_use.values())
        if len(kept) > self.n_slots:
            others = len(kept) - len(wanted)
            got = f"{len(wanted)} experts" + (f" beside {others} that are not released" if others else "")
            refuse("keys", got, f"as many as there are slots, {self.n_slots}")
        read = [key for key in missing if key in self._reads and self._reads[key][0].done]
        start = time.perf_counter()
        self._read(missing, dict(zip(missing, self._replaced(len(missing), kept), strict=True)))
        self._waited += time.perf_counter() - start
        return len(missing) - len(read)

    def _replaced(self, count: int, kept: set[Key]) -> list[Key | None]:
        """For so many experts, whom each replaces, or None for a free slot; fewer where all others are ``kept``."""
        replaced: list[Key | None] = [None] * min(count, len(self._free))
        kept = set(kept)
        while len(replaced) < count:
            oldest = list(islice((key for key in self._resident if key not in kept), self._window))
            if not oldest:
                break
            victim = oldest[self._random.randrange(len(oldest))] if len(oldest) > 1 else oldest[0]
            replaced.append(victim)
            kept.add(victim)
        return replaced

    def _read(self, missing: list[Key], replaced: dict[Key, Key | None]) -> None:
        """Make all resident that can be read; then the first that could not be is an error."""
        ahead = deque(key for key in missing if key not in self._reads)
        under_way = [key for key in missing if key in self._reads]
        for key in under_way:
            self._readers.hasten(self._reads[key][0])
        failed: dict[int, Exception] = {}
        while ahead or under_way:
            while ahead and (place := self._place(missing)) is not None:
                self._begin(ahead[0], place, background=False)
                under_way.append(ahead.popleft())
            reads = {key: self._reads[key][0] for key in under_way or self._reads}
            self._readers.wait(reads.values())
            for key in [key for key in under_way if reads[key].done]:
                under_way.remove(key)
                try:
                    self._finish(key, replaced[key])
                except Exception as error:
                    failed[missing.index(key)] = error
                    ahead.clear()
        if failed:
            first = failed.pop(min(failed))
            try:
                raise first
            finally:
                del first  # it refers to this frame, which would keep what it refers to

    def _place(self, missing: list[Key]) -> Place | None:
        """Where to read a miss to. What was read in the background and is not taken in yet goes for it."""
        staging = self._staged()
        place = staging.take(wait=False)
        if place is not None:
            return place
        for key, (read, place) in self._reads.items():
            if read.done and key not in missing:
                del self._reads[key]
                self._experts_read += read.error is None
                self._count_useless(key)
                return place
        return staging.take(wait=True)

    def _begin(self, key: Key, place: Place, background: bool) -> None:
        staging = self._staged()
        assert self.source is not None
        read = Read(background)
        for name, first, last in _spans(self.layout):
            read.add(read_part, self.source, *key, name, staging.ring, place.offset + first, place.offset + last)
        self._reads[key] = read, place
        try:
            self._readers.submit(read)
        except BaseException:
            if not read.queued:  # an interrupt may come later, and then it is read
                del self._reads[key]
                staging.idle.append(place)
            raise

    def _finish(self, key: Key, replaced: Key | None) -> None:
        """Copy what was read to the slot of an expert that goes, or to a free one."""
        read, place = self._reads.pop(key)
        staging = self._staged()
        layer, expert = key
        if read.error is not None:
            staging.idle.append(place)
            self._count_useless(key)
            kind = "" if isinstance(read.error, MetraleError) else f"{type(read.error).__name__}: "
            raise MetraleError(f"layer {layer}, expert {expert}: {kind}{read.error}") from read.error
        self._experts_read += 1
        slot = self._free.pop() if replaced is None else self._evict(replaced)
        try:
            staging.copy(place, slot, self.base.offset(slot * self.layout.slot_bytes))
        except BaseException:
            self._free.append(slot)
            raise
        self._resident[key] = self._changes[key] = slot

    def _staged(self) -> Staging:
        assert self._staging is not None  # there is a source
        return self._staging

    def _evict(self, key: Key) -> int:
        slot = self._resident.pop(key)
        self._changes[key] = -1
        self._evictions += 1
        self._count_useless(key)
        return slot

    def _count_useless(self, key: Key) -> None:
        """An expert goes. If it was prefetched, and not fetched since, that was of no use."""
        if key in self._unused:
            self._unused.remove(key)
            self._useless += 1

    def _take_in(self) -> None:
        """Make resident what has been read in the background, where that takes the slot of none in use."""
        for key in [key for key, (read, _) in self._reads.items() if read.done]:
            read, place = self._reads[key]
            if read.error is not None:
                del self._reads[key]
                self._staged().idle.append(place)
                self._count_useless(key)
                continue
            for replaced in self._replaced(1, set().union(*self._in_use.values())):
                self._finish(key, replaced)


def _key(key: AnyKey) -> Key:
    try:
        layer, expert = key
    except (TypeError, ValueError):
        refuse("keys", key, "pairs (layer, expert)")
    return integer("layer", layer, 0, SLOT_TABLE_LAYERS - 1), integer("expert", expert, 0, MAX_ROUTED - 1)


def _spans(layout: SlotLayout) -> list[tuple[str, int, int]]:
    """Each part of a slot with its first byte and the one after its last."""
    return list(zip(PARTS, (0, layout.up_offset, layout.down_offset),
                    (layout.up_offset, layout.down_offset, layout.slot_bytes), strict=True))  # fmt: skip
