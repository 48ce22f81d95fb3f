# SPDX-License-Identifier: MIT OR Apache-2.0
"""What MoeV41 and its weights refuse, and what they report after the fact."""

import re

import numpy as np
import pytest
from layers import TINY, running

from metrale.errors import ArgumentError, MetraleError
from metrale.formats.deepseek41 import moe_layer_spec
from metrale.formats.gguf import GgufFile, load_moe_layer
from metrale.formats.kquant import BF16, Q2_K, Q6_K
from metrale.formats.synthetic import random_moe_layer
from metrale.gpu.owner import Owner
from metrale.moe_v41 import ExpertArena, MoeV41, MoeV41Cfg, ResidentMat, RouterWeights, SlotLayout
from metrale.moe_v41._select import route_select

CFG = {"dim": 512, "inter": 256, "n_routed": 8, "topk": 3}
NAN = 0x7FC0
NO_INDEX = [-1, 1.5, 1.0, True, "1", None]


@pytest.fixture
def loaded(device):
    layer = load_moe_layer(device, TINY, 0)
    yield layer
    layer.free()


@pytest.fixture
def build(device):
    made = []

    def make(**change):
        made.append(MoeV41(device, MoeV41Cfg(**(CFG | change))))
        return made[-1]

    yield make
    for moe in made:
        moe.free()


def test_a_layer_that_was_not_added_is_refused(device, build, loaded):
    moe = build()
    moe.add_layer(0, loaded.weights, loaded.experts)
    with pytest.raises(ArgumentError, match=r"layer: got 1, allowed: a layer of add_layer \(0\)"):
        moe.forward(1, 16)


@pytest.mark.parametrize("layer", [-1, 1, 64])
def test_the_selection_of_a_layer_that_was_not_added_is_refused(build, loaded, layer):
    moe = build()
    moe.add_layer(0, loaded.weights, loaded.experts)
    with pytest.raises(ArgumentError, match=rf"layer: got {layer}, allowed: a layer of add_layer \(0\)"):
        moe.routed(layer)


def test_the_selection_of_a_layer_that_has_not_run_is_refused(build, loaded):
    moe = build()
    moe.add_layer(0, loaded.weights, loaded.experts)
    with pytest.raises(ArgumentError, match="layer: got 0, allowed: a layer that has run"):
        moe.routed(0)


def test_a_layer_that_was_added_again_has_not_run(device):
    with running(device, 0) as (moe, loaded), device.upload(np.full(512, 0x3F80, np.uint16)) as x:
        moe.forward(0, x)
        moe.add_layer(0, loaded.weights, loaded.experts)
        with pytest.raises(ArgumentError, match="layer: got 0, allowed: a layer that has run"):
            moe.routed(0)


def test_an_unknown_selection_is_refused(build, loaded):
    moe = build()
    moe.add_layer(0, loaded.weights, loaded.experts)
    with pytest.raises(ArgumentError, match="selection: got 'cpu', allowed: device or host"):
        moe.forward(0, 16, selection="cpu")


@pytest.mark.parametrize("layer", [*NO_INDEX, 64])
def test_what_is_no_row_of_the_slot_table_is_no_layer(build, loaded, layer):
    with pytest.raises(ArgumentError, match=f"layer: got {layer!r}, allowed: an integer, 0 to 63"):
        build().add_layer(layer, loaded.weights, loaded.experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_routed": 9}, r"weights: got 'router \(8, 512\)', allowed: router \(9, 512\)"),
        ({"inter": 512}, "experts: got 'slots of dim 512, inter 256', allowed: dim 512, inter 512"),
    ],
)
def test_weights_of_another_shape_are_refused(build, loaded, change, message):
    with pytest.raises(ArgumentError, match=message):
        build(**change).add_layer(0, loaded.weights, loaded.experts)


def test_an_unknown_buffer_is_refused_with_the_names(build):
    with pytest.raises(ArgumentError, match="name: got 'logit', allowed: logits, pred_logits"):
        build().buffer("logit")


def test_a_nan_in_the_input_raises_at_once_with_host_selection(device):
    x = np.full(512, NAN, np.uint16)
    with running(device, 1) as (moe, _), device.upload(x) as staged:
        with pytest.raises(MetraleError, match="layer 1, token 0: a router logit is NaN or infinite"):
            moe.forward(1, staged, selection="host")


def test_a_nan_in_the_input_raises_at_the_next_host_read_with_device_selection(device):
    x = np.full(512, NAN, np.uint16)
    with running(device, 1) as (moe, _), device.upload(x) as staged:
        moe.forward(1, staged)
        with pytest.raises(MetraleError, match="layer 1, token 0: a router logit is NaN or infinite"):
            moe.routed(1)


@pytest.mark.parametrize("selection", ["device", "host"])
def test_an_expert_that_is_not_resident_is_reported(device, build, loaded, selection):
    moe = build()
    with device.upload(np.full(512, 0x3F80, np.uint16)) as x:
        empty = ExpertArena(device, SlotLayout(512, 256), 1)
        try:
            moe.add_layer(0, loaded.weights, empty)
            with pytest.raises(MetraleError, match="layer 0, token 0: a picked expert is not resident"):
                moe.forward(0, x, selection=selection)
                moe.routed(0)
        finally:
            empty.free()


@pytest.mark.parametrize("selection", ["device", "host"])
def test_experts_that_come_after_add_layer_are_not_seen(device, build, loaded, selection):
    moe = build()
    late = ExpertArena(device, loaded.experts.layout, 8)
    with device.upload(np.full(512, 0x3F80, np.uint16)) as x, GgufFile(TINY) as gguf:
        spec = moe_layer_spec(gguf, 0)
        try:
            moe.add_layer(0, loaded.weights, late)
            for e in range(8):
                late.load(0, e, spec.gate.slice(e), spec.up.slice(e), spec.down.slice(e))
            with pytest.raises(MetraleError, match="layer 0, token 0: a picked expert is not resident"):
                moe.forward(0, x, selection=selection)
                moe.routed(0)
        finally:
            late.free()


@pytest.mark.parametrize(
    ("name", "value", "last"),
    [("layer", value, 63) for value in (*NO_INDEX, 64)] + [("expert", value, 1023) for value in (*NO_INDEX, 1024)],
)
def test_what_is_no_layer_or_expert_is_refused_by_the_arena(device, name, value, last):
    arena = ExpertArena(device, SlotLayout(256, 256), 1)
    try:
        with pytest.raises(ArgumentError, match=f"{name}: got {value!r}, allowed: an integer, 0 to {last}"):
            arena.load(**({"layer": 0, "expert": 0} | {name: value}), gate=b"", up=b"", down=b"")
    finally:
        arena.free()


def test_a_full_arena_refuses_the_next_expert(device):
    spec = random_moe_layer(0, dim=256, inter=256, n_routed=2, topk=1)
    arena = ExpertArena(device, SlotLayout(256, 256), 1)
    try:
        arena.load(0, 0, spec.gate.slice(0), spec.up.slice(0), spec.down.slice(0))
        with pytest.raises(MetraleError, match="all 1 slots are taken; layer 0, expert 1 does not fit"):
            arena.load(0, 1, spec.gate.slice(1), spec.up.slice(1), spec.down.slice(1))
    finally:
        arena.free()


def test_blocks_of_another_size_are_refused_before_a_slot_is_taken(device):
    spec = random_moe_layer(0, dim=256, inter=256, n_routed=1, topk=1)
    arena = ExpertArena(device, SlotLayout(256, 256), 1)
    try:
        with pytest.raises(ArgumentError, match="down: got '21504 bytes', allowed: 28160 bytes"):
            arena.load(0, 0, spec.gate.slice(0), spec.up.slice(0), spec.up.slice(0))
        assert arena.slots_of(0) == {}
    finally:
        arena.free()


@pytest.mark.parametrize("n_slots", [0, -1])
def test_an_arena_without_slots_is_refused(device, n_slots):
    with pytest.raises(ArgumentError, match=f"n_slots: got {n_slots}, allowed: 1 or more"):
        ExpertArena(device, SlotLayout(256, 256), n_slots)


@pytest.mark.parametrize(("dim", "inter", "name"), [(100, 256, "dim"), (256, 0, "inter")])
def test_slots_are_made_of_super_blocks(dim, inter, name):
    with pytest.raises(ArgumentError, match=f"{name}: got .* a positive multiple of 256"):
        SlotLayout(dim, inter)


def test_a_slot_of_the_real_model_has_12_810_240_bytes():
    assert SlotLayout(5120, 2304).slot_bytes == 12_810_240


def test_a_matrix_of_another_type_is_refused(device):
    with Owner(device, "test") as own, pytest.raises(ArgumentError, match="down: kind: got 'Q6_K', allowed: BF16"):
        ResidentMat.upload(own, "down", Q6_K, (256, 256), bytes(256 * 210))


def test_a_matrix_of_another_size_is_refused(device):
    with Owner(device, "test") as own, pytest.raises(ArgumentError, match="down: got '84 bytes', allowed: 168 bytes"):
        ResidentMat.upload(own, "down", Q2_K, (2, 256), bytes(84))


def test_a_shared_expert_whose_matrices_do_not_fit_is_refused(device):
    from metrale.moe_v41 import MoeV41LayerWeights

    own = Owner(device, "test")
    try:
        router = RouterWeights.upload(own, bytes(2 * 256 * 2), np.zeros(2), 256)
        square = ResidentMat.upload(own, "a", BF16, (256, 256), bytes(2 * 256 * 256))
        wide = ResidentMat.upload(own, "b", BF16, (256, 512), bytes(2 * 256 * 512))
        with pytest.raises(ArgumentError, match=r"shared expert: got .* allowed: gate and up \(inter, 256\)"):
            MoeV41LayerWeights(router, square, square, wide, own)
    finally:
        own.free()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": 7}, "bias: got '7 values', allowed: 8, one a logit"),
        ({"logits": 0, "bias": 0}, "n_routed: got 0, allowed: 1 to 1024"),
        ({"logits": 1025, "bias": 1025}, "n_routed: got 1025, allowed: 1 to 1024"),
        ({"topk": 0}, "topk: got 0, allowed: 1 to 8"),
        ({"topk": 9}, "topk: got 9, allowed: 1 to 8"),
        ({"logits": 64, "bias": 64, "topk": 33}, "topk: got 33, allowed: 1 to 32"),
        ({"topk": -1}, "topk: got -1, allowed: an integer, 0 to"),
        ({"topk": 1.0}, "topk: got 1.0, allowed: an integer, 0 to"),
    ],
)
def test_the_host_selection_checks_its_own_arguments(change, message):
    sizes = {"logits": 8, "bias": 8, "topk": 3} | change
    logits, bias = np.zeros(sizes["logits"], np.float32), np.zeros(sizes["bias"], np.float32)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        route_select(logits, bias, sizes["topk"], 1.0, 1.0, True)


def test_the_slot_that_stands_in_for_a_missing_expert_is_all_zeros_when_it_is_free(device):
    arena = ExpertArena(device, SlotLayout(256, 256), 2)
    try:
        slot = np.full(arena.layout.slot_bytes, 0xFF, np.uint8)
        device.copy_d2h(arena.base, slot)
        assert not slot.any()
    finally:
        arena.free()


def test_an_expert_is_loaded_once(device):
    spec = random_moe_layer(0, dim=256, inter=256, n_routed=1, topk=1)
    arena = ExpertArena(device, SlotLayout(256, 256), 2)
    try:
        arena.load(0, 0, spec.gate.slice(0), spec.up.slice(0), spec.down.slice(0))
        with pytest.raises(
            ArgumentError, match="expert: got 0, allowed: an expert of layer 0 that is not in the arena"
        ):
            arena.load(0, 0, spec.gate.slice(0), spec.up.slice(0), spec.down.slice(0))
    finally:
        arena.free()


@pytest.mark.parametrize("name", ["swiglu_limit", "shared_swiglu_limit"])
def test_a_layer_limit_below_zero_is_refused(device, name):
    from metrale.moe_v41 import MoeV41LayerWeights

    own = Owner(device, "test")
    try:
        router = RouterWeights.upload(own, bytes(2 * 256 * 2), np.zeros(2), 256)
        square = ResidentMat.upload(own, "a", BF16, (256, 256), bytes(2 * 256 * 256))
        with pytest.raises(ArgumentError, match=f"{name}: got -1.0, allowed: None, 0"):
            MoeV41LayerWeights(router, square, square, square, own, **{name: -1.0})
    finally:
        own.free()
