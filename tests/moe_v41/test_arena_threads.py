# SPDX-License-Identifier: MIT OR Apache-2.0
"""An arena's reader threads: prefetches in the background, and how they end."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from experts import LAYOUT, Experts, arena_of, contents, fetched, resident, slot_bytes
from processes import output_of

from metrale.errors import MetraleError
from metrale.moe_v41 import ExpertArena


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "metrale-expert-reader"]


def until(true):
    """Wait until ``true()``."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def taken_in(arena):
    """Who is resident after a call that takes in what has been read."""
    arena.take_changes()
    return set(resident(arena))


def read_through(arena):
    """Wait until nothing is being read, and take nothing in."""
    until(lambda: all(read.done for read, _ in arena._reads.values()))


def test_a_prefetched_expert_is_resident_once_it_was_read(device):
    with arena_of(device, 4) as (arena, _):
        assert arena.prefetch([(0, 1), (1, 2)]) == 2
        until(lambda: taken_in(arena) == {(0, 1), (1, 2)})
        fetched(arena, [(0, 1), (1, 2)])
        stats = arena.stats
    assert (stats.hits, stats.misses, stats.prefetches_useful, stats.prefetches_useless) == (2, 0, 2, 0)


def test_an_expert_that_was_read_in_the_background_is_a_hit_though_it_is_not_taken_in_yet(device):
    with arena_of(device, 4) as (arena, source):
        arena.prefetch([(0, 1)])
        read_through(arena)
        fetched(arena, [(0, 1), (0, 2)])
        assert len(source.seen) == 6
        assert (arena.stats.hits, arena.stats.misses, arena.stats.prefetches_useful) == (1, 1, 1)


def test_release_and_fetch_evict_none_for_what_was_read_in_the_background(device):
    with arena_of(device, 2) as (arena, _):
        fetched(arena, [(0, 0), (0, 1)])
        arena.prefetch([(0, 2)])
        read_through(arena)
        fetched(arena, [(0, 0)])
        assert set(resident(arena)) == {(0, 0), (0, 1)}


def test_a_prefetched_expert_is_read_once_though_it_is_fetched_meanwhile(device):
    with arena_of(device, 4) as (arena, source):
        source.hold((0, 1))
        arena.prefetch([(0, 1)])
        source.reading.acquire()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(fetched, arena, [(0, 1)])
            assert not done.done()
            source.go.set()
            done.result()
        assert sorted(source.seen) == [(0, 1, "down"), (0, 1, "gate"), (0, 1, "up")]
        assert (arena.stats.misses, arena.stats.bytes_read) == (1, LAYOUT.slot_bytes)


@pytest.mark.parametrize("n_readers", [2, 3, 6])
def test_a_miss_does_not_wait_for_a_prefetch(device, n_readers):
    with arena_of(device, 4, readers=n_readers, staging=3) as (arena, source):
        source.hold((0, 1), (0, 2), (0, 3))
        assert arena.prefetch([(0, 1), (0, 2), (0, 3)]) == 2
        source.reading.acquire()
        fetched(arena, [(0, 7), (0, 8), (0, 9)])
        assert not source.go.is_set()


def test_a_prefetched_expert_that_is_waited_for_does_not_wait_for_others(device):
    with arena_of(device, 4, readers=2, staging=3) as (arena, source):
        source.hold((0, 1))
        assert arena.prefetch([(0, 1), (0, 2)]) == 2
        source.reading.acquire()
        fetched(arena, [(0, 2)])
        assert not source.go.is_set()


def test_a_prefetch_that_cannot_be_read_is_useless(device):
    with arena_of(device, 4) as (arena, source):
        source.fail[0, 1, "gate"] = OSError()
        arena.prefetch([(0, 1)])
        until(lambda: taken_in(arena) or arena.stats.prefetches_useless)
        assert arena.slots_of(0) == {}


def test_a_prefetch_leaves_a_staging_place_and_passes_over_what_is_there(device):
    with arena_of(device, 4, staging=3) as (arena, source):
        fetched(arena, [(0, 0)])
        source.hold((0, 1), (0, 2))
        assert arena.prefetch([(0, 0), (0, 1), (0, 1), (0, 2), (0, 3)]) == 2
        assert arena.prefetch([(0, 3)]) == 0


def test_an_unused_prefetch_that_is_evicted_is_useless(device):
    with arena_of(device, 1) as (arena, _):
        arena.prefetch([(0, 1)])
        until(lambda: taken_in(arena))
        fetched(arena, [(0, 2)])
        assert (arena.stats.prefetches_useful, arena.stats.prefetches_useless) == (0, 1)


def test_a_prefetch_that_was_read_waits_for_a_slot_that_is_not_in_use(device):
    with arena_of(device, 1) as (arena, source):
        arena.fetch([(0, 0)])
        arena.prefetch([(0, 1)])
        until(lambda: len(source.seen) == 6)
        assert taken_in(arena) == {(0, 0)}
        arena.release()
        until(lambda: taken_in(arena) == {(0, 1)})


def test_what_was_prefetched_and_is_not_taken_in_yet_makes_room_for_a_miss(device):
    with arena_of(device, 4, staging=2) as (arena, _):
        arena.prefetch([(0, 1)])
        read_through(arena)
        fetched(arena, [(0, 2), (0, 3), (0, 4)])
        assert sorted(arena.slots_of(0)) == [2, 3, 4]
        assert arena.stats.prefetches_useless == 1


def test_changes_of_a_prefetch_come_with_the_copy(device):
    stream = device.create_stream()
    with arena_of(device, 2) as (arena, _):
        arena.prefetch([(0, 1)])
        changes = []
        until(lambda: changes.extend(arena.take_changes(stream).tolist()) or changes)
        ((layer, expert, slot),) = changes
        np.testing.assert_array_equal(contents(arena, slot, stream), slot_bytes(layer, expert))
    device.destroy_stream(stream)


def test_threads_that_fetch_together_get_their_experts(device):
    streams = [device.create_stream() for _ in range(4)]
    with arena_of(device, 9) as (arena, _):

        def work(n):
            rng = np.random.default_rng(n)
            for _ in range(25):
                fetched(arena, [(n % 2, int(e)) for e in rng.choice(20, 2, replace=False)], streams[n])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert arena.stats.hits + arena.stats.misses == 4 * 25 * 2
    for stream in streams:
        device.destroy_stream(stream)


# How they end


def test_free_ends_the_threads(device):
    with arena_of(device, 2, readers=3) as (arena, _):
        arena.fetch([(0, 0)])
        assert len(readers()) == 3
    assert readers() == []


def test_free_waits_for_what_is_being_read_and_reads_no_more(device):
    with arena_of(device, 4, readers=2, staging=3) as (arena, source):
        source.hold((0, 1), (0, 2))
        arena.prefetch([(0, 1), (0, 2)])
        source.reading.acquire()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(arena.free)
            time.sleep(0.05)
            assert not done.done()
            source.go.set()
            done.result()
        assert len(source.seen) == 1


def test_free_ends_a_fetch_that_waits(device):
    with arena_of(device, 4, readers=1) as (arena, source):
        source.hold((0, 1))
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(arena.fetch, [(0, 1), (0, 2)])
            source.reading.acquire()
            freeing = pool.submit(arena.free)
            time.sleep(0.05)
            source.go.set()
            freeing.result()
            with pytest.raises(MetraleError, match="layer 0, expert 1: the ExpertArena has been freed"):
                waiting.result()


def test_the_last_reference_gives_everything_back(device):
    arena = ExpertArena(device, LAYOUT, 2, Experts())
    arena.fetch([(0, 0)])
    del arena
    state = device.snapshot()
    assert (state["allocations"], state["streams"], state["events"], readers()) == ([], {}, {}, [])


def test_the_last_reference_may_go_in_a_thread_of_its_own(device):
    class Dropping(Experts):
        def read_into(self, *part):
            super().read_into(*part)
            arenas.clear()

    source = Dropping()
    source.hold((0, 1))
    arenas = [ExpertArena(device, LAYOUT, 2, source, readers=2)]
    arenas[0].prefetch([(0, 1)])
    source.go.set()
    until(lambda: not arenas and not readers() and device.snapshot()["allocations"] == [])


@pytest.mark.parametrize("use", ["fetch", "prefetch"])
def test_use_after_free_says_so(device, use):
    with arena_of(device, 2) as (arena, _):
        pass
    with pytest.raises(MetraleError, match="the ExpertArena has been freed"):
        getattr(arena, use)([(0, 0)])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_close_waits_for_what_is_being_read(fresh):
    with arena_of(fresh, 2) as (arena, source):
        source.hold((0, 1))
        arena.prefetch([(0, 1)])
        source.reading.acquire()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(fresh.close)
            time.sleep(0.05)
            assert not done.done()
            source.go.set()
            done.result()
        for call in (lambda: arena.fetch([(0, 1)]), arena.release, arena.take_changes):
            with pytest.raises(MetraleError, match="is closed"):
                call()


def test_a_forked_child_has_no_arena(device):
    code = """
        import os, sys, warnings, numpy as np, metrale
        from metrale.moe_v41 import ArrayExperts, ExpertArena, SlotLayout
        # Python 3.12 warns of threads: that a fork among them goes well is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        layout = SlotLayout(256, 256)
        sizes = layout.up_offset, layout.up_offset, layout.slot_bytes - layout.down_offset
        source = ArrayExperts({0: [np.zeros((2, n), np.uint8) for n in sizes]})
        with metrale.open(sys.argv[1]) as gpu:
            arena = ExpertArena(gpu, layout, 2, source)
            arena.fetch([(0, 0)])
            child = os.fork()
            if child == 0:
                for call in (lambda: arena.fetch([(0, 0)]), lambda: arena.fetch([(0, 1)]), arena.release,
                             lambda: arena.prefetch([(0, 1)])):
                    try:
                        call()
                    except metrale.errors.MetraleError as error:
                        assert "was opened before fork()" in str(error), error
                    else:
                        raise AssertionError
                arena.free()
                del arena
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            arena.release()
            arena.fetch([(0, 1)])
            arena.free()
        print("well")
    """
    assert output_of(code, device.kind) == "well\n"


@pytest.mark.parametrize("last", ["", "gpu.close()", "del arena", "arena.free()"])
def test_a_program_ends_though_an_expert_is_being_read(device, last):
    code = f"""
        import sys, threading, time, warnings, metrale
        from metrale.moe_v41 import ExpertArena, SlotLayout
        warnings.simplefilter("ignore", ResourceWarning)
        begun = threading.Event()
        class Slow:
            def read_into(self, layer, expert, part, memory):
                begun.set()
                time.sleep(0.3)
                memory[:] = bytes(memory.nbytes)
        gpu = metrale.open(sys.argv[1])
        arena = ExpertArena(gpu, SlotLayout(256, 256), 2, Slow())
        arena.prefetch([(0, 0), (0, 1)])
        begun.wait()
        {last}
        print("well")
    """
    from processes import python

    done = python(code, device.kind)
    assert (done.returncode, done.stdout) == (0, "well\n")
    assert done.stderr == "" or done.stderr.count("\n") == 1, done.stderr  # one line tells of what was left
