# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sources and drivers that fail: the error says where, and the arena goes on."""

import itertools
import os
import shutil
import signal
import threading

import numpy as np
import pytest
from experts import PARTS, Experts, arena_of, blocks, contents, fetched
from layers import TINY

from metrale.errors import ArgumentError, CudaError, MetraleError
from metrale.formats.load import expert_source
from metrale.moe_v41 import ArrayExperts, ExpertArena, SlotLayout

KINDS = {
    "an OSError": (OSError(5, "Input/output error"), "OSError: .Errno 5. Input/output error"),
    "another error": (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    "an error of metrale": (MetraleError("gone"), "gone"),
    "an interrupt": (KeyboardInterrupt(), "KeyboardInterrupt: "),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("error", "said"), KINDS.values(), ids=KINDS)
def test_what_a_source_raises_names_layer_and_expert(device, error, said, part):
    with arena_of(device, 2) as (arena, source):
        source.fail[3, 5, part] = error
        with pytest.raises(MetraleError, match=f"^layer 3, expert 5: {said}$") as raised:
            arena.fetch([(3, 5)])
        assert raised.value.__cause__ is error


def test_a_short_read_names_layer_expert_and_bytes(device):
    with arena_of(device, 2) as (arena, source):
        source.short[3, 5, "down"] = 28159
        with pytest.raises(MetraleError, match="^layer 3, expert 5: down: the source gave 28159 bytes, needed: 28160$"):
            arena.fetch([(3, 5)])


def test_after_a_source_that_failed_the_same_call_works(device):
    with arena_of(device, 2) as (arena, source):
        source.fail[0, 1, "up"] = OSError()
        with pytest.raises(MetraleError):
            arena.fetch([(0, 0), (0, 1)])
        source.fail.clear()
        fetched(arena, [(0, 0), (0, 1)])


def test_an_expert_that_cannot_be_read_takes_no_slot_and_evicts_none(device):
    with arena_of(device, 2) as (arena, source):
        fetched(arena, [(0, 0), (0, 1)])
        source.fail[0, 2, "gate"] = OSError()
        with pytest.raises(MetraleError):
            arena.fetch([(0, 2)])
        assert sorted(arena.slots_of(0)) == [0, 1]


def test_after_a_source_that_failed_nothing_is_in_use(device):
    with arena_of(device, 2) as (arena, source):
        source.fail[0, 1, "gate"] = OSError()
        with pytest.raises(MetraleError):
            arena.fetch([(0, 0), (0, 1)])
        fetched(arena, [(0, 2), (0, 3)])


def test_after_a_failure_no_more_is_read(device):
    with arena_of(device, 4, staging=1) as (arena, source):
        source.fail[0, 1, "gate"] = OSError()
        with pytest.raises(MetraleError):
            arena.fetch([(0, 0), (0, 1), (0, 2), (0, 3)])
        assert {expert for _, expert, _ in source.seen} == {0, 1}


def test_a_source_that_keeps_the_memory_cannot_use_it_later(device):
    class Keeping(Experts):
        def read_into(self, layer, expert, part, memory):
            self.kept = memory
            return super().read_into(layer, expert, part, memory)

    with arena_of(device, 1, Keeping()) as (arena, source):
        arena.fetch([(0, 0)])
        with pytest.raises(ValueError, match="released memoryview"):
            source.kept[0] = 1


def test_an_interrupt_ends_the_wait_and_the_read_goes_on(device):
    with arena_of(device, 2, readers=3) as (arena, source):
        source.hold((0, 1))

        def interrupt(main):
            source.reading.acquire()
            for seconds in (0.02, 5, 5):  # Python misses a signal that comes as it is about to wait
                if came.wait(seconds):
                    return
                signal.pthread_kill(main, signal.SIGINT)

        came = threading.Event()
        thread = threading.Thread(target=interrupt, args=[threading.get_ident()])
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            arena.fetch([(0, 1)])
        came.set()
        thread.join()
        source.go.set()
        fetched(arena, [(0, 1), (0, 2)])
        assert source.seen.count((0, 1, "gate")) == 1


def test_threads_that_cannot_be_started_leave_the_arena_as_it_was(device, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with arena_of(device, 2, staging=2) as (arena, _):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    arena.fetch([(0, 1)])
        fetched(arena, [(0, 1), (0, 2)])


def test_the_first_key_that_failed_is_named(device):
    with arena_of(device, 4) as (arena, source):
        for expert in (1, 2, 3):
            source.fail[0, expert, "gate"] = OSError()
        source.hold((0, 1))
        source.go.set()
        with pytest.raises(MetraleError, match="expert 1"):
            arena.fetch([(0, 0), (0, 1), (0, 2), (0, 3)])


def test_what_a_failed_source_looked_at_is_freed_while_the_error_is_kept(device):
    class Failing:
        def read_into(self, layer, expert, part, memory):
            view = np.frombuffer(memory, np.uint8)
            raise OSError(f"at {len(view)}")

    with arena_of(device, 1, Failing()) as (arena, _):
        with pytest.raises(MetraleError) as raised:
            arena.fetch([(0, 0)])
    assert str(raised.value).startswith("layer 0, expert 0: OSError: at ")


def test_a_prefetch_that_fails_is_tried_again_by_fetch(device):
    with arena_of(device, 2) as (arena, source):
        source.fail[0, 1, "gate"] = OSError()
        assert arena.prefetch([(0, 1)]) == 1
        with pytest.raises(MetraleError, match="layer 0, expert 1"):
            for _ in range(2):
                arena.fetch([(0, 1)])
        source.fail.clear()
        fetched(arena, [(0, 1)])


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from-then-on"])
def test_after_a_driver_call_that_failed_the_same_steps_give_the_right_bytes(failing, forever):
    stream = failing.create_stream()

    def steps(arena):
        for experts in ((0, 1), (2, 1), (3, 4)):
            slots = arena.fetch([(0, e) for e in experts], stream)
            arena.release(stream)
            arena.take_changes(stream)
        return dict(zip(experts, slots, strict=True))

    for n in itertools.count(1):
        with arena_of(failing, 3, staging=2) as (arena, _):
            failing.failed.clear()
            failing.fail(n=n, forever=forever, error="CUDA_ERROR_LAUNCH_FAILED")
            try:
                steps(arena)
            except MetraleError as error:
                assert "made to fail" in str(error)
            failing.heal()
            arena.release(stream)
            for expert, slot in steps(arena).items():
                np.testing.assert_array_equal(contents(arena, slot, stream)[:4], blocks(0, expert, "gate")[:4])
            fetched(arena, [(0, 0), (0, 1)], stream)
        if not failing.failed:
            break
    failing.destroy_stream(stream)


def test_a_copy_that_failed_takes_no_slot(failing):
    with arena_of(failing, 1) as (arena, _):
        failing.fail("copy", error="CUDA_ERROR_LAUNCH_FAILED")
        with pytest.raises(CudaError, match="^copy, made to fail"):
            arena.fetch([(0, 0)])
        assert arena.slots_of(0) == {}
        fetched(arena, [(0, 0)])


# Sources


@pytest.fixture
def tiny_copy(tmp_path):
    return shutil.copy(TINY, tmp_path / "model.gguf")


def test_a_file_gives_the_bytes_of_its_tensors(device):
    from metrale.formats.gguf import GgufFile

    layout = SlotLayout(512, 256)
    with expert_source(TINY) as source, GgufFile(TINY) as gguf:
        assert source.layers == (0, 1)
        arena = ExpertArena(device, layout, 5, source)
        try:
            keys = [(0, 0), (1, 7), (1, 3), (0, 7)]
            for (layer, expert), slot in zip(keys, arena.fetch(keys), strict=True):
                found = np.empty(layout.slot_bytes, np.uint8)
                device.copy_d2h(arena.base.offset(slot * layout.slot_bytes), found)
                parts = [gguf.tensors[f"blk.{layer}.ffn_{p}_exps.weight"].slice(expert) for p in PARTS]
                assert bytes(found) == b"".join(parts)
        finally:
            arena.free()


def test_a_file_that_was_cut_short_is_an_error_of_its_expert(device, tiny_copy):
    with expert_source(tiny_copy) as source:
        arena = ExpertArena(device, SlotLayout(512, 256), 8, source)
        try:
            arena.fetch([(0, 0)])
            os.truncate(tiny_copy, os.path.getsize(tiny_copy) // 2)
            with pytest.raises(MetraleError, match=r"^layer 1, expert 7: .*model.gguf: tensor 'blk.1.ffn_.*the end of"):
                arena.fetch([(1, 7)])
            arena.release()
            arena.fetch([(0, 0), (0, 1)])
        finally:
            arena.free()


def test_a_closed_file_is_an_error_of_its_expert(device):
    source = expert_source(TINY)
    arena = ExpertArena(device, SlotLayout(512, 256), 8, source)
    source.close()
    try:
        with pytest.raises(MetraleError, match="layer 0, expert 1: .*tiny-v41.gguf: the file is closed"):
            arena.fetch([(0, 1)])
    finally:
        arena.free()


@pytest.mark.parametrize("make", [lambda: expert_source(TINY), lambda: arrays(2, 8)], ids=["file", "arrays"])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((2, 0), r"layer 2, expert 0: layer: got 2, allowed: a layer with experts \(0, 1\)"),
        ((1, 8), "layer 1, expert 8: expert: got 8, allowed: 0 to 7"),
    ],
)
def test_an_expert_that_a_source_does_not_have_is_named(device, make, key, message):
    source = make()
    arena = ExpertArena(device, SlotLayout(512, 256), 1, source)
    try:
        with pytest.raises(MetraleError, match=message):
            arena.fetch([key])
    finally:
        arena.free()
        if hasattr(source, "close"):
            source.close()


@pytest.mark.parametrize("make", [lambda: expert_source(TINY), lambda: arrays(1, 1)], ids=["file", "arrays"])
def test_a_source_of_another_shape_is_refused_at_the_read(device, make):
    source = make()
    try:
        with arena_of(device, 1, source) as (arena, _):
            with pytest.raises(
                MetraleError, match="layer 0, expert 0: memory: got '21504 bytes', allowed: 43008 bytes"
            ):
                arena.fetch([(0, 0)])
    finally:
        if hasattr(source, "close"):
            source.close()


def arrays(layers, experts):
    """Of the shape of the small model's."""
    parts = [
        np.zeros((experts, 256, 168), np.uint8),
        np.zeros((experts, 256, 168), np.uint8),
        np.zeros((experts, 512, 110), np.uint8),
    ]
    return ArrayExperts(dict.fromkeys(range(layers), tuple(parts)))


def test_arrays_give_their_bytes(device):
    parts = [np.stack([blocks(0, e, p) for e in range(3)]) for p in PARTS]
    with arena_of(device, 2, ArrayExperts({0: tuple(parts)})) as (arena, _):
        fetched(arena, [(0, 2), (0, 0)])


@pytest.mark.parametrize("bad", [np.zeros((2, 4), np.int8), np.zeros(4, np.uint8), np.zeros((4, 4), np.uint8)[:, ::2]])
def test_what_are_no_blocks_by_expert_are_refused(bad):
    good = np.zeros((2, 4), np.uint8)
    with pytest.raises(ArgumentError, match="layer 5: up: got .* allowed: contiguous uint8 .experts, ...."):
        ArrayExperts({5: (good, bad, good)})
