# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line, run as users run it."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metrale.cli import demo as cli_demo
from metrale.cli import engram as cli_engram
from metrale.cli import layer as cli_layer
from metrale.cli import main
from metrale.errors import MetraleError
from metrale.formats import load
from metrale.reference.bf16 import bf16_bits

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


def test_info_names_the_packages_that_a_run_needs(capsys):
    assert main(["info", "--json"]) == 0
    packages = json.loads(capsys.readouterr().out)["packages"]
    assert packages.keys() == {"cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "numpy"}


def test_the_tokens_of_a_seed_are_the_same_whatever_their_number():
    some = list(itertools.islice(cli_layer.tokens(3, 8), 4))
    np.testing.assert_array_equal(some, bf16_bits(np.random.default_rng(3).standard_normal((4, 8))))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_infinitely_far(bad):
    got = np.array([1.0, bad])
    assert cli_layer.largest_difference(got, np.ones(2)) == cli_layer.relative_l2(got, np.ones(2)) == np.inf


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


WAYS = pytest.mark.parametrize(
    "way", [["--batch", "3"], ["--slots", "4"], ["--graph"], ["--batch", "2", "--slots", "8", "--graph"]], ids=" ".join
)


@WAYS
@pytest.mark.parametrize("model", [[TINY, "--layer", "1"], []], ids=["a file", "random weights"])
def test_demo_in_other_ways(backend, model, way, capsys):
    assert main(["demo", *model, "--tokens", "4", "--json", *way]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], len(result["tokens"])) == (True, 4)
    assert (result["arena"] is None) == ("--slots" not in way)
    assert result["memory"]["live_allocs_after_free"] == 0


@WAYS
def test_verify_in_other_ways(backend, way, capsys):
    assert main(["verify", TINY, "--tokens", "5", "--json", *way]) == 0
    stages = {stage["stage"] for stage in json.loads(capsys.readouterr().out)["stages"] if stage["ok"]}
    batch = way[1] if way[0] == "--batch" else "1"
    end = ", graph" if "--graph" in way else ""
    wanted = {f"{batch} by gemv{end}"} if batch != "1" or end else set()
    wanted |= {f"{batch} by mmq{end}"} if batch != "1" else set()
    assert wanted <= stages
    assert {stage for stage in stages if " by " in stage} == wanted


def test_demo_refuses_fewer_slots_than_picks(monkeypatch, capsys):
    monkeypatch.setenv("METRALE_BACKEND", "host")
    assert main(["demo", TINY, "--slots", "2"]) == 2
    assert "experts: got '2 slots', allowed: at least one token's picks, 3" in capsys.readouterr().err


def fails_after(calls, error):
    """`run_tokens` that raises `error` instead of a further call."""
    left = itertools.count(calls, -1)
    run_tokens = cli_demo.run_tokens

    def run(*arguments):
        if next(left) == 0:
            raise error
        return run_tokens(*arguments)

    return run


def test_demo_takes_tokens_one_at_a_time_however_many(monkeypatch, capsys):
    monkeypatch.setenv("METRALE_BACKEND", "host")
    monkeypatch.setattr(cli_demo, "run_tokens", fails_after(3, MetraleError("the fourth")))
    assert main(["demo", "--tokens", "1000000000000"]) == 2
    assert capsys.readouterr().err == "metrale demo: the fourth\n"


@pytest.mark.parametrize(("error", "words"), [(MemoryError(), "out of memory"), (MemoryError("no room"), "no room")])
def test_memory_that_runs_out_is_an_error_like_others(monkeypatch, capsys, error, words):
    monkeypatch.setenv("METRALE_BACKEND", "host")
    monkeypatch.setattr(cli_demo, "run_tokens", fails_after(0, error))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == f"metrale demo: {words}\n"


def test_an_infinite_error_is_null_in_json(monkeypatch, capsys):
    monkeypatch.setenv("METRALE_BACKEND", "host")
    monkeypatch.setattr(cli_demo, "relative_l2", lambda got, expected: float("inf"))
    assert main(["demo", "--tokens", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tokens"][0]["error"] is None


@pytest.mark.parametrize("layer", ["0", "1"])
def test_verify_finds_every_stage_in_bounds(backend, layer, capsys):
    assert main(["verify", TINY, "--layer", layer, "--tokens", "4", "--seed", "7", "--json"]) == 0
    stages = {s["stage"]: s for s in json.loads(capsys.readouterr().out)["stages"]}
    assert {"logits", "picks", "gate", "up", "swiglu", "down", "shared down", "sum", "layer"} <= stages.keys()
    assert all(s["ok"] for s in stages.values())


ENGRAM_STAGES = {"engram ids", "engram rows", "engram kv", "engram kv, many", "engram streams"}


@pytest.mark.parametrize(("layer", "stages"), [("0", set()), ("1", ENGRAM_STAGES)])
def test_verify_checks_the_engram_of_a_layer_that_has_one(backend, layer, stages, capsys):
    assert main(["verify", TINY, "--layer", layer, "--tokens", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stages"]
    assert {s["stage"] for s in found if s["stage"].startswith("engram")} == stages


@pytest.mark.parametrize(("layer", "has_one"), [("0", False), ("1", True)])
def test_demo_runs_the_engram_of_a_layer_that_has_one(backend, layer, has_one, capsys):
    assert main(["demo", TINY, "--layer", layer, "--tokens", "2", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert ["engram_error" in token for token in tokens] == [has_one] * 2


@pytest.mark.parametrize("command", ["verify", "demo"])
def test_damage_to_the_engrams_weights_is_found(command, monkeypatch, capsys):
    upload = load.upload_engram_layer

    def with_damage(gpu, spec, **options):
        loaded = upload(gpu, spec, **options)
        gpu.copy_h2d(np.full(4 * spec.dim, 7, np.float32), loaded.weights.qk)
        return loaded

    monkeypatch.setattr(cli_engram, "upload_engram_layer", with_damage)
    monkeypatch.setenv("METRALE_BACKEND", "host")
    assert main([command, TINY, "--layer", "1", "--tokens", "1"]) == 1
    out = capsys.readouterr().out
    assert out.count("OUT OF BOUNDS") == 1


def test_verify_exits_1_and_names_the_stage_when_a_matrix_on_the_device_is_not_the_files(monkeypatch, capsys):
    upload = load.upload_moe_layer

    def with_damage(gpu, spec, experts):
        loaded = upload(gpu, spec, experts)
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
