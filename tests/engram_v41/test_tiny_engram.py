# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engram layer of a real GGUF file, against values made by other software."""

import numpy as np
import pytest
from engram_layers import DATA, LAYER, apply, rows_of, running

from metrale.engram_v41 import EngramHasher
from metrale.gpu import Graph
from metrale.reference import engram as oracle
from metrale.reference.bf16 import bf16_values

TOKENS = 40
ULP = 2.0**-7  # of bf16, at most, relative
SUM_ERROR = 1e-5  # of an f32 sum of 1024 products of this size


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "tiny_v41_expected.npz") as values:
        return dict(values)


def step(gpu, engram, ids, streams):
    engram.rows_from_ids(LAYER, ids)
    return apply(gpu, engram, LAYER, streams)


def one_by_one(gpu, engram, expected):
    """Streams and kv of all tokens."""
    steps = zip(expected["engram_rows"], expected["streams_in"], strict=True)
    results = [step(gpu, engram, ids[None], streams[None]) for ids, streams in steps]
    return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))


def assert_near_the_expected(streams, kv, expected):
    """kv may differ where the float64 value lies near the middle of two bf16 values, by one of them."""
    want = expected["engram_kv"]
    assert (np.abs(bf16_values(kv) - want) <= ULP * np.abs(want) + SUM_ERROR).all()
    for t in range(TOKENS):
        error = np.linalg.norm(streams[t] - expected["streams_out"][t])
        assert error <= 1e-3 * np.linalg.norm(expected["streams_out"][t])


def test_the_hasher_of_the_file_gives_the_expected_ids(host, expected):
    with running(host) as (_, loaded):
        ids = EngramHasher(loaded.hash, TOKENS).append(expected["tokens"])
    np.testing.assert_array_equal(ids[:, loaded.site], expected["engram_rows"])


def test_one_token_off_the_blocks(gpu, expected):
    with running(gpu) as (engram, _):
        assert_near_the_expected(*one_by_one(gpu, engram, expected), expected)


def test_several_tokens(gpu, expected):
    with running(gpu, TOKENS) as (engram, _):
        streams, kv = step(gpu, engram, expected["engram_rows"], expected["streams_in"])
        assert_near_the_expected(streams, kv, expected)


def test_one_token_off_bf16_weights_has_the_bits_of_the_blocks(gpu, expected):
    with running(gpu) as (engram, loaded):
        off_blocks = one_by_one(gpu, engram, expected)
        loaded.weights.wkv_q2k = None
        off_bf16 = one_by_one(gpu, engram, expected)
    for a, b in zip(off_blocks, off_bf16, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tokens_depend_on_themselves_alone(gpu, expected):
    ids, streams = expected["engram_rows"], expected["streams_in"]
    with running(gpu, TOKENS) as (engram, _):
        together, _ = step(gpu, engram, ids, streams)
        some, _ = step(gpu, engram, ids[7:9], streams[7:9])
    np.testing.assert_array_equal(some, together[7:9])


def test_rows_from_the_file_have_the_bits_of_those_of_the_resident_table(device, expected):
    ids = expected["engram_rows"]
    with running(device, TOKENS) as (engram, _):
        engram.rows_from_ids(LAYER, ids)
        resident = rows_of(device, engram, LAYER, TOKENS)
    with running(device, TOKENS, resident=False) as (engram, loaded):
        engram.rows_from_q2k(LAYER, loaded.read_rows(ids))
        np.testing.assert_array_equal(rows_of(device, engram, LAYER, TOKENS), resident)


def test_bf16_rows_of_the_host_are_taken_as_they_are(device, expected):
    with running(device, TOKENS) as (engram, _):
        engram.rows_from_ids(LAYER, expected["engram_rows"])
        rows = rows_of(device, engram, LAYER, TOKENS)
        by_ids = apply(device, engram, LAYER, expected["streams_in"])
        engram.rows_from_bf16(LAYER, rows)
        by_bits = apply(device, engram, LAYER, expected["streams_in"])
    np.testing.assert_array_equal(by_bits[0], by_ids[0])


def test_ids_on_the_device_give_the_same_rows(gpu, expected):
    ids = expected["engram_rows"]
    with running(gpu, TOKENS) as (engram, _), gpu.upload(ids) as staged:
        engram.rows_from_ids(LAYER, ids)
        rows = rows_of(gpu, engram, LAYER, TOKENS)
        engram.rows_from_bf16(LAYER, np.zeros_like(rows))
        engram.rows_from_ids(LAYER, staged, TOKENS)
        engram.check_ids(LAYER)
        np.testing.assert_array_equal(rows_of(gpu, engram, LAYER, TOKENS), rows)


def test_the_streams_are_those_of_the_oracle_on_the_devices_kv(gpu, expected):
    with running(gpu, TOKENS) as (engram, loaded):
        streams, kv = step(gpu, engram, expected["engram_rows"], expected["streams_in"])
        qk = np.zeros((4, 512), np.float32)
        gpu.copy_d2h(loaded.weights.qk, qk)
    want = oracle.gate(expected["streams_in"], kv, qk, loaded.shape["eps"])
    np.testing.assert_allclose(streams, want, rtol=1e-5, atol=1e-5)


def test_a_stream_of_the_callers_gives_the_bits_of_the_default_one(device, expected):
    ids, streams = expected["engram_rows"][:1], expected["streams_in"][:1]
    with running(device) as (engram, _):
        usual, _ = step(device, engram, ids, streams)
        own = device.create_stream()
        with device.upload(streams) as staged:
            engram.rows_from_ids(LAYER, ids, stream=own)
            engram.apply(LAYER, staged, 1, own)
            device.synchronize(own)
            got = staged.numpy("float32", streams.shape)
        device.destroy_stream(own)
    np.testing.assert_array_equal(got, usual)


def test_one_token_without_rows_in_between_has_the_same_bits(gpu, expected):
    ids, streams = expected["engram_rows"][:3], expected["streams_in"][:3]
    with running(gpu) as (engram, _):
        for t in range(3):
            want, _ = step(gpu, engram, ids[t : t + 1], streams[t : t + 1])
            with gpu.upload(ids[t]) as staged_ids, gpu.upload(streams[t]) as staged:
                engram.apply_ids(LAYER, staged_ids, staged)
                engram.check_ids(LAYER)
                np.testing.assert_array_equal(staged.numpy("float32", want.shape), want)


def test_a_captured_step_serves_any_token(device, expected):

    ids, streams = expected["engram_rows"], expected["streams_in"]
    with running(device) as (engram, _):
        want = [step(device, engram, ids[t : t + 1], streams[t : t + 1])[0] for t in range(3)]
        with device.upload(ids[:1]) as staged_ids, device.upload(streams[:1]) as staged:
            with Graph(device) as graph:
                engram.rows_from_ids(LAYER, staged_ids, 1)
                engram.apply(LAYER, staged, 1)
            for t in range(3):
                device.copy_h2d(ids[t], staged_ids.ptr)
                device.copy_h2d(streams[t], staged.ptr)
                graph.launch()
                np.testing.assert_array_equal(staged.numpy("float32", (1, *streams.shape[1:])), want[t])
            graph.free()


@pytest.mark.gpu
def test_a_hundred_repeats_give_the_same_bits(cuda, expected):
    with running(cuda, TOKENS) as (engram, _):
        runs = [step(cuda, engram, expected["engram_rows"], expected["streams_in"])[0] for _ in range(100)]
    np.testing.assert_array_equal(runs, np.broadcast_to(runs[0], np.shape(runs)))


@pytest.mark.gpu
def test_host_and_gpu_agree_within_1e_3(cuda, host, expected):
    results = []
    for gpu in (cuda, host):
        with running(gpu, TOKENS) as (engram, _):
            results.append(step(gpu, engram, expected["engram_rows"], expected["streams_in"])[0])
    assert np.linalg.norm(results[0] - results[1]) <= 1e-3 * np.linalg.norm(results[1])


def test_bits_of_the_expansion_on_the_device_are_the_oracles(gpu):
    with running(gpu) as (engram, loaded):
        wkv, raw = loaded.weights.wkv, loaded.weights.wkv_q2k
        bits, blocks = np.zeros((wkv.n, wkv.k), np.uint16), np.zeros((raw.n, raw.k // 256 * 84), np.uint8)
        gpu.copy_d2h(wkv.ptr, bits)
        gpu.copy_d2h(raw.ptr, blocks)
        assert engram.in_features == wkv.k
    np.testing.assert_array_equal(bits, oracle.dequant_q2_k_to_bf16(blocks))
