# SPDX-License-Identifier: MIT OR Apache-2.0
"""examples/speculative_gdn.py: what it shows, and that it would notice."""

import importlib.util
from pathlib import Path

import pytest

from metrale.gdn import GdnVerifyPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "speculative_gdn.py"
ON = [pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ()) for name in ("host", "cuda")]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("speculative_gdn", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("mode", ["snapshot", "deferred"])
def test_text_and_states_are_those_of_plain_decoding(example, capsys, backend, mode):
    assert example.main(["--backend", backend, "--mode", mode]) == 0
    assert capsys.readouterr().out.count("text same, states same") == len(example.PROMPTS)


def test_drafts_are_accepted_and_rejected(example, device):
    _, accepted = example.speculate(device, "deferred", 40)
    assert 1.5 < accepted < example.STEP - 1


@pytest.mark.parametrize("mode", ["snapshot", "deferred"])
def test_a_pool_that_keeps_rejected_tokens_is_noticed(example, monkeypatch, capsys, mode):
    accept = GdnVerifyPool.accept

    def keep_all(pool, seq_ids, counts, **options):
        accept(pool, seq_ids, [options.get("tokens", pool.cfg.k_max)] * len(seq_ids), **options)

    monkeypatch.setattr(GdnVerifyPool, "accept", keep_all)
    assert example.main(["--backend", "host", "--mode", mode]) == 1
    assert "DIFFER" in capsys.readouterr().out
