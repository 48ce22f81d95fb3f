# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/bench.py startup: imports and the first kernel, each in a fresh interpreter."""

import pytest


@pytest.fixture
def startup(tool):
    return tool("benchmarks.startup")


def times(*measured):
    return {"processes": 3, "median_ms": measured[0], "min_ms": measured[1], "max_ms": measured[2]}


def facts(first_kernel, not_needed=()):
    imports = {"metrale": times(5, 4, 6), "cuda.core": {"not_measured": "E: none"}}
    modules = ["enum", "metrale", "metrale.gpu", "other.part", *not_needed]
    return {"imports": imports, "modules": modules, "not_needed": list(not_needed), "first_kernel": first_kernel}


def test_import_metrale_is_timed_and_leaves_neither_numpy_nor_cuda(startup):
    found = startup.child(startup.IMPORT, "metrale")
    assert found["ms"] > 0
    assert "metrale.gpu.builder" in found["modules"]
    assert not set(startup.NOT_NEEDED) & set(found["modules"])


def test_what_the_interpreter_has_anyway_is_not_what_a_package_leaves(startup):
    assert "sys" not in startup.child(startup.IMPORT, "json")["modules"]


def test_imports_take_turns_as_often_as_asked(startup, monkeypatch):
    asked = []
    monkeypatch.setattr(startup, "child", lambda code, package: asked.append(package) or {"ms": len(asked)})
    found = startup.imports(rounds=20)
    count = len(startup.PACKAGES)
    rounds = [tuple(asked[i : i + count]) for i in range(0, len(asked), count)]
    assert all(set(order) == set(startup.PACKAGES) for order in rounds)
    assert len(rounds) == 21
    assert len(set(rounds)) > 2
    assert {times["processes"] for times in found.values()} == {20}


def test_a_package_that_is_not_there_does_not_stop_the_others(startup, monkeypatch):
    monkeypatch.setattr(startup, "PACKAGES", ("no_such_package", "json"))
    found = startup.imports(rounds=1)
    assert found["no_such_package"] == {"not_measured": "ModuleNotFoundError: No module named 'no_such_package'"}
    assert found["json"]["processes"] == 1


def test_the_first_kernel_is_timed_from_where_open_ended(startup):
    found = startup.first_kernel("host", processes=1)
    assert found["open"]["processes"] == found["first_kernel"]["processes"] == 1
    assert found["first_kernel"]["median_ms"] > 0


def test_no_gpu_is_said(startup):
    reason = startup.first_kernel("gpu of another kind")["not_measured"]
    assert reason.startswith("metrale.errors.ArgumentError: kind: got 'gpu of another kind'")


@pytest.mark.parametrize(("slowest", "met"), [(150, True), (150.5, False)])
def test_the_slowest_process_has_to_meet_the_target(startup, monkeypatch, slowest, met):
    runs = iter([1000, 10, 10, slowest])  # the one that fills the cache does not count
    monkeypatch.setattr(startup, "child", lambda code, kind: {"open_ms": 500, "first_kernel_ms": next(runs)})
    found = startup.first_kernel("cuda", processes=3)
    assert found["met"] is met
    assert found["first_kernel"] == times(10, 10, slowest)


def test_the_table_has_what_was_measured_and_why_the_rest_was_not(startup):
    first = {"open": times(300, 200, 400), "first_kernel": times(20, 10, 160), "target_ms": 150, "met": False}
    text = startup.table(facts(first, ["numpy"]))
    assert "| `import metrale` | 3 | 5.0 | 4.0 | 6.0 |  |" in text
    assert "| `import cuda.core` | not measured: E: none |" in text
    assert "| first kernel | 3 | 20.0 | 10.0 | 160.0 | 150: not met |" in text
    assert "leaves 5 modules. Outside metrale and the standard library: numpy, other." in text
    assert text.endswith("Of numpy, cuda.bindings, cuda.core: numpy.")


def test_the_table_without_a_gpu_says_so(startup):
    assert "| first kernel | not measured: E: no GPU |" in startup.table(facts({"not_measured": "E: no GPU"}))
