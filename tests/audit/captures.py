# SPDX-License-Identifier: MIT OR Apache-2.0
"""Captures that no program left: of given allocations, or of many at random."""

import random

from metrale.audit.capture import BackendCapture, Capture, Entry, Process

START = 1_800_000_000_000_000_000


def entry(
    seq, nbytes, *, freed_seq=0, kind="device", tag=None, file="/home/me/train.py", line=1, leaked=None, ptr=None
):
    """A record whose events are a microsecond apart; one that is not freed has leaked."""
    return Entry(
        ptr=0x7F0000000000 + seq * 2**20 if ptr is None else ptr,
        nbytes=nbytes,
        rounded=nbytes,
        kind=kind,
        tag=tag,
        file=file,
        line=line,
        stream=None,
        seq=seq,
        time_ns=START + seq * 1000,
        freed_seq=freed_seq,
        freed_ns=START + freed_seq * 1000 if freed_seq else 0,
        freed_at=f"{file}:{line + 1000}" if freed_seq else None,
        leaked=freed_seq == 0 if leaked is None else leaked,
    )


def capture(*ledgers):
    """A capture of a backend for each list of records; peaks are counted here, event by event."""
    process = Process(["/usr/bin/python3", "train.py"], "/home/me", 4321, 1, "3.12.1", "0.1.0", START, START + 10**9)
    return Capture(process, [backend(entries) for entries in ledgers])


def backend(entries, peak=None):
    if peak is None:
        peak = max(((live(entries, e.seq), -e.seq) for e in entries), default=(0, 0))
    return BackendCapture("NVIDIA H200", "cuda", 150 * 10**9, peak[0], -peak[1], 0, list(entries))


def live(entries, seq):
    """Bytes of device and managed memory after an event, by looking at every record."""
    return sum(e.nbytes for e in entries if e.kind in ("device", "managed") and e.alive_at(seq))


def many(count, seed=0):
    """`count` allocations in a capture: layers' weights that stay, activations that come and go, a few leaks."""
    rng = random.Random(seed)
    seq, alive, made = 0, [], []
    peak, now = (0, 0), 0
    while len(made) < count:
        seq += 1
        if alive and rng.random() < 0.5 + 0.1 * (len(alive) > 300):
            old = alive.pop(rng.randrange(len(alive)))
            made[old] = made[old]._replace(freed_seq=seq, freed_ns=START + seq * 1000, freed_at="/home/me/train.py:99")
            made[old] = made[old]._replace(leaked=False)
            now -= made[old].nbytes
            continue
        part = rng.randrange(12)
        nbytes = rng.choice([512, 4096, 65536, 2**20, 3 * 2**20, 40 * 2**20])
        made.append(
            entry(seq, nbytes, tag=f"layer{part}.act", file=f"/home/me/part{part}.py", line=rng.randrange(1, 40))
        )
        now += nbytes
        peak = max(peak, (now, -seq))
        if rng.random() > 0.0005:
            alive.append(len(made) - 1)
    whole = capture([])
    return Capture(whole.process, [backend(made, peak)])
