# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sums, peaks and leaks of a capture, against looking at every record."""

from itertools import pairwise

from captures import backend, capture, entry, live, many
from hypothesis import given
from hypothesis import strategies as st

from metrale.audit import tables
from metrale.audit.packing import pack

LEDGER = [
    entry(1, 100, tag="weights", line=10),
    entry(2, 50, tag="act", line=20, freed_seq=3),
    entry(4, 70, tag="act", line=20, freed_seq=6),
    entry(5, 30, line=30, freed_seq=7),
    entry(8, 1000, kind="pinned", tag="staging", line=40, freed_seq=9),
    entry(10, 0, kind="stream", line=50),
    entry(11, 5000, kind="module", tag="gemv", line=60, leaked=False),
]


@st.composite
def ledgers(draw):
    """Births and deaths in any order, of any bytes."""
    entries, alive = [], []
    for seq in range(1, draw(st.integers(1, 40)) + 1):
        if alive and draw(st.booleans()):
            i = alive.pop(draw(st.integers(0, len(alive) - 1)))
            entries[i] = entries[i]._replace(freed_seq=seq, freed_ns=entries[i].time_ns + 1, leaked=False)
        else:
            kind = draw(st.sampled_from(["device", "managed", "pinned"]))
            alive.append(len(entries))
            entries.append(entry(seq, draw(st.integers(1, 64)), kind=kind, tag=draw(st.sampled_from("abc"))))
    return entries


def by(name):
    return {group.name: group for group in tables.groups(backend(LEDGER), name)}


def test_a_tag_has_what_it_allocated_and_the_most_that_it_held_at_once():
    act = by("tag")["act"]
    assert (act.count, act.nbytes, act.peak, act.at_peak, act.leaked) == (2, 120, 70, 70, 0)


def test_what_was_never_freed_is_counted_as_leaked():
    weights = by("tag")["weights"]
    assert (weights.leaked, weights.leaked_bytes) == (1, 100)


def test_allocations_without_a_tag_are_one_group():
    assert by("tag")["-"].nbytes == 30


def test_call_sites_are_lines():
    assert list(by("site"))[:2] == ["/home/me/train.py:40", "/home/me/train.py:10"]


def test_kinds_hold_every_record_and_other_groups_memory_alone():
    assert by("kind")["stream"].count == by("kind")["module"].count == 1
    assert sum(group.count for group in by("file").values()) == 5


def test_leaks_are_the_largest_first_and_hold_no_module():
    assert [e.seq for e in tables.leaks(backend(LEDGER))] == [1, 10]


def test_the_peak_set_is_what_lived_then_without_pinned_memory():
    assert [e.seq for e in tables.peak_set(backend(LEDGER))] == [1, 4, 5]


def test_counts_in_words():
    assert tables.count_words(LEDGER[:1] + LEDGER[5:6]) == "1 allocation, 100 bytes, 1 stream"
    assert tables.count_words([]) == ""


def test_the_tables_as_plain_values():
    facts = tables.facts(capture(LEDGER))["backends"][0]
    assert (facts["peak_bytes"], facts["allocations"]) == (200, 5)
    assert facts["by_tag"][0] == {
        **{"name": "staging", "count": 1, "nbytes": 1000, "peak": 1000},
        **{"at_peak": 0, "leaked": 0, "leaked_bytes": 0},
    }
    assert [(leak["seq"], leak["time_ns"], leak["freed_ns"]) for leak in facts["leaks"]] == [
        (1, 1000, None),
        (10, 10_000, None),
    ]


@given(ledgers())
def test_the_peak_sets_bytes_are_the_peak(entries):
    ledger = backend(entries)
    assert sum(e.nbytes for e in tables.peak_set(ledger)) == ledger.peak_bytes


@given(ledgers())
def test_the_timeline_has_the_live_bytes_after_each_event(entries):
    events = backend(entries).timeline
    assert [event.live for event in events] == [live(entries, event.seq) for event in events]


@given(ledgers())
def test_blocks_that_live_at_once_do_not_overlap(entries):
    offsets = pack(backend(entries))
    for seq in range(1, 41):
        alive = sorted((offsets[e.seq], e.nbytes) for e in entries if e.alive_at(seq))
        assert all(a + size <= b for (a, size), (b, _) in pairwise(alive))


def test_blocks_take_little_more_room_than_lives_at_the_peak():
    ledger = many(5000).backends[0]
    offsets = pack(ledger)
    assert max(offsets[e.seq] + e.nbytes for e in ledger.entries) < 1.3 * ledger.peak_bytes
