# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line, run as users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metrale.cli import layer as cli_layer
from metrale.cli import main
from metrale.formats import load

TINY = str(Path(__file__).resolve().parent.parent / "data" / "tiny-v41.gguf")


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, monkeypatch):
    monkeypatch.setenv("METRALE_BACKEND", request.param)
    return request.param


def test_info_names_the_backends_and_the_modules(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [b["kind"] for b in facts["backends"]][-1] == "host"
    assert {"gemv", "moe_v41", "kquant_moe", "causal_conv1d"} <= set(facts["modules"])


def test_info_prints_a_line_a_fact(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("metrale ")
    assert "\nhost " in out


@pytest.mark.parametrize("layer", ["0", "1"])
def test_demo_runs_tokens_within_bounds_and_leaves_no_memory(backend, layer, capsys):
    assert main(["demo", TINY, "--layer", layer, "--tokens", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["backend"], result["ok"], len(result["tokens"])) == (backend, True, 3)
    assert result["memory"]["live_bytes"] > 0
    assert (result["memory"]["live_bytes_after_free"], result["memory"]["live_allocs_after_free"]) == (0, 0)


def test_demo_without_a_model_runs_a_layer_of_random_weights(backend, capsys):
    assert main(["demo", "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "random weights" in out
    assert "0  bytes live in 0 allocations" in out


@pytest.mark.parametrize("layer", ["0", "1"])
def test_verify_finds_every_stage_in_bounds(backend, layer, capsys):
    assert main(["verify", TINY, "--layer", layer, "--tokens", "4", "--seed", "7", "--json"]) == 0
    stages = {s["stage"]: s for s in json.loads(capsys.readouterr().out)["stages"]}
    assert {"logits", "picks", "gate", "up", "swiglu", "down", "shared down", "sum", "layer"} <= stages.keys()
    assert all(s["ok"] for s in stages.values())


def test_verify_exits_1_and_names_the_stage_when_a_matrix_on_the_device_is_not_the_files(monkeypatch, capsys):
    upload = load.upload_moe_layer

    def with_damage(gpu, spec):
        loaded = upload(gpu, spec)
        layout = loaded.experts.layout
        for slot in range(spec.n_routed):  # one down block's scale, sign flipped
            at = loaded.experts.base.offset(slot * layout.slot_bytes + layout.down_offset + 109)
            byte = np.zeros(1, np.uint8)
            gpu.copy_d2h(at, byte)
            gpu.copy_h2d(byte ^ 0x80, at)
        return loaded

    monkeypatch.setattr(cli_layer, "upload_moe_layer", with_damage)
    monkeypatch.setenv("METRALE_BACKEND", "host")
    assert main(["verify", TINY, "--tokens", "1"]) == 1
    wrong = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "OUT OF BOUNDS" in line]
    assert wrong == ["down", "layer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "missing.gguf"], "missing.gguf"),
        (["demo", TINY, "--layer", "2"], "layer: got 2, allowed: 0..1"),
        (["verify", __file__], "magic"),
        (["kernels", "build", "--arch", "volta"], "arch: got 'volta', allowed"),
        (["kernels", "build", "--arch", "sm_90a", "moe"], "no kernel module 'moe'; nearest: moe_v41"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_exit_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("metrale ")
    assert message in captured.err


@pytest.mark.parametrize("arguments", [[], ["demo", "--tokens", "0"], ["verify"], ["verify", TINY, "--layer", "-1"]])
def test_a_command_line_that_makes_no_sense_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: metrale" in capsys.readouterr().err


def test_kernels_build_fills_the_cache_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path))
    assert main(["kernels", "build", "--arch", "sm_90a", "causal_conv1d"]) == 0
    assert "causal_conv1d" in capsys.readouterr().out
    assert [p.suffix for p in tmp_path.iterdir()] == [".cubin"]


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -P -m metrale demo --tokens 1 | true; echo ${{PIPESTATUS[0]}}"
    env = os.environ | {"METRALE_BACKEND": "host"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""
