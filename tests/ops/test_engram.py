# SPDX-License-Identifier: MIT OR Apache-2.0
"""Modules engram_v41 and dequant_gguf_bf16 against ggml's values, published ids and float64."""

from pathlib import Path

import launches
import launches_engram
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import assert_bf16_near, assert_near, bf16, kquant_rows, same_bits

from metrale import ops
from metrale.engram_v41 import EngramTables
from metrale.formats.kquant import Q2_K
from metrale.reference import engram as oracle
from metrale.reference.bf16 import bf16_bits, bf16_values

DATA = Path(__file__).parents[1] / "data"
NAN, INF = 0x7FC0, 0x7F80
GATE_BOUND = 1e-6
GIB = 1 << 30


@pytest.fixture(scope="module")
def ggml_rows():
    """Q2_K rows of 1024 values quantised by ggml, and the f32 values it reads back."""
    with np.load(DATA / "kquant_blocks.npz", allow_pickle=False) as file:
        return file["q2_k_blocks"], file["q2_k_dequant_f32"]


@pytest.fixture(scope="module")
def published():
    """Compressed ids of a sequence, the constants, and the ids `[sites, tokens, cols]`."""
    with np.load(DATA / "engram_hash.npz", allow_pickle=False) as file:
        v = dict(file)
    primes = v["primes"].reshape(2, -1)
    tables = EngramTables(
        v["token_map"],
        int(v["pad_token_id"]),
        v["multipliers"].reshape(2, -1),
        primes,
        v["offsets"].reshape(2, -1),
        primes.sum(axis=1),
    )
    return v["token_map"][v["tokens"]], tables, np.ascontiguousarray(v["rows"].transpose(1, 0, 2))


def any_blocks(rng, *shape):
    """Q2_K rows of any bits at all: infinite and NaN scales too."""
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // 256 * 84), np.uint8)


# dequant_q2_k_to_bf16


def test_blocks_give_ggmls_values_rounded_to_bf16(gpu, ggml_rows):
    raw, values = ggml_rows
    got = launches_engram.dequant_q2_k(gpu, raw.reshape(len(raw), -1))
    assert same_bits(got, bf16_bits(values).reshape(-1, 256))


def test_blocks_of_any_bits_give_the_oracles_bits(gpu):
    raw = any_blocks(np.random.default_rng(0), 77, 256)
    assert same_bits(launches_engram.dequant_q2_k(gpu, raw), oracle.dequant_q2_k_to_bf16(raw))


@pytest.mark.parametrize("value", [0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x0001])
def test_zeros_infinities_and_nans_of_a_scale_give_the_oracles_bits(gpu, value):
    raw = any_blocks(np.random.default_rng(value), 8, 256)
    raw[:4, 80:82] = raw[4:, 82:84] = np.array([value], np.uint16).view(np.uint8)
    assert same_bits(launches_engram.dequant_q2_k(gpu, raw), oracle.dequant_q2_k_to_bf16(raw))


@pytest.mark.parametrize("row_bytes", [84, 88, 164, 168, 336, 400])
@pytest.mark.parametrize("n_blocks", [1, 15, 16, 17])
def test_what_is_left_of_a_row_is_skipped(gpu, row_bytes, n_blocks):
    rng, in_row = np.random.default_rng(row_bytes), row_bytes // 84
    raw = rng.integers(0, 256, (-(-n_blocks // in_row), row_bytes), np.uint8)
    blocks = raw[:, : in_row * 84].reshape(-1, 84)[:n_blocks]
    got = launches_engram.dequant_q2_k(gpu, raw, n_blocks)
    assert same_bits(got, oracle.dequant_q2_k_to_bf16(blocks))


# engram_v41_wkv_q2k_gemv


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("k", [256, 768, 1024, 2048, 2304, 6144, 8448])
def test_a_product_off_the_blocks_has_the_bits_of_the_one_over_their_expansion(gpu, n, k):
    rng = np.random.default_rng([n, k])
    x, raw = bf16(rng, k), kquant_rows(rng, Q2_K, n, k)
    expanded = oracle.dequant_q2_k_to_bf16(raw)
    assert same_bits(launches_engram.wkv_gemv(gpu, x, raw), launches.dense_gemv(gpu, x, expanded))


@pytest.mark.parametrize("k", [256, 2048, 6144])
def test_a_product_off_the_blocks_is_near_float64(gpu, k):
    rng = np.random.default_rng(k)
    x, raw = bf16(rng, k), kquant_rows(rng, Q2_K, 130, k)
    assert_bf16_near(launches_engram.wkv_gemv(gpu, x, raw), oracle.wkv(x[None], raw)[0])


@pytest.mark.parametrize("k", [1024, 1280])
@pytest.mark.parametrize("shift", [2, 8])
def test_alignment_does_not_change_bits(gpu, k, shift):
    rng = np.random.default_rng(k)
    x, raw = bf16(rng, k), kquant_rows(rng, Q2_K, 20, k)
    assert same_bits(launches_engram.wkv_gemv(gpu, x, raw, shift), launches_engram.wkv_gemv(gpu, x, raw))


def test_scales_that_are_not_finite_spoil_their_rows_only(gpu):
    rng = np.random.default_rng(1)
    x, raw = bf16(rng, 512), kquant_rows(rng, Q2_K, 33, 512)
    clean = launches_engram.wkv_gemv(gpu, x, raw)
    raw[18, 80:82] = raw[25, 84 + 82 :] = np.array([np.inf], np.float16).view(np.uint8)
    got = launches_engram.wkv_gemv(gpu, x, raw)
    assert not np.isfinite(bf16_values(got[[18, 25]])).any()
    assert same_bits(np.delete(got, [18, 25]), np.delete(clean, [18, 25]))


def test_a_nan_input_reaches_every_output(gpu):
    rng = np.random.default_rng(2)
    x, raw = bf16(rng, 2304), kquant_rows(rng, Q2_K, 18, 2304)
    x[2303] = NAN
    assert np.isnan(bf16_values(launches_engram.wkv_gemv(gpu, x, raw))).all()


@pytest.mark.parametrize("cols", [1, 3, 4, 24])
@pytest.mark.parametrize("n", [1, 17, 200])
def test_a_product_that_gathers_has_the_bits_of_the_gather_and_the_product(gpu, cols, n):
    rng = np.random.default_rng([cols, n])
    table, raw = kquant_rows(rng, Q2_K, 40, 256), kquant_rows(rng, Q2_K, n, 256 * cols)
    ids = rng.integers(0, 40, cols)
    got, flag = launches_engram.wkv_gemv_gather(gpu, ids, table, raw)
    assert same_bits(got, launches_engram.wkv_gemv(gpu, oracle.rows(table, ids).reshape(-1), raw))
    assert flag == 0


@pytest.mark.parametrize("bad", [-1, 40, 2**40])
def test_a_product_that_gathers_takes_an_id_outside_the_table_as_zeros(gpu, bad):
    rng = np.random.default_rng(3)
    table, raw = kquant_rows(rng, Q2_K, 40, 256), kquant_rows(rng, Q2_K, 30, 1024)
    ids = np.array([7, bad, 0, 39])
    got, flag = launches_engram.wkv_gemv_gather(gpu, ids, table, raw)
    assert same_bits(got, launches_engram.wkv_gemv(gpu, oracle.rows(table, ids).reshape(-1), raw))
    assert flag == 1


@pytest.mark.gpu
def test_the_projection_of_the_real_model_has_the_dense_bits(cuda):
    rng = np.random.default_rng(3)
    x, raw = bf16(rng, 6144), np.tile(kquant_rows(rng, Q2_K, 512, 6144), (50, 1))
    got = launches_engram.wkv_gemv(cuda, x, raw)
    expanded = np.tile(oracle.dequant_q2_k_to_bf16(raw[:512]), (50, 1))
    assert same_bits(got, launches.dense_gemv(cuda, x, expanded))


# engram_v41_gate


def gate_inputs(tokens, hc, dim, seed=0):
    rng = np.random.default_rng([tokens, hc, dim, seed])
    streams = rng.standard_normal((tokens, hc, dim), np.float32)
    qk = (1 + 0.3 * rng.standard_normal((hc, dim))).astype(np.float32)
    return streams, bf16(rng, tokens, (hc + 1) * dim), qk


@pytest.mark.parametrize("hc", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 32, 33, 96, 2048, 2080, 5120])
def test_the_gate_is_near_float64(gpu, hc, dim):
    streams, kv, qk = gate_inputs(3, hc, dim)
    assert_near(launches_engram.gate(gpu, streams, kv, qk, 1e-6), oracle.gate(streams, kv, qk, 1e-6), GATE_BOUND)


@given(tokens=st.integers(1, 6), hc=st.integers(1, 4), dim=st.integers(1, 20), eps=st.sampled_from([0.0, 1e-6, 0.1]))
def test_the_gate_of_any_shape_is_near_float64(gpu, tokens, hc, dim, eps):
    streams, kv, qk = gate_inputs(tokens, hc, 32 * dim)
    assert_near(launches_engram.gate(gpu, streams, kv, qk, eps), oracle.gate(streams, kv, qk, eps), GATE_BOUND)


@pytest.mark.parametrize("shift", [4, 8])
def test_the_gates_alignment_does_not_change_bits(gpu, shift):
    inputs = gate_inputs(2, 4, 264)
    assert same_bits(launches_engram.gate(gpu, *inputs, 1e-6, shift), launches_engram.gate(gpu, *inputs, 1e-6))


def test_a_stream_depends_on_its_token_alone(gpu):
    streams, kv, qk = gate_inputs(5, 4, 512)
    together = launches_engram.gate(gpu, streams, kv, qk, 1e-6)
    alone = [launches_engram.gate(gpu, streams[t : t + 1], kv[t : t + 1], qk, 1e-6)[0] for t in range(5)]
    assert same_bits(together, np.array(alone))


def test_a_key_of_zeros_opens_the_gate_by_the_floor(gpu):
    streams, kv, qk = gate_inputs(1, 2, 64)
    kv[:, :128] = 0
    half_open = bf16_values(kv)[:, None, 128:] / (1 + np.exp(-1e-3))
    assert_near(launches_engram.gate(gpu, streams, kv, qk, 1e-6), streams + half_open, GATE_BOUND)


def test_a_key_against_its_stream_closes_the_gate(gpu):
    dim = 4096
    ones, kv = np.ones((1, 1, dim), np.float32), np.full((1, 2 * dim), 0xBF80, np.uint16)
    got = launches_engram.gate(gpu, ones, kv, np.ones((1, dim), np.float32), 0.0)
    assert_near(got, ones - 1 / (1 + np.exp(np.sqrt(np.sqrt(dim)))), GATE_BOUND)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_key_that_is_not_finite_spoils_its_stream_only(gpu, bad):
    streams, kv, qk = gate_inputs(2, 3, 96)
    clean = launches_engram.gate(gpu, streams, kv, qk, 1e-6)
    kv[1, 96 + 7] = bad
    got = launches_engram.gate(gpu, streams, kv, qk, 1e-6)
    assert np.isnan(got[1, 1]).all()
    got[1, 1] = clean[1, 1]
    assert same_bits(got, clean)


# engram_v41_rows_gather


def test_rows_are_those_of_the_ids(gpu, ggml_rows):
    raw, values = ggml_rows
    table, rows = raw.reshape(-1, 84), bf16_bits(values).reshape(-1, 256)
    ids = np.random.default_rng(0).integers(0, len(table), 50)
    got, flag = launches_engram.rows_gather(gpu, ids, table)
    assert same_bits(got, rows[ids])
    assert flag == 0


@pytest.mark.parametrize("bad", [-1, -(2**63), 40, 2**32, 2**63 - 1])
@pytest.mark.parametrize("at", [0, 16, 18])
def test_an_id_outside_the_table_gives_zeros_and_sets_the_flag(gpu, bad, at):
    rng = np.random.default_rng(1)
    table, ids = kquant_rows(rng, Q2_K, 40, 256), rng.integers(0, 40, 19)
    ids[at] = bad
    got, flag = launches_engram.rows_gather(gpu, ids, table)
    assert same_bits(got, oracle.rows(table, ids))
    assert flag == 1


def test_the_flag_is_the_callers_to_clear(gpu):
    table = kquant_rows(np.random.default_rng(2), Q2_K, 4, 256)
    assert launches_engram.rows_gather(gpu, np.array([3]), table, flag=6)[1] == 6


@pytest.mark.gpu
def test_rows_beyond_4_gib_of_a_table(cuda):
    """Of a table of 6 GiB in which only the rows that are asked for hold anything."""
    rng, table_rows = np.random.default_rng(4), 6 * GIB // 84
    ids = np.array([0, 4 * GIB // 84 - 1, 4 * GIB // 84, 4 * GIB // 84 + 1, table_rows - 1, table_rows])
    blocks = kquant_rows(rng, Q2_K, len(ids), 256)
    blocks[-1] = 0
    with launches.Arrays(cuda) as a, cuda.buffer(table_rows * 84) as table:
        for at, block in zip(ids[:-1], blocks, strict=False):
            cuda.copy_h2d(block, table.ptr.offset(int(at) * 84))
        out, flag = a.output((len(ids), 256), np.uint16), a.updated(np.zeros(1, np.uint32))
        kernel = cuda.kernel("engram_v41", "engram_v41_rows_gather")
        ops.engram_v41_rows_gather(cuda, kernel, a.input(ids), table, out, len(ids), table_rows, flag, None)
        assert same_bits(out.read(), oracle.dequant_q2_k_to_bf16(blocks))
        assert flag.read()[0] == 1


# engram_v41_hash


def test_ids_are_the_published_ones(gpu, published):
    compressed, tables, expected = published
    assert same_bits(launches_engram.hash_ids(gpu, compressed, tables), expected)


@pytest.mark.parametrize("start", [1, 2, 50, 95])
def test_ids_of_the_last_positions_are_those_of_the_whole(gpu, published, start):
    compressed, tables, expected = published
    assert same_bits(launches_engram.hash_ids(gpu, compressed, tables, start), expected[:, start:].copy())


@pytest.mark.parametrize("ngram", [2, 5])
def test_products_that_wrap_give_the_oracles_ids(gpu, ngram):
    rng = np.random.default_rng(ngram)
    primes = rng.integers(1, 2**40, (3, (ngram - 1) * 2))
    tables = EngramTables(
        rng.integers(0, 2**31, 8),
        7,
        rng.integers(0, 2**63, (3, ngram), np.uint64) * np.uint64(2) + np.uint64(1),
        primes,
        np.cumsum(primes, axis=1) - primes,
        primes.sum(axis=1),
    )
    compressed = rng.integers(-1, 2**31, 70).astype(np.int32)
    compressed[::7] = -1
    got = launches_engram.hash_ids(gpu, compressed, tables)
    for site in range(3):
        constants = tables.multipliers[site], tables.primes[site], tables.offsets[site]
        assert same_bits(got[site], oracle.row_ids(compressed, *constants, tables.pad))
