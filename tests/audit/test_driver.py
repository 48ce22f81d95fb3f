# SPDX-License-Identifier: MIT OR Apache-2.0
"""The driver's figure against the ledger's, line by line."""

import sys
from types import SimpleNamespace

import pytest

from metrale.audit import driver, foreign
from metrale.audit.driver import DriverAccount, Explanation, Line, explain
from metrale.errors import ArgumentError

MIB = 1 << 20


def held(ptr, nbytes, rounded, kind="device"):
    return SimpleNamespace(ptr=ptr, nbytes=nbytes, rounded=rounded, kind=kind)


def test_small_allocations_share_chunks_and_large_ones_have_their_own():
    live = [held(0, 100, 512), held(512, 513, 1024), held(2 * MIB, MIB, MIB), held(8 * MIB, 3 * MIB, 4 * MIB)]
    asked, rounding = driver._ledger(live)
    assert asked.nbytes == 100 + 513 + 4 * MIB
    assert asked.nbytes + rounding.nbytes == (2 + 2 + 4) * MIB


def test_pinned_and_managed_memory_is_not_the_devices():
    asked, rounding = driver._ledger([held(0, 100, 512, "pinned"), held(4 * MIB, 100, 512, "managed")])
    assert (asked.nbytes, rounding.nbytes) == (0, 0)


def test_torch_says_its_segments(monkeypatch):
    segments = [{"device": 0, "total_size": size} for size in (2 * MIB, 20 * MIB + 512)]
    cuda = SimpleNamespace(
        is_initialized=lambda: True, memory_snapshot=lambda: [*segments, {"device": 1, "total_size": 999}]
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert foreign.holdings(0) == {"torch": (22 * MIB + 512, 2 * MIB - 512)}


def test_what_is_not_loaded_holds_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert foreign.holdings(0) == {}


def test_an_explanation_is_a_table_and_plain_values():
    said = Explanation("H200", 1000, 300, (Line("context", 200, "NVML"), Line("unexplained", 100, "the rest")))
    assert said.unexplained == said.as_dict()["unexplained"] == 100
    head, *rows = str(said).splitlines()
    assert head.split()[:2] == ["300", "in"]
    assert [row.split()[:2] for row in rows] == [["200", "context"], ["100", "unexplained"]]


def test_another_process_that_grows_does_not_shrink_the_context():
    overhead = {"before": 600 * MIB, "foreign_before": 50 * MIB}
    context = driver._context(overhead, driver._others(600 * MIB, 590 * MIB))
    assert context == 540 * MIB
    later = driver._processes(context, driver._others(1700 * MIB, 590 * MIB))
    assert {line.name: line.nbytes for line in later} == {
        "other processes and the driver": 1110 * MIB, "context": 540 * MIB,
    }  # fmt: skip


def test_without_nvml_the_context_and_other_processes_are_one_line():
    context = driver._context({"before": 600 * MIB, "foreign_before": 0}, driver._others(700 * MIB, None))
    assert [line.nbytes for line in driver._processes(context, driver._others(900 * MIB, None))] == [600 * MIB]


def test_memory_of_the_host_is_not_the_drivers(host):
    with pytest.raises(ArgumentError, match="^gpu: got <HostBackend .*, allowed: an open CUDA backend"):
        explain(host)


@pytest.mark.gpu
def test_the_lines_are_what_the_driver_says_is_in_use(cuda):
    with cuda.buffer(50 * MIB + 1):
        said = explain(cuda)
        assert sum(line.nbytes for line in said.lines) == said.used == cuda.total_memory - cuda.free_memory


@pytest.mark.gpu
def test_an_allocation_adds_its_chunks_and_nothing_that_is_unexplained(cuda):
    before = {line.name: line.nbytes for line in explain(cuda).lines}
    buffers = [cuda.buffer(50 * MIB + 1), *(cuda.buffer(3000) for _ in range(2000))]
    after = {line.name: line.nbytes for line in explain(cuda).lines}
    for buffer in buffers:
        buffer.free()
    assert after["metrale: allocations"] - before["metrale: allocations"] == 50 * MIB + 1 + 2000 * 3000
    assert after["unexplained"] == before["unexplained"]


@pytest.mark.gpu
def test_what_grows_in_a_step_and_is_no_allocation_is_its_line(cuda):
    torch = pytest.importorskip("torch")
    torch.empty(1, device="cuda")
    account = DriverAccount(cuda)
    before = account.explain().unexplained
    with account.step("sorting"):
        torch.rand(1000, device="cuda").sort()
        torch.cuda.synchronize()
    said = account.explain()
    (line,) = [line for line in said.lines if line.name == "while: sorting"]
    assert line.nbytes >= 0
    assert said.unexplained == before
