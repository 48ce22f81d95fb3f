# SPDX-License-Identifier: MIT OR Apache-2.0
"""Construction and teardown of MoeV41 and of its weights. What a failure leaves: tests/testing."""

import pytest
from layers import forward, running

from metrale.errors import MetraleError
from metrale.moe_v41 import MoeV41, MoeV41Cfg

CFG = MoeV41Cfg(dim=512, inter=256, n_routed=8, topk=3, max_tokens=5)
CYCLES = 1000


def held(gpu):
    state = gpu.snapshot()
    return len(state["allocations"]) + len(state["streams"]) + len(state["events"])


def test_the_ledger_has_every_buffer_of_the_table_with_its_tag_and_size(device):
    moe = MoeV41(device, CFG)
    have = {a.tag: a.nbytes for a in device.ledger.live()}
    moe.free()
    assert have == {f"MoeV41.{spec.name}": max(spec.nbytes, 16) for spec in CFG.buffer_table()}


def test_construction_takes_a_side_stream_and_two_events_and_free_gives_them_back(device):
    moe = MoeV41(device, CFG)
    state = device.snapshot()
    assert (len(state["streams"]), len(state["events"])) == (1, 2)
    moe.free()
    assert held(device) == 0


def test_buffers_are_booked_to_the_line_that_built_the_part(device):
    moe = MoeV41(device, CFG)
    files = {a.file for a in device.ledger.live()}
    moe.free()
    assert files == {__file__}


def test_a_second_free_does_nothing(device):
    moe = MoeV41(device, CFG)
    moe.free()
    moe.free()
    assert held(device) == 0


def test_free_after_close_does_nothing(fresh):
    moe = MoeV41(fresh, CFG)
    with pytest.warns(ResourceWarning, match="MoeV41"):
        fresh.close()
    moe.free()


@pytest.mark.parametrize(
    "use",
    [
        lambda moe: moe.forward(0, 16),
        lambda moe: moe.out_ptr(),
        lambda moe: moe.routed(0),
        lambda moe: moe.buffer("acc"),
    ],
)
def test_use_after_free_says_so(device, use):
    moe = MoeV41(device, CFG)
    moe.free()
    with pytest.raises(MetraleError, match="the MoeV41 has been freed"):
        use(moe)


def test_a_thousand_layers_built_and_freed_leave_nothing(device, request):
    free_after_first = None
    for _ in range(CYCLES):
        with running(device, 0):
            assert held(device) > 0
        assert (held(device), device.live_bytes) == (0, 0)
        if device.kind == "cuda":
            free_after_first = free_after_first or device.free_memory
    if device.kind == "cuda":
        assert device.free_memory == free_after_first


def test_timing_of_the_spans_is_kept_when_asked_for(device, monkeypatch):
    monkeypatch.setenv("METRALE_DS41_DIAG", "1")
    with running(device, 0) as (moe, loaded):
        x = [0x3F80] * loaded.cfg.dim
        import numpy as np

        forward(device, moe, 0, np.array(x, np.uint16))
        assert set(moe.last_timing) == {"route", "routed", "shared"}
        assert all(ms > 0 for ms in moe.last_timing.values())
