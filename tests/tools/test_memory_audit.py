# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/memory_audit.py: what it compares, and that it sees what is wrong."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

import metrale
from metrale.moe_v41 import MoeV41Cfg


@pytest.fixture(scope="module")
def memory_audit(tool):
    return tool("memory_audit")


@pytest.fixture
def moe(memory_audit, monkeypatch):
    """`moe(method, body)`: replaces a method of the audited part; `body` gets the original first."""

    def change(method, body):
        part = memory_audit.PARTS["MoeV41"].build
        original = getattr(part, method)
        monkeypatch.setattr(part, method, lambda self, *args: body(original, self, *args))

    return change


@pytest.fixture
def ran(memory_audit, capsys):
    """`ran(*arguments)`: exit status and JSON of a run on the host."""

    def run(*arguments):
        status = memory_audit.main(["--backend", "host", "--json", *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


def wrong(facts, what="audit"):
    return facts["parts"]["MoeV41"][what]["wrong"]


def test_every_buffer_of_the_part_is_compared_and_as_its_formula_says(ran):
    status, facts = ran()
    rows = facts["parts"]["MoeV41"]["audit"]["buffers"]
    table = [
        f"MoeV41.{spec.name}" for spec in MoeV41Cfg(dim=512, inter=256, n_routed=8, topk=3, max_tokens=4).buffer_table()
    ]
    assert (status, {row["verdict"] for row in rows}) == (0, {"ok"})
    assert [row["tag"] for row in rows if row["tag"].startswith("MoeV41.")] == table
    assert len(rows) == len(table) + 6


def test_every_buffer_of_an_expert_arena_is_compared_and_as_its_formula_says(ran):
    status, facts = ran("ExpertArena", "--cycles", "5")
    rows = facts["parts"]["ExpertArena"]["audit"]["buffers"]
    assert (status, [(row["tag"], row["verdict"]) for row in rows]) == (
        0,
        [("ExpertArena.slots", "ok"), ("ExpertArena.staging", "ok")],
    )


def test_more_tokens_are_larger_buffers(ran):
    few, many = (ran("--max-tokens", n)[1]["parts"]["MoeV41"]["audit"]["ledger_bytes"] for n in ("1", "300"))
    assert few < many


def test_a_formula_that_gives_other_bytes_is_a_difference(ran, moe):
    moe("formulas", lambda original, self: original(self) | {"MoeV41.acc": "4 * max_tokens * dim + 1"})
    status, facts = ran()
    assert (status, wrong(facts)) == (1, ["MoeV41.acc: DIFFERS"])


def test_a_formula_without_a_buffer_is_a_difference(ran, moe):
    moe("formulas", lambda original, self: original(self) | {"MoeV41.more": "dim"})
    status, facts = ran()
    assert (status, wrong(facts)) == (1, ["MoeV41.more: NOT ON THE LEDGER"])


def test_a_buffer_without_a_formula_is_a_difference(ran, moe):
    moe("formulas", lambda original, self: {k: v for k, v in original(self).items() if k != "MoeV41.acc"})
    status, facts = ran()
    assert (status, wrong(facts)) == (1, ["MoeV41.acc: NO FORMULA"])


def test_a_stream_too_many_is_a_difference(ran, memory_audit, monkeypatch):
    part = memory_audit.PARTS["MoeV41"]
    monkeypatch.setitem(memory_audit.PARTS, "MoeV41", replace(part, handles={"event": 2}))
    status, facts = ran()
    assert (status, wrong(facts)) == (1, ["streams: 1, needed: 0"])


def leave_a_buffer(self):
    self.gpu.alloc(77, "forgotten")


def test_what_a_step_leaves_is_named(ran, moe):
    def step(original, self, way):
        original(self, way)
        if way == 0:
            leave_a_buffer(self)

    moe("step", step)
    status, facts = ran()
    assert status == 1
    assert wrong(facts)[0].startswith("left by the step: device of 77 bytes forgotten from ")
    assert __file__ in wrong(facts)[0]


def test_what_free_leaves_is_named(ran, moe):
    def free(original, self):
        original(self)
        leave_a_buffer(self)

    moe("free", free)
    status, facts = ran()
    assert status == 1
    assert [line.split(" from ")[0] for line in wrong(facts)] == ["left by free(): device of 77 bytes forgotten"]


def test_cycles_that_leave_nothing_are_counted(ran):
    status, facts = ran("--cycles", "5")
    cycles = facts["parts"]["MoeV41"]["cycles"]
    assert (status, cycles["cycles"], cycles["wrong"]) == (0, 5, [])


def test_the_first_cycle_that_leaves_something_is_named(ran, moe):
    calls = iter(range(100))

    def free(original, self):
        original(self)
        if next(calls) == 3:  # the audit's was the first
            leave_a_buffer(self)

    moe("free", free)
    status, facts = ran("--cycles", "5")
    assert status == 1
    assert wrong(facts, "cycles")[0].startswith("left by cycle 3: device of 77 bytes forgotten from ")


class Device:
    """A device on which each of the first `cycles` parts loses `nbytes`, of which no ledger knows."""

    kind = "cuda"

    def __init__(self, nbytes, cycles):
        self.free_memory, self.nbytes, self.cycles = 10_000, nbytes, cycles

    def audit(self, name):
        return nullcontext(SimpleNamespace(leaked=[]))

    def synchronize(self):
        pass

    def build(self, *_):
        if self.cycles > 0:
            self.cycles -= 1
            self.free_memory -= self.nbytes
        return SimpleNamespace(ways=(1,), step=lambda way: None, free=lambda: None)


@pytest.mark.parametrize(
    ("cycles", "words"),
    [
        (100, []),
        (101, ["the driver's free memory: 9,697 after 300 cycles, 3 bytes fewer than after 100"]),
        (300, ["the driver's free memory: 9,100 after 300 cycles, 600 bytes fewer than after 100"]),
    ],
)
def test_memory_that_the_driver_misses_after_the_first_hundred_cycles_is_told(memory_audit, cycles, words):
    device = Device(3, cycles)
    part = memory_audit.Part(weights=lambda shape: None, build=device.build, handles={})
    assert memory_audit.cycle(device, part, memory_audit.LEAST, 300)["wrong"] == words


def test_the_table_says_what_is_wrong(memory_audit, moe, capsys):
    moe("formulas", lambda original, self: original(self) | {"MoeV41.acc": "1 + dim"})
    assert memory_audit.main(["--backend", "host"]) == 1
    out = capsys.readouterr().out
    assert "\nWRONG  MoeV41.acc: DIFFERS\n" in out
    assert out.endswith("NOT AS IT SHOULD BE\n")


def test_an_error_is_one_line_on_stderr_and_exit_2(memory_audit, capsys):
    assert memory_audit.main(["--backend", "host", "--max-tokens", "0"]) == 2
    assert capsys.readouterr().err == "memory_audit: max_tokens: got 0, allowed: an integer, 1 to 65535\n"


@pytest.mark.parametrize("arguments", [["Missing"], ["--cycles", "-1"]])
def test_a_command_line_that_makes_no_sense_shows_the_usage(memory_audit, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        memory_audit.main(arguments)
    assert stop.value.code == 2
    assert "allowed" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_the_gpu_every_formula_holds_and_cycles_leave_nothing(memory_audit, capsys):
    assert memory_audit.main(["--backend", "cuda", "--cycles", "300", "--json"]) == 0
    cycles = json.loads(capsys.readouterr().out)["parts"]["MoeV41"]["cycles"]
    assert len(set(cycles["driver_free_bytes"])) == 1


@pytest.mark.gpu
def test_on_the_gpu_memory_that_passes_by_the_ledger_is_missed(memory_audit, moe, capsys):
    with metrale.open("cuda") as other:
        taken = []

        def step(original, self, way):
            original(self, way)
            taken.append(other.buffer(4 << 20))

        moe("step", step)
        status = memory_audit.main(["--backend", "cuda", "--cycles", "20", "--json"])
        for buffer in taken:
            buffer.free()
    assert status == 1
    assert wrong(json.loads(capsys.readouterr().out), "cycles")[0].startswith("the driver's free memory: ")
