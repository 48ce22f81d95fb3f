# SPDX-License-Identifier: MIT OR Apache-2.0
"""ExpertArena with a source: what is in a slot, what may be evicted, and in what order streams use them."""

import numpy as np
import pytest
from experts import LAYOUT, Experts, arena_of, contents, fetched, resident, slot_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TINY, forward, running

from metrale.errors import ArgumentError, CaptureError, MetraleError
from metrale.formats.gguf import expert_source, load_moe_layer
from metrale.moe_v41 import ExpertArena, MoeV41, SlotLayout
from metrale.reference.bf16 import bf16_bits


@pytest.fixture
def streams(device):
    """Two streams of the test's own."""
    handles = [device.create_stream(), device.create_stream()]
    yield handles
    for handle in handles:
        device.abort_capture_if_active(handle)
        device.destroy_stream(handle)


def keys_of(*experts, layer=0):
    return [(layer, expert) for expert in experts]


def test_fetched_experts_are_in_the_slots_that_are_returned(device):
    with arena_of(device, 4) as (arena, _):
        keys = [(0, 3), (63, 1023), (5, 0)]
        slots = arena.fetch(keys)
        assert [bytes(contents(arena, slot)) for slot in slots] == [bytes(slot_bytes(*key)) for key in keys]


def test_fetched_experts_are_there_in_the_order_of_the_stream(device, streams):
    with arena_of(device, 4) as (arena, _):
        for stream in streams:
            fetched(arena, keys_of(1, 2, 3), stream)


def test_what_is_resident_is_not_read_again(device):
    with arena_of(device, 4) as (arena, source):
        first = fetched(arena, keys_of(0, 1))
        source.seen.clear()
        assert fetched(arena, keys_of(1, 0)) == first[::-1]
        assert source.seen == []


def test_more_misses_than_staging_places_are_all_read(device):
    with arena_of(device, 9, staging=1, readers=2) as (arena, _):
        fetched(arena, keys_of(*range(9)))


def test_a_repeated_key_has_one_slot_and_is_a_hit(device):
    with arena_of(device, 2) as (arena, _):
        first, second, again = fetched(arena, keys_of(0, 1, 0))
        assert (first == again, first == second) == (True, False)
        assert (arena.stats.hits, arena.stats.misses) == (1, 2)


def test_keys_may_be_an_array_of_integers(device):
    with arena_of(device, 2) as (arena, _):
        assert arena.fetch(np.array([[0, 7], [1, 7]])) == arena.fetch([(0, 7), (1, 7)])


def test_the_one_that_was_fetched_longest_ago_goes(device):
    with arena_of(device, 3) as (arena, _):
        fetched(arena, keys_of(0, 1, 2))
        fetched(arena, keys_of(0))
        fetched(arena, keys_of(3))
        assert sorted(arena.slots_of(0)) == [0, 2, 3]


def test_with_a_share_of_1_any_that_is_not_in_use_may_go(device):
    gone = set()
    for seed in range(30):
        with arena_of(device, 4, random_share=1, seed=seed) as (arena, _):
            fetched(arena, keys_of(0, 1, 2))
            arena.fetch(keys_of(3))
            fetched(arena, keys_of(4))
            gone |= {0, 1, 2, 3} - arena.slots_of(0).keys()
    assert gone == {0, 1, 2}


def test_the_same_seed_draws_the_same_victims(device):
    def run(seed):
        with arena_of(device, 8, random_share=1, seed=seed) as (arena, _):
            for expert in range(30):
                fetched(arena, keys_of(expert))
            return sorted(arena.slots_of(0))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_what_was_not_released_is_not_evicted(device):
    with arena_of(device, 3) as (arena, _):
        held = arena.fetch(keys_of(0, 1))
        for expert in range(2, 6):
            arena.fetch(keys_of(expert), stream=device.default_stream())
            assert [arena.slots_of(0).get(e) for e in (0, 1)] == held
            arena.release()
            arena.fetch(keys_of(0, 1))
        assert [bytes(contents(arena, slot)) for slot in held] == [bytes(slot_bytes(0, e)) for e in (0, 1)]


def test_a_stream_releases_what_was_fetched_for_it_alone(device, streams):
    with arena_of(device, 2) as (arena, _):
        arena.fetch(keys_of(0), streams[0])
        arena.fetch(keys_of(1), streams[1])
        arena.release(streams[1])
        arena.fetch(keys_of(2), streams[1])
        assert sorted(arena.slots_of(0)) == [0, 2]


def test_more_keys_than_slots_are_refused_and_nothing_is_read(device):
    with arena_of(device, 2) as (arena, source):
        with pytest.raises(ArgumentError, match="keys: got '3 experts', allowed: as many as there are slots, 2"):
            arena.fetch(keys_of(0, 1, 2))
        assert source.seen == []


def test_keys_beside_those_that_are_not_released_are_counted_with_them(device):
    with arena_of(device, 2) as (arena, _):
        arena.fetch(keys_of(0))
        with pytest.raises(ArgumentError, match="keys: got '2 experts beside 1 that are not released', allowed: .*, 2"):
            arena.fetch(keys_of(1, 2))
        fetched(arena, keys_of(0, 1))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([(64, 0)], "layer: got 64, allowed: an integer, 0 to 63"),
        ([(0, 1024)], "expert: got 1024, allowed: an integer, 0 to 1023"),
        ([(0, 1.5)], "expert: got 1.5, allowed: an integer, 0 to 1023"),
        ([7], r"keys: got 7, allowed: pairs \(layer, expert\)"),
        ([(1, 2, 3)], r"keys: got \(1, 2, 3\), allowed: pairs"),
    ],
)
def test_what_is_no_key_is_refused(device, keys, message):
    with arena_of(device, 2) as (arena, _):
        for call in (arena.fetch, arena.prefetch):
            with pytest.raises(ArgumentError, match=message):
                call(keys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random_share": -0.1}, r"random_share: got -0.1, allowed: 0 \(strict LRU\) to 1"),
        ({"random_share": 1.5}, "random_share: got 1.5, allowed: 0"),
        ({"random_share": float("nan")}, "random_share: got nan, allowed: 0"),
        ({"readers": 0}, "readers: got 0, allowed: an integer, 1 to 64"),
        ({"staging": 0}, "staging: got 0, allowed: an integer, 1 to 64"),
        ({"source": "model.gguf"}, r"source: got 'model.gguf', allowed: None, or an object with read_into\("),
    ],
)
def test_bad_settings_are_refused(device, options, message):
    with pytest.raises(ArgumentError, match=message):
        ExpertArena(device, LAYOUT, 2, **({"source": Experts()} | options))


def test_an_arena_without_a_source_has_what_was_loaded_and_no_more(device):
    arena = ExpertArena(device, LAYOUT, 2)
    try:
        data = slot_bytes(0, 3)
        arena.load(0, 3, *np.split(data, [LAYOUT.up_offset, LAYOUT.down_offset]))
        assert fetched(arena, keys_of(3)) == [0]
        with pytest.raises(MetraleError, match="layer 1, expert 4 is not in the arena, which has no source"):
            arena.fetch([(0, 3), (1, 4)])
        with pytest.raises(MetraleError, match="prefetch: the ExpertArena has no source"):
            arena.prefetch([(1, 4)])
    finally:
        arena.free()


def test_a_loaded_expert_goes_like_any_other_where_there_is_a_source(device):
    with arena_of(device, 1) as (arena, _):
        arena.load(0, 3, *np.split(slot_bytes(0, 3), [LAYOUT.up_offset, LAYOUT.down_offset]))
        fetched(arena, keys_of(4))
        fetched(arena, keys_of(3))


# Changes


def test_changes_are_the_last_for_each_key(device):
    with arena_of(device, 1) as (arena, _):
        fetched(arena, keys_of(5))
        fetched(arena, keys_of(6))
        fetched(arena, keys_of(5))
        assert sorted(arena.take_changes().tolist()) == [[0, 5, 0], [0, 6, -1]]


def test_changes_are_taken_once(device):
    with arena_of(device, 1) as (arena, _):
        fetched(arena, keys_of(5))
        arena.take_changes()
        assert arena.take_changes().shape == (0, 3)


def test_a_stream_that_took_the_changes_finds_the_experts_there(device, streams):
    with arena_of(device, 4) as (arena, _):
        arena.fetch(keys_of(0, 1, 2), streams[0])
        for layer, expert, slot in arena.take_changes(streams[1]).tolist():
            np.testing.assert_array_equal(contents(arena, slot, streams[1]), slot_bytes(layer, expert))


# Order of streams


def test_a_slot_is_written_after_the_work_that_was_released_and_read_after_that(device, streams):
    copy = np.empty(LAYOUT.slot_bytes, np.uint8)
    stream = streams[0]
    with arena_of(device, 1) as (arena, _), device.buffer(LAYOUT.slot_bytes) as kept, device.buffer(1 << 28) as large:
        for expert in range(1, 6):
            (slot,) = arena.fetch(keys_of(expert), stream)
            for _ in range(20):  # which keeps the stream busy while the next expert is read
                device.memset_async(large, expert, large.nbytes, stream)
            device.copy_d2d_async(arena.base.offset(slot * LAYOUT.slot_bytes), kept, LAYOUT.slot_bytes, stream)
            arena.release(stream)
            (slot,) = arena.fetch(keys_of(0), streams[1])
            np.testing.assert_array_equal(contents(arena, slot, streams[1]), slot_bytes(0, 0))
            arena.release(streams[1])
            device.copy_d2h_on_stream(kept, copy, stream)
            np.testing.assert_array_equal(copy, slot_bytes(0, expert))


def test_a_stream_that_is_captured_is_refused_and_its_capture_goes_on(device, streams):
    with arena_of(device, 2) as (arena, _), device.buffer(64) as buffer:
        fetched(arena, keys_of(0), streams[0])
        device.begin_capture(streams[0])
        for call in (lambda s: arena.fetch(keys_of(0), s), arena.release, arena.take_changes):
            with pytest.raises(CaptureError, match="is being captured: an ExpertArena serves work that is queued"):
                call(streams[0])
        device.memset_async(buffer, 0, 64, streams[0])
        device.destroy_graph(device.end_capture(streams[0]))
        fetched(arena, keys_of(0, 1), streams[0])


def test_a_stream_may_be_destroyed_once_it_was_released(device):
    with arena_of(device, 1) as (arena, _):
        for expert in range(4):
            stream = device.create_stream()
            fetched(arena, keys_of(expert), stream)
            device.destroy_stream(stream)


# With MoeV41


@pytest.mark.parametrize("selection", ["device", "host"])
def test_layers_that_share_an_arena_give_the_bits_of_layers_with_all_their_experts(device, selection):
    x = bf16_bits(np.random.default_rng(3).standard_normal(512))
    with expert_source(TINY) as source:
        shared = ExpertArena(device, SlotLayout(512, 256), 3, source)
        for layer in (0, 1, 0):
            with running(device, layer) as (moe, _):
                want = forward(device, moe, layer, x)
                picks = moe.routed(layer).picks
            shared.fetch([(layer, e) for e in picks])
            loaded = load_moe_layer(device, TINY, layer, shared)
            moe = MoeV41(device, loaded.cfg)
            moe.add_layer(layer, loaded.weights, shared)
            np.testing.assert_array_equal(forward(device, moe, layer, x, selection=selection), want)
            shared.release()
            moe.free()
            loaded.free()
        shared.free()


# Against a model of it

KEYS = st.tuples(st.integers(0, 1), st.integers(0, 5))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("fetch"), st.lists(KEYS, min_size=1, max_size=6), st.integers(0, 1)),
        st.tuples(st.just("release"), st.none(), st.integers(0, 1)),
        st.tuples(st.just("prefetch"), st.lists(KEYS, max_size=4), st.none()),
        st.tuples(st.just("changes"), st.none(), st.integers(0, 1)),
    ),
    max_size=30,
)
N_SLOTS = 5


@settings(max_examples=60)
@given(steps=STEPS, share=st.sampled_from([0, 0.5, 1]), staging=st.integers(1, 3), readers=st.integers(1, 3))
def test_any_sequence_of_calls_keeps_its_promises(device, streams, steps, share, staging, readers):
    in_use = {0: {}, 1: {}}  # by stream: key -> slot
    table = {}  # as a device's table would be
    asked, there = 0, {}
    with arena_of(device, N_SLOTS, random_share=share, staging=staging, readers=readers) as (arena, _):
        for call, keys, n in steps:
            if call == "fetch":
                distinct = set(keys) | in_use[0].keys() | in_use[1].keys()
                if len(distinct) > N_SLOTS:
                    with pytest.raises(ArgumentError, match="keys: got"):
                        arena.fetch(keys, streams[n])
                    continue
                slots = arena.fetch(keys, streams[n])
                in_use[n] |= dict(zip(keys, slots, strict=True))
                asked += len(keys)
            elif call == "release":
                arena.release(streams[n])
                in_use[n].clear()
            elif call == "prefetch":
                assert arena.prefetch(keys) <= max(0, staging - 1)
            else:
                for *key, slot in arena.take_changes(streams[n]).tolist():
                    table[tuple(key)] = slot
                assert {key: slot for key, slot in table.items() if slot >= 0} == resident(arena)
            there = resident(arena)
            assert len(set(there.values())) == len(there) <= N_SLOTS
            for stream, used in zip(streams, in_use.values(), strict=True):
                assert used.items() <= there.items()
                for key, slot in used.items():
                    np.testing.assert_array_equal(contents(arena, slot, stream), slot_bytes(*key))
        stats = arena.stats
    assert stats.hits + stats.misses == asked
    if not any(call == "prefetch" for call, *_ in steps):
        assert stats.bytes_read == stats.misses * LAYOUT.slot_bytes
        assert len(there) == stats.misses - stats.evictions
