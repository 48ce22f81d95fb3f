# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where to draw allocations: each gets bytes of a picture for its life, as an allocator would give them."""

from bisect import bisect_left, insort

from metrale.audit.capture import BackendCapture

__all__ = ["pack"]


def pack(backend: BackendCapture) -> dict[int, int]:
    """``{seq: offset}``: allocations that live at the same time never overlap. The tightest gap is taken."""
    offsets: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []  # (bytes, offset)
    by_start: dict[int, int] = {}
    by_end: dict[int, int] = {}
    top = 0

    def take(offset: int, nbytes: int) -> None:
        del gaps[bisect_left(gaps, (nbytes, offset))]
        del by_start[offset], by_end[offset + nbytes]

    def put(offset: int, nbytes: int) -> None:
        insort(gaps, (nbytes, offset))
        by_start[offset] = by_end[offset + nbytes] = nbytes

    for event in backend.timeline:
        nbytes = event.entry.nbytes
        if event.born:
            place = bisect_left(gaps, (nbytes, -1))
            if place == len(gaps):
                offsets[event.entry.seq], top = top, top + nbytes
                continue
            size, offset = gaps[place]
            take(offset, size)
            if size > nbytes:
                put(offset + nbytes, size - nbytes)
            offsets[event.entry.seq] = offset
            continue
        offset = offsets[event.entry.seq]
        before, after = by_end.get(offset, 0), by_start.get(offset + nbytes, 0)
        if before:
            take(offset - before, before)
        if after:
            take(offset + nbytes, after)
        offset, nbytes = offset - before, before + nbytes + after
        if offset + nbytes == top:
            top = offset
        else:
            put(offset, nbytes)
    return offsets
