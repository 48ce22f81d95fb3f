# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fixture ``leak_check``, in test sessions of its own."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import metrale
import pytest

pytest_plugins = ["metrale.testing.pytest_plugin"]

@pytest.fixture(scope="session")
def gpu():
    with metrale.open("host") as gpu, gpu.buffer(16, "of the session"):
        yield gpu

@pytest.fixture
def weights(gpu):
    with gpu.buffer(16, "weights"):
        yield
"""


HEAD = """
import metrale
import pytest
from metrale.testing import FailingBackend
KEPT = []
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """``session(source)``: the result of a test session on a file ``test_it.py`` of that source."""
    for name in ("CI", "BUILD_NUMBER"):  # either makes pytest say each failure again in its summary, whole
        monkeypatch.delenv(name, raising=False)

    def run(source, conftest=CONFTEST, warnings="error"):
        pytester.makeconftest(conftest)
        pytester.makepyfile(test_it=HEAD + source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", warnings)

    return run


def test_each_thing_that_a_test_leaves_is_named_with_its_line(session):
    done = session("""
def test(gpu, leak_check):
    KEPT.append(gpu.buffer(1000, "kept"))
    gpu.alloc_host_pinned(64)
    stream = gpu.create_stream()
    gpu.create_event()
    gpu.begin_capture(stream)
    gpu.end_capture(stream)
    gpu.buffer(64).free()

@pytest.fixture(autouse=True, scope="session")
def swept(gpu):
    yield
    gpu.sweep_unreleased()
    KEPT.clear()
""")
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.re_match_lines_random([
        r"leak_check:",
        r"left on host \(\d+ cores\):",
        r"  1,000 bytes of device memory, kept, from .*test_it\.py:7",
        r"  64 bytes of pinned memory, from .*test_it\.py:8",
        r"  stream, from .*test_it\.py:9",
        r"  event, from .*test_it\.py:10",
        r"  graph, from .*test_it\.py:12",
    ])  # fmt: skip
    assert "of the session" not in done.stdout.str()
    assert done.stdout.str().count(", from ") == 5


def test_a_test_that_leaves_nothing_passes(session):
    done = session("""
def test(gpu, leak_check, weights):
    with gpu.buffer(64):
        gpu.destroy_stream(gpu.create_stream())

def test_with_an_older_fixture(gpu, weights, leak_check):
    pass

def test_with_a_backend_of_its_own(leak_check):
    with metrale.open("host") as own, own.buffer(16):
        pass

def test_with_a_cycle(gpu, leak_check):
    cycle = [gpu.buffer(64)]
    cycle.append(cycle)
""")
    done.assert_outcomes(passed=4)


def test_a_backend_that_is_left_open_is_named_with_what_is_on_it(session):
    done = session("""
def test(leak_check):
    KEPT.append(metrale.open("host"))
    KEPT[0].alloc(64, "tag")

def test_without(leak_check):
    KEPT.append(FailingBackend(metrale.open("host")))

def test_after(leak_check):
    for gpu in KEPT:
        gpu.sweep_unreleased()
        gpu.close()
""")
    done.assert_outcomes(passed=3, errors=2)
    done.stdout.re_match_lines([
        r"opened and not closed: <HostBackend host \(\d+ cores\), 64 bytes live>, with",
        r"  64 bytes of device memory, tag, from .*test_it\.py:8",
        r"opened and not closed: <(Host|Failing)Backend host \(\d+ cores\), 0 bytes live>$",
    ])  # fmt: skip
    assert done.stdout.str().count("opened and not closed") == 2


def test_of_a_test_that_failed_nothing_is_said(session):
    done = session(
        """
def test(gpu, leak_check):
    held = gpu.buffer(64)
    assert False
""",
        warnings="ignore",
    )  # of the session's backend, which finds it at its end
    done.assert_outcomes(failed=1)


def test_what_one_test_left_is_not_told_of_the_next(session):
    done = session("""
def test(gpu, leak_check):
    KEPT.append(gpu.buffer(64))

def test_next(gpu, leak_check):
    KEPT.pop().free()
""")
    done.assert_outcomes(passed=2, errors=1)


def test_the_fixture_may_be_imported(session):
    conftest = CONFTEST.replace(
        'pytest_plugins = ["metrale.testing.pytest_plugin"]', "from metrale.testing.pytest_plugin import leak_check"
    )
    done = session(
        """
def test(gpu, leak_check):
    KEPT.append(gpu.buffer(64))

def test_next(leak_check):
    KEPT.clear()
""",
        conftest,
    )
    done.assert_outcomes(passed=2, errors=1)
