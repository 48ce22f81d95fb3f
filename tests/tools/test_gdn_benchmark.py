# SPDX-License-Identifier: MIT OR Apache-2.0
"""tools/benchmarks/gdn.py: its bytes, its launches, its table and its chart. The timing needs a GPU."""

import json

import numpy as np
import pytest

from metrale.reference.bf16 import bf16_values
from metrale.reference.gdn import gated_delta_rule


@pytest.fixture
def gdn(tool):
    return tool("benchmarks.gdn")


@pytest.mark.parametrize(
    ("way", "batch", "tokens", "us"),
    [("snapshots", 32, 4, 79), ("snapshots", 32, 16, 269), ("snapshots", 128, 16, 1077), ("snapshots", 1, 4, 2.5)],
)
def test_floors_are_those_of_the_states_and_little_more(gdn, way, batch, tokens, us):
    """At the device copy's 4.24 TB/s, for 32 heads."""
    floor = gdn.Shape(32, "f32", batch, tokens).step_bytes(way) / 4.24e6
    assert us <= round(floor, 1) <= 1.03 * us


def test_a_deferred_step_of_128_sequences_and_16_tokens_moves_what_was_reckoned(gdn):
    assert gdn.Shape(32, "f32", 128, 16).step_bytes(gdn.STEP) == pytest.approx(932e6, rel=0.02)


def test_f16_halves_the_states_only(gdn):
    f32, f16 = (gdn.Shape(48, dtype, 8, 17) for dtype in ("f32", "f16"))
    assert f32.step_bytes(gdn.SNAPSHOTS) - f16.step_bytes(gdn.SNAPSHOTS) == 18 * f16.h_bytes


def a_row(gdn, us, way="snapshots", heads=32, dtype="f32", batch=32, tokens=16):
    return gdn.row(gdn.Shape(heads, dtype, batch, tokens), way, us, 4e12)


@pytest.mark.parametrize(("us", "met"), [(300.0, True), (300.5, False)])
def test_a_target_is_met_up_to_its_value(gdn, us, met):
    assert a_row(gdn, us)["met"] is met


@pytest.mark.parametrize("other", [{"heads": 48}, {"dtype": "f16"}, {"tokens": 17}])
def test_other_shapes_have_no_target(gdn, other):
    assert "target_us" not in a_row(gdn, 1.0, **other)


def facts(gdn, rows, missing=()):
    head = {"benchmark": "gdn", "gpu": "G", "driver": "1", "python": "3", "date": "2026-01-01", "commit": "c"}
    return head | {"copy_gb_per_s": 4000.0, "rows": rows, "not_measured": dict(missing)}


def test_a_line_of_the_table(gdn):
    text = gdn.table(facts(gdn, [a_row(gdn, 330.0)]))
    assert "| snapshots | 32 | f32 | 32 | 16 | 1153.6 | 288.4 | 330.0 | 1.14 | 3,496 | 441 | 300: not met |" in text


def test_a_peer_has_a_time_and_no_floor(gdn):
    text = gdn.table(facts(gdn, [a_row(gdn, 50.0, gdn.FLA)]))
    assert f"| {gdn.FLA} | 32 | f32 | 32 | 16 |  |  | 50.0 |  |  |  |  |" in text


def test_what_is_missing_is_said(gdn):
    text = gdn.table(facts(gdn, [], {gdn.FLA: "ModuleNotFoundError: No module named 'fla'"}))
    assert text.endswith(f"Not measured: {gdn.FLA}: ModuleNotFoundError: No module named 'fla'")


def test_the_lines_of_the_chart(gdn):
    rows = [a_row(gdn, us, batch=batch) for batch, us in ((1, 10.0), (32, 330.0))]
    rows += [a_row(gdn, 9.0, batch=8, tokens=4), a_row(gdn, 9.0, gdn.STEP, batch=8)]
    drawn = gdn.lines(facts(gdn, rows))
    assert drawn[gdn.SNAPSHOTS] == {1: 10.0, 32: 330.0}
    assert drawn["vLLM, 2026"] == {32: 441.0}
    assert drawn[f"{gdn.STEP}, floor"].keys() == {8}


def test_a_chart_of_earlier_results_needs_no_gpu(gdn, tool, tmp_path, capsys):
    earlier, chart = tmp_path / "earlier.json", tmp_path / "chart.svg"
    earlier.write_text(json.dumps(facts(gdn, [a_row(gdn, 330.0)])))
    tool("bench").main(["gdn", "--from", str(earlier), "--chart", str(chart)])
    assert "| snapshots | 32 | f32 | 32 | 16 |" in capsys.readouterr().out
    assert ">snapshots, floor<" in chart.read_text()


@pytest.fixture
def steps(gdn, tool, host, monkeypatch):
    """Of small states: `(arrays, its states at first, its inputs)`."""
    monkeypatch.setattr(gdn, "DIM", 8)
    monkeypatch.setattr(gdn, "K_HEADS", 1)
    bench = tool("benchmarks.kernels").Bench(host)
    arrays = gdn.Arrays(bench, gdn.Shape(2, "f32", 34, 3))
    h = arrays.h.numpy("float32").reshape(34, 2, 8, 8).copy()
    q, k = (x.numpy("uint16").reshape(34, 3, 1, 8) for x in (arrays.q, arrays.k))
    gate, beta = (x.numpy("float32").reshape(34, 3, 2) for x in (arrays.gate, arrays.beta))
    yield arrays, gated_delta_rule(h, q, k, arrays.v.numpy("uint16").reshape(34, 3, 2, 8), gate, beta)
    bench.release()


@pytest.mark.parametrize("way", ["snapshots", "verify", "verify_and_commit"])
def test_a_step_is_one_of_the_gated_delta_rule(steps, way):
    arrays, want = steps
    getattr(arrays, way)()
    out = bf16_values(arrays.out.numpy("uint16")).reshape(want.out.shape)
    np.testing.assert_allclose(out, want.out, rtol=2**-8, atol=1e-4)
    if way != "verify":
        last = arrays.h.numpy("float32").reshape(want.states[-1].shape)
        np.testing.assert_allclose(last, want.states[-1], rtol=1e-4, atol=1e-5)
