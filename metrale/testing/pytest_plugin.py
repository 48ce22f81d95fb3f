# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fixture ``leak_check``: ``pytest_plugins = ["metrale.testing.pytest_plugin"]`` in a conftest.py."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from metrale.gpu import Allocation
from metrale.gpu.core import open_backends

__all__ = ["leak_check"]


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves memory, streams, events or graphs on any backend, or a backend open, and names the line
    that asked for each.

    What was there before the test, also from fixtures that came earlier, may stay. Of a test that has failed nothing is
    said: its traceback keeps what its functions held.
    """
    failed = request.session.testsfailed
    with ExitStack() as stack:
        scopes = {gpu.ledger: stack.enter_context(gpu.audit(gpu.name)) for gpu in open_backends()}
        yield
        if request.session.testsfailed > failed:
            return
        gc.collect()
        # A backend and a FailingBackend around it have one ledger.
        opened = {gpu.ledger: repr(gpu) for gpu in open_backends() if gpu.ledger not in scopes}
        said = []
        for scope in scopes.values():
            if scope.leaked:
                said += [f"left on {scope.name}:", *map(_line, scope.leaked)]
        for ledger, name in opened.items():
            left = ledger.left()
            said += [f"opened and not closed: {name}{', with' if left else ''}", *map(_line, left)]
    if said:
        pytest.fail("\n".join(["leak_check:", *said]), pytrace=False)


def _line(a: Allocation) -> str:
    what = f"{a.nbytes:,} bytes of {a.kind} memory" if a.nbytes else a.kind
    return f"  {what}{f', {a.tag}' if a.tag else ''}, from {a.site}"
