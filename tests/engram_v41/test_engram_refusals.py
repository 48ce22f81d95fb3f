# SPDX-License-Identifier: MIT OR Apache-2.0
"""What EngramV41 refuses, before it launches anything."""

import re
from dataclasses import replace

import numpy as np
import pytest
from engram_layers import Arrays, made, rows_of

import metrale
from metrale.engram_v41 import EngramV41, EngramV41LayerWeights
from metrale.engram_v41.weights import upload_qk
from metrale.errors import ArgumentError, MetraleError
from metrale.gpu.owner import Owner

ARRAYS = Arrays(0, dim=32, hc=2, cols=3)
NARROW = Arrays(0, dim=32, hc=2, cols=3, head_dim=40)
SHAPE = {"dim": 32, "hc": 2, "head_dim": 256, "cols": 3, "eps": 1e-6, "max_tokens": 4}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("dim", 0, "an integer, 1 to 2147483647"),
        ("dim", 32.0, "an integer, 1 to 2147483647"),
        *[("hc", value, "an integer, 1 to 4") for value in (0, 5, True)],
        ("head_dim", 0, "an integer, 1 to 2147483647"),
        ("cols", -1, "an integer, 1 to 2147483647"),
        *[("eps", value, "0 or more, finite") for value in (-1e-6, float("inf"), float("nan"))],
        ("max_tokens", 0, "an integer, 1 to 2147483647"),
    ],
)
def test_a_shape_that_makes_no_sense(device, name, value, allowed):
    with pytest.raises(ArgumentError, match=re.escape(f"{name}: got {value!r}, allowed: {allowed}")):
        EngramV41(device, **SHAPE | {name: value})


def refused(engram, gpu, message, layer=0, tokens=1, error=ArgumentError):
    """`apply` raises, and neither streams nor kv have changed."""
    pattern = np.full((4, 2, 32), 1.5, np.float32)
    gpu.memset(engram.kv_ptr(), 0x3F, 2 * 4 * engram.out_features)
    with gpu.upload(pattern) as streams:
        with pytest.raises(error, match=f"^{message}"):
            engram.apply(layer, streams, tokens)
        np.testing.assert_array_equal(streams.numpy("float32", pattern.shape), pattern)
    kv = np.zeros(4 * engram.out_features, np.uint16)
    gpu.copy_d2h(engram.kv_ptr(), kv)
    assert (kv == 0x3F3F).all()


@pytest.mark.parametrize("tokens", [0, 5, -1])
def test_more_tokens_than_the_workspace_holds(device, tokens):
    with made(device, ARRAYS, max_tokens=4) as (engram, _):
        refused(engram, device, f"tokens: got {tokens}, allowed: an integer, 1 to 4", tokens=tokens)


def test_a_layer_without_weights(device):
    with made(device, ARRAYS, max_tokens=4) as (engram, _):
        refused(engram, device, "engram: layer 3 has no weights", layer=3, error=MetraleError)


def test_a_layer_whose_weights_were_freed(device):
    with made(device, ARRAYS, max_tokens=4) as (engram, weights):
        weights.free()
        refused(engram, device, "layer 0: its weights have been freed", error=MetraleError)


def test_q2_k_weights_of_a_width_that_is_no_multiple_of_256(device):
    with made(device, NARROW, max_tokens=4, q2k=False, table=False) as (engram, weights):
        weights.wkv_q2k = weights.wkv
        refused(engram, device, "in_features: got 120, allowed: a multiple of 256: wkv is in Q2_K blocks")


def test_several_tokens_without_bf16_weights(device):
    with made(device, ARRAYS, max_tokens=4, bf16=False) as (engram, _):
        refused(engram, device, "tokens: got 2, allowed: 1: layer 0 has no bf16 weights", tokens=2)


# Weights


def test_weights_of_another_shape(device):
    other = Arrays(0, dim=64, hc=2, cols=3).upload(device)
    with made(device, ARRAYS) as (engram, _):
        with pytest.raises(ArgumentError, match=re.escape("weights: got 'wkv (192, 768)', allowed: (96, 768)")):
            engram.add_layer(other)
    other.free()


def test_weights_of_another_backend(device):
    with made(device, ARRAYS) as (engram, _), metrale.open("host") as other:
        weights = ARRAYS.upload(other)
        with pytest.raises(ArgumentError, match="weights: backend: got <HostBackend .*, allowed: the EngramV41's own"):
            engram.add_layer(weights)
        weights.free()


def test_weights_that_were_freed(device):
    with made(device, ARRAYS) as (engram, weights):
        weights.free()
        with pytest.raises(MetraleError, match="^layer 0: its weights have been freed$"):
            engram.add_layer(weights)


def test_weights_without_a_projection(device):
    weights = ARRAYS.upload(device)
    with pytest.raises(ArgumentError, match="^wkv: got 'neither', allowed: wkv, wkv_q2k or both, of one shape$"):
        replace(weights, wkv=None, wkv_q2k=None)
    weights.free()


def test_projections_of_two_shapes(device):
    weights = ARRAYS.upload(device)
    with pytest.raises(ArgumentError, match="^wkv: got .*, allowed: wkv, wkv_q2k or both, of one shape$"):
        replace(weights, wkv=replace(weights.wkv, n=4))
    weights.free()


def test_q_and_k_of_two_shapes(device):
    with (
        Owner(device, "Weights") as own,
        pytest.raises(ArgumentError, match="^k: got 'shape .1, 4.', allowed: .hc, dim"),
    ):
        upload_qk(own, np.ones((2, 4)), np.ones((1, 4)))


def test_q_of_another_shape_than_the_streams(device):
    with made(device, ARRAYS) as (engram, _):
        with pytest.raises(ArgumentError, match=re.escape("q: got 'shape (4, 32)', allowed: (2, 32)")):
            engram.upload_qk(np.ones((4, 32)), np.ones((4, 32)))


def test_the_engrams_own_qk_is_the_product(device):
    with made(device, ARRAYS) as (engram, weights):
        product = np.zeros((2, 32), np.float32)
        device.copy_d2h(engram.upload_qk(*ARRAYS.qk), product)
    np.testing.assert_array_equal(product, ARRAYS.qk[0] * ARRAYS.qk[1])
    assert isinstance(weights, EngramV41LayerWeights)


# Rows


@pytest.mark.parametrize("nbytes", [0, 83, 84, 5 * 3 * 84])
def test_raw_rows_that_are_no_tokens(device, nbytes):
    with made(device, ARRAYS, max_tokens=4) as (engram, _):
        with pytest.raises(ArgumentError, match=f"^raw: got '{nbytes} bytes', allowed: 252 for each of 1 to 4 tokens$"):
            engram.rows_from_q2k(0, bytes(nbytes))


@pytest.mark.parametrize("nbytes", [0, 2 * 767, 5 * 2 * 768])
def test_bf16_rows_that_are_no_tokens(device, nbytes):
    with made(device, ARRAYS, max_tokens=4) as (engram, _):
        with pytest.raises(
            ArgumentError, match=f"^rows: got '{nbytes} bytes', allowed: 1536 for each of 1 to 4 tokens$"
        ):
            engram.rows_from_bf16(0, bytes(nbytes))


@pytest.mark.parametrize("use", ["rows_from_q2k", "rows_from_ids"])
def test_blocks_for_rows_of_another_width(device, use):
    with made(device, NARROW, q2k=False, table=False) as (engram, _):
        with pytest.raises(ArgumentError, match="^head_dim: got 40, allowed: 256 for rows of Q2_K blocks$"):
            getattr(engram, use)(0, bytes(252))


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_an_id_on_the_host_outside_the_table_changes_nothing(device, bad):
    with made(device, ARRAYS) as (engram, _):
        engram.rows_from_ids(0, np.array([[0, 1, 2]]))
        before = rows_of(device, engram, 0, 1)
        with pytest.raises(ArgumentError, match=f"^ids: got {bad}, allowed: 0 to 8, the rows of layer 0's table$"):
            engram.rows_from_ids(0, np.array([[3, bad, 5]]))
        np.testing.assert_array_equal(rows_of(device, engram, 0, 1), before)


def test_gathering_while_projecting_needs_a_resident_table(device):
    with made(device, ARRAYS, table=False) as (engram, _):
        with pytest.raises(MetraleError, match="^engram: the table of layer 0 is not resident$"):
            engram.apply_ids(0, 16, 16)


def test_gathering_while_projecting_needs_blocks(device):
    with made(device, ARRAYS, q2k=False) as (engram, _):
        with pytest.raises(ArgumentError, match="^layer: got 0, allowed: one whose wkv is in Q2_K blocks$"):
            engram.apply_ids(0, 16, 16)


def test_ids_of_another_dtype(device):
    with made(device, ARRAYS) as (engram, _):
        with pytest.raises(ArgumentError, match="^ids: got 'int32', allowed: int64$"):
            engram.rows_from_ids(0, np.array([[0, 1, 2]], np.int32))


def test_ids_on_the_device_without_their_number(device):
    with made(device, ARRAYS) as (engram, _), device.upload(np.zeros(3, np.int64)) as ids:
        with pytest.raises(ArgumentError, match="^tokens: got 0, allowed: an integer, 1 to 1$"):
            engram.rows_from_ids(0, ids)


def test_a_table_that_is_not_resident(device):
    with made(device, ARRAYS, table=False) as (engram, _):
        with pytest.raises(MetraleError, match="^engram: the table of layer 0 is not resident$"):
            engram.rows_from_ids(0, np.array([[0, 1, 2]]))


def test_an_id_on_the_device_outside_the_table_is_told_once(device):
    with made(device, ARRAYS) as (engram, _), device.upload(np.array([0, 9, 2])) as ids:
        engram.rows_from_ids(0, ids, 1)
        with pytest.raises(MetraleError, match="^engram: an id was outside the table of layer 0; its row was taken as"):
            engram.check_ids(0)
        engram.check_ids(0)
