# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shared expert on the side stream: what waits for what."""

import numpy as np
import pytest
from layers import running

from metrale import ops
from metrale.errors import MetraleError
from metrale.gpu.host import HostBackend

LAUNCHES = ["kquant_mmvq_experts_w", "kquant_mmvq_w", "moe_v41_sum_rows"]


class Recorded(HostBackend):
    """Keeps the calls that order streams."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def record_event(self, event, stream=None):
        self.calls.append(("record", event, stream))
        super().record_event(event, stream)

    def stream_wait_event(self, stream, event):
        self.calls.append(("wait", event, stream))
        super().stream_wait_event(stream, event)


@pytest.fixture
def step():
    """`step()` runs a token; gives the side stream, the caller's, and the calls that ordered them."""
    with Recorded() as gpu, running(gpu, 0) as (moe, _), gpu.upload(np.full(512, 0x3F80, np.uint16)) as x:
        (side,) = gpu.snapshot()["streams"]

        def run(expected_error=None):
            if expected_error is None:
                moe.forward(0, x)
            else:
                with pytest.raises(MetraleError, match=expected_error):
                    moe.forward(0, x)
            return side, gpu.default_stream(), gpu.calls

        yield run


def test_the_side_stream_starts_after_the_callers_and_the_callers_goes_on_after_it(step):
    side, stream, calls = step()
    begin, end = calls[0][1], calls[2][1]
    assert calls == [("record", begin, stream), ("wait", begin, side), ("record", end, side), ("wait", end, stream)]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_callers_stream_waits_for_the_side_stream_after_an_error_too(step, monkeypatch, launch):
    def fail(*_):
        raise MetraleError("made to fail")

    monkeypatch.setattr(ops, launch, fail)
    side, stream, calls = step("made to fail")
    end = calls[-1][1]
    assert calls[-2:] == [("record", end, side), ("wait", end, stream)]
