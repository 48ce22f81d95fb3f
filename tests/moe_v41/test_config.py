# SPDX-License-Identifier: MIT OR Apache-2.0
"""MoeV41Cfg: what it refuses, and the sizes of the buffers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import ArgumentError
from metrale.moe_v41 import MoeV41Cfg
from metrale.moe_v41.config import expert_warps

GOOD = {"dim": 512, "inter": 256, "n_routed": 8, "topk": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 300}, "dim: got 300, allowed: a positive multiple of 256"),
        ({"dim": 0}, "dim: got 0, allowed: a positive multiple of 256"),
        ({"inter": 128}, "inter: got 128, allowed: a positive multiple of 256"),
        ({"topk": 0}, r"topk: got 0, allowed: an integer, 1 to 8"),
        ({"topk": 9}, r"topk: got 9, allowed: an integer, 1 to 8"),
        ({"topk": 33, "n_routed": 64}, r"topk: got 33, allowed: an integer, 1 to 32"),
        ({"n_routed": 1025}, "n_routed: got 1025, allowed: an integer, 1 to 1024"),
        ({"n_routed": 8.0}, "n_routed: got 8.0, allowed: an integer, 1 to 1024"),
        *[
            ({"max_tokens": bad}, f"max_tokens: got {bad}, allowed: an integer, 1 to 65535")
            for bad in (0, 2.5, True, 65_536)
        ],
        ({"gate_temp": float("inf")}, "gate_temp: got inf, allowed: more than 0, and finite"),
        ({"route_scale": float("nan")}, "route_scale: got nan, allowed: a finite number"),
        ({"gate_temp": 0.0}, "gate_temp: got 0.0, allowed: more than 0"),
        ({"gate_temp": float("nan")}, "gate_temp: got nan, allowed: more than 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit: got -1.0, allowed: 0"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(change, message):
    with pytest.raises(ArgumentError, match=message):
        MoeV41Cfg(**(GOOD | change))


@pytest.mark.parametrize(("text", "warps"), [(None, 8), ("2", 2), ("4", 4), ("8", 8)])
def test_the_environment_picks_the_warps_of_the_expert_gemv(monkeypatch, text, warps):
    if text is None:
        monkeypatch.delenv("METRALE_DS41_EXPERT_WARPS", raising=False)
    else:
        monkeypatch.setenv("METRALE_DS41_EXPERT_WARPS", text)
    assert expert_warps() == warps


@pytest.mark.parametrize("text", ["", "3", "eight", "16"])
def test_other_warps_are_refused_with_the_three_that_work(monkeypatch, text):
    monkeypatch.setenv("METRALE_DS41_EXPERT_WARPS", text)
    with pytest.raises(ArgumentError, match=f"METRALE_DS41_EXPERT_WARPS: got '{text}', allowed: 2, 4, 8"):
        expert_warps()


@given(
    dim=st.integers(1, 20).map(lambda n: 256 * n),
    inter=st.integers(1, 9).map(lambda n: 256 * n),
    n_routed=st.integers(1, 1024),
    max_tokens=st.integers(1, 4096),
    data=st.data(),
)
def test_every_formula_gives_the_bytes_beside_it(dim, inter, n_routed, max_tokens, data):
    topk = data.draw(st.integers(1, min(n_routed, 32)))
    cfg = MoeV41Cfg(dim=dim, inter=inter, n_routed=n_routed, topk=topk, max_tokens=max_tokens)
    words = {"dim": dim, "inter": inter, "n_routed": n_routed, "topk": topk, "max_tokens": max_tokens}
    words |= {"me": max(max_tokens, topk), "rows": max_tokens * topk}

    def padded(n, step):
        return (n + step - 1) // step * step

    functions = {
        "max": max,
        "min": min,
        "mmq_act_bytes": lambda m, k: padded(m, 128) * padded(k, 256) // 128 * 144,
        "q8_1_rows_bytes": lambda m, k: m * k // 32 * 36,
    }
    for spec in cfg.buffer_table():
        assert eval(spec.formula, functions, words) == spec.nbytes, spec.name
