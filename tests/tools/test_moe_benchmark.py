# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/bench.py moe: every case can be launched, and the table is of what was found."""

import json
import sys

import pytest


@pytest.fixture
def moe(tool, monkeypatch):
    """The benchmark at small shapes, on the clock of nobody."""
    moe = tool("benchmarks.moe")
    kernels = sys.modules["benchmarks.kernels"]
    for module in (moe, kernels):
        for name, value in {"DIM": 512, "INTER": 256, "ROUTED": 8, "TOPK": 3}.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(moe, "SQUARE", 256)
    monkeypatch.setattr(kernels, "PAST_L2", 1 << 16)
    monkeypatch.setattr(kernels.Bench, "copy_rate", lambda self: 1e12)
    monkeypatch.setattr(kernels.Bench, "time", lambda self, launches: launches[0]() or 2.0)
    return moe


def test_every_case_is_launched_and_gives_its_memory_back(moe, host):
    facts = json.loads(json.dumps(moe.run(host)))
    assert host.live_bytes == 0
    lines = moe.table(facts).split("\n")
    assert len(lines) == 4 + len(facts["rows"])
    assert "| MMQ Q2_K, 2048 x 256 x 256 | 1.7 | 1.66 | 2.00 | 134 | 350 TOPS | llama.cpp 115 TOPS |" in lines
    assert {"layer, one token", "layer, 4096 tokens by mmq"} <= {row["case"] for row in facts["rows"]}
