# SPDX-License-Identifier: MIT OR Apache-2.0
"""Backends for tests: the host in three thread orders, and the CUDA device (mark ``gpu``) if there is one."""

import functools
import os
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

import metrale
from metrale.testing import FailingBackend

BACKENDS = {
    "host-forward": ("host", {"order": "forward"}),
    "host-reversed": ("host", {"order": "reversed"}),
    "host-shuffled": ("host", {"order": "shuffled", "seed": 20}),
    "cuda": ("cuda", {}),
}
ALL = [pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ()) for name in BACKENDS]
ONE_OF_EACH_KIND = [ALL[0], ALL[-1]]

# A backend serves all the examples of a property test.
settings.register_profile(
    "metrale", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("metrale")


@functools.cache
def cuda_device_count():
    from metrale.gpu.cuda import device_count

    return device_count()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and cuda_device_count() == 0:
        pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """Compiled kernels of the session go to a folder of its own, unless the environment names one."""
    with pytest.MonkeyPatch.context() as patch:
        if "METRALE_CACHE_DIR" not in os.environ:
            patch.setenv("METRALE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def opened(cache_folder):
    """`opened(name)`: the session's backend of that name. At the end each is closed and has nothing left."""
    backends = {}

    def get(name):
        if name not in backends:
            backends[name] = stack.enter_context(open_backend(name))
        return backends[name]

    with ExitStack() as stack:
        yield get
        assert [left for backend in backends.values() for left in backend.close()] == []


@pytest.fixture(params=ALL)
def gpu(request, opened):
    """Each backend in turn. A test leaves no allocation, stream or event behind."""
    yield from leaving_nothing(opened(request.param))


@pytest.fixture(params=ONE_OF_EACH_KIND)
def device(request, opened):
    """Each kind of backend in turn, for what the order of threads cannot touch."""
    yield from leaving_nothing(opened(request.param))


@pytest.fixture
def host(opened):
    """The host backend in forward order."""
    yield from leaving_nothing(opened("host-forward"))


@pytest.fixture
def cuda(opened):
    """The CUDA device. Tests that take it have the mark ``gpu``."""
    yield from leaving_nothing(opened("cuda"))


@pytest.fixture(params=ONE_OF_EACH_KIND)
def fresh(request):
    """A backend of the test's own, which may close it."""
    backend = open_backend(request.param)
    yield backend
    assert backend.close() == []


@pytest.fixture(params=ONE_OF_EACH_KIND)
def failing(request, opened):
    """A backend of the test's own whose driver calls the test can make fail. It leaves nothing behind."""
    opened(request.param)  # which keeps the device's context from being made anew
    backend = FailingBackend(open_backend(request.param))
    yield backend
    backend.heal()
    assert backend.close() == []


def open_backend(name):
    kind, options = BACKENDS[name]
    return metrale.open(kind, **options)


def leaving_nothing(backend):
    """Yield the backend; afterwards fail for, and take back, what was not there before."""
    with backend.audit("test") as scope:
        yield backend
    if scope.leaked:
        backend.sweep_unreleased()
    assert scope.leaked == []
