# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whatever driver call fails, nothing is left behind, and afterwards all works: for everything that takes memory,
streams, events or graphs. On the host every single call fails in turn, on a GPU a sample."""

import gc
import importlib
import inspect
import itertools
import pkgutil
import sys

import pytest
from constructors import CONSTRUCTORS

import metrale
from metrale.errors import MetraleError
from metrale.gpu import GpuBackend
from metrale.gpu.buffer import OwnedMemory
from metrale.testing import FailingBackend

pytestmark = pytest.mark.filterwarnings("error")

ERROR = "CUDA_ERROR_LAUNCH_FAILED"
FAULTS = {
    "allocation": {"call": "alloc"},
    "allocation-of-an-ill-device": {"call": "alloc", "error": ERROR},
    "any": {"call": "any", "error": ERROR},
}
KINDS = {"host": {}, "host-redzone": {"redzone": True}, "cuda": {}}


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.gpu if kind == "cuda" else ()) for kind in KINDS])
def opening(request, opened, monkeypatch):
    """``opening()``: a backend of that kind, of which nothing is loaded yet; closed at the end with nothing left."""
    kind = request.param
    if kind == "host-redzone":  # a destructor that cannot look at the red zone says so
        monkeypatch.setattr(sys, "unraisablehook", lambda told: None)
    if kind == "cuda":
        opened("cuda")  # which keeps the device's context from being made anew each time

    def fresh():
        return FailingBackend(metrale.open(kind.removesuffix("-redzone"), **KINDS[kind]))

    fresh.numbers = itertools.count(1) if kind != "cuda" else sample()
    return fresh


def sample():
    n, step = 1, 1
    while True:
        yield n
        n, step = n + step, step + 1


def held(gpu):
    state = gpu.snapshot()
    return {
        "allocations": [a["seq"] for a in state["allocations"]],
        **{kind: sorted(state[kind]) for kind in ("streams", "events", "graphs")},
        "captured": gpu.stream_is_capturing(),
    }


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_that_fails_leaves_nothing_and_then_works(opening, name, fault, forever):
    make, give_back = CONSTRUCTORS[name]
    for n in opening.numbers:
        with opening() as gpu:
            before = held(gpu)
            gpu.fail(n=n, forever=forever, **FAULTS[fault])
            try:
                thing, said = make(gpu), None
            except MetraleError as error:
                said = str(error)
            gpu.heal()
            if gpu.failed.total() == 0:
                give_back(gpu, thing)
                break
            assert said, f"call {n} failed in silence: {gpu.failed}"
            assert FAULTS[fault].get("error", "allocating ") in said
            gpu.synchronize()  # what a copy uses of which nothing is known is kept until then
            settle(gpu, before)
            assert held(gpu) == before, f"left by a failure of call {n}, {gpu.failed}"
            give_back(gpu, make(gpu))
            assert held(gpu) == before


@pytest.mark.parametrize("name", [name for name in CONSTRUCTORS if name not in ("kernel", "begin_capture")])
def test_a_release_that_fails_once_is_told_and_leaves_nothing_in_the_end(opening, name):
    make, give_back = CONSTRUCTORS[name]
    for n in opening.numbers:
        with opening() as gpu:
            before = held(gpu)
            thing = make(gpu)
            gpu.failed.clear()
            gpu.fail("release", n=n, error=ERROR)
            try:
                give_back(gpu, thing)
            except MetraleError as error:
                assert ERROR in str(error)
            else:
                assert gpu.failed.total() == 0, f"release {n} failed in silence: {gpu.failed}"
                gpu.heal()
                break
            gpu.heal()
            if held(gpu) != before:
                give_back(gpu, thing)
            del thing
            settle(gpu, before)
            assert held(gpu) == before, f"left by a failure of release {n}, {gpu.failed}"


def settle(gpu, before):
    """What errors refer to that refer to each other goes with them."""
    if held(gpu) != before:
        gc.collect()


def classes():
    for module in pkgutil.walk_packages(metrale.__path__, "metrale."):
        if module.name not in ("metrale.__main__", "metrale.gpu.libmetrale_host"):
            for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if found.__module__.startswith("metrale."):
                    yield found


def test_every_class_that_has_something_to_free_is_among_the_constructors():
    with FailingBackend(metrale.open("host")) as gpu:
        made = set()
        for make, give_back in CONSTRUCTORS.values():
            thing = make(gpu)
            made |= {type(part) for part in getattr(thing, "parts", [thing])}
            give_back(gpu, thing)
    owners = {found for found in classes() if hasattr(found, "free") and not issubclass(found, GpuBackend)}
    assert owners - {OwnedMemory} <= made
