# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/bench.py arena, with small experts on the host."""

import json

import pytest

from metrale.moe_v41 import SlotLayout


@pytest.fixture
def arena(tool, monkeypatch):
    module = tool("benchmarks.arena")
    for name, value in {"ROUNDS": 1, "HITS": 10, "EXPERTS": 24, "READERS": (1, 3)}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_every_rate_and_time_is_measured(arena, host):
    facts = arena.run(host, SlotLayout(256, 256))
    assert facts["slot_bytes"] == 71168
    for name in ("read_gb_s", "misses_gb_s", "miss_us"):
        assert set(facts[name]) == {1, 3}
        assert min(facts[name].values()) > 0
    assert min(facts["copy_gb_s"], facts["hit_us"]) > 0


@pytest.mark.parametrize(("hit_us", "said"), [(10.0, "met"), (10.01, "not met")])
def test_the_table_is_that_of_the_results_read_back(arena, hit_us, said):
    facts = {
        "slot_bytes": 71168,
        "read_gb_s": {1: 10.0, 6: 40.0},
        "copy_gb_s": 50.0,
        "misses_gb_s": {1: 9.0, 6: 35.0},
        "miss_us": {1: 1234.5, 6: 600.0},
        "hit_us": hit_us,
    }
    text = arena.table(json.loads(json.dumps(facts)))
    assert "| 6 | 40.0 | 35.0 | 600 |" in text
    assert text.endswith(f"{hit_us:.2f} us of the host; target 10: {said}.")
