# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights and experts belong to their makers: MoeV41 runs on them while they are there, and not after."""

from dataclasses import replace

import numpy as np
import pytest
from layers import TINY, running

import metrale
from metrale.errors import ArgumentError, MetraleError
from metrale.formats.gguf import load_moe_layer
from metrale.moe_v41 import MoeV41LayerWeights

PARTS = pytest.mark.parametrize("part", ["weights", "experts"])


@PARTS
def test_freed_parts_are_not_added(device, part):
    with running(device, 0) as (moe, loaded):
        getattr(loaded, part).free()
        with pytest.raises(MetraleError, match=f"layer 1: its {part} have been freed"):
            moe.add_layer(1, loaded.weights, loaded.experts)


@PARTS
@pytest.mark.parametrize("selection", ["device", "host"])
def test_a_layer_whose_parts_were_freed_does_not_run(device, part, selection):
    with running(device, 0) as (moe, loaded), device.upload(np.full(512, 0x3F80, np.uint16)) as x:
        getattr(loaded, part).free()
        with pytest.raises(MetraleError, match=f"layer 0: its {part} have been freed"):
            moe.forward(0, x, selection=selection)


@PARTS
def test_parts_of_another_backend_are_refused(device, part):
    with running(device, 0) as (moe, loaded), metrale.open("host") as other:
        foreign = load_moe_layer(other, TINY, 0)
        parts = {"weights": loaded.weights, "experts": loaded.experts} | {part: getattr(foreign, part)}
        with pytest.raises(ArgumentError, match=f"{part}: backend: got <HostBackend .*, allowed: the MoeV41's own, <"):
            moe.add_layer(0, **parts)
        foreign.free()


def test_a_freed_arena_takes_no_expert(device):
    loaded = load_moe_layer(device, TINY, 0)
    loaded.free()
    with pytest.raises(MetraleError, match="the ExpertArena has been freed"):
        loaded.experts.load(0, 0, b"", b"", b"")


def test_a_loaded_layer_gives_its_experts_back_though_its_weights_fail(host, monkeypatch):
    def fail(weights):
        raise MetraleError("made to fail")

    loaded = load_moe_layer(host, TINY, 0)
    with monkeypatch.context() as patch, pytest.raises(MetraleError, match="made to fail"):
        patch.setattr(MoeV41LayerWeights, "free", fail)
        loaded.free()
    assert loaded.experts.own.freed
    loaded.free()


@pytest.mark.parametrize("part", [lambda weights: weights, lambda weights: weights.router])
def test_weights_compare_by_identity(host, part):
    loaded = load_moe_layer(host, TINY, 0)
    held = part(loaded.weights)
    assert held == held
    assert held != replace(held)
    loaded.free()
