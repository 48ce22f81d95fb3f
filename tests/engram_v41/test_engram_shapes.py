# SPDX-License-Identifier: MIT OR Apache-2.0
"""EngramV41 at any shape against the oracle, and its three arms against each other."""

import numpy as np
from engram_layers import Arrays, apply, made, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.reference import engram as oracle
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.dense import dense_gemm

HALF_ULP = 2.0**-8 * 1.001  # of bf16, at most, relative; and what f32 adds to it
GATE_BOUND = 1e-6
DIMS = st.integers(1, 6).map(lambda n: 32 * n)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def streams_of(arrays, tokens):
    shape = (tokens, arrays.shape["hc"], arrays.shape["dim"])
    return np.random.default_rng(tokens).standard_normal(shape, np.float32)


@given(dim=DIMS, hc=st.integers(1, 4), cols=st.integers(1, 5), tokens=st.integers(1, 5), data=st.data())
@settings(max_examples=25)
def test_rows_of_a_table_through_q2_k_and_bf16_weights(gpu, dim, hc, cols, tokens, data):
    arrays = Arrays(0, dim=dim, hc=hc, cols=cols)
    arrays.wkv = oracle.dequant_q2_k_to_bf16(arrays.raw)
    ids = np.array(data.draw(st.lists(st.integers(0, 8), min_size=tokens * cols, max_size=tokens * cols)))
    streams = streams_of(arrays, tokens)
    with made(gpu, arrays, max_tokens=5) as (engram, _):
        engram.rows_from_ids(0, ids.reshape(tokens, cols))
        rows = rows_of(gpu, engram, 0, tokens)
        got, kv = apply(gpu, engram, 0, streams)
    np.testing.assert_array_equal(rows, oracle.rows(arrays.table, ids).reshape(tokens, -1))
    assert relative(bf16_values(kv), oracle.wkv(rows, arrays.raw)) <= HALF_ULP
    assert relative(got, oracle.gate(streams, kv, arrays.qk[0] * arrays.qk[1], 1e-6)) <= GATE_BOUND


@given(dim=DIMS, hc=st.integers(1, 4), head_dim=st.integers(1, 40), cols=st.integers(1, 5), tokens=st.integers(1, 5))
@settings(max_examples=25)
def test_bf16_rows_of_any_width(gpu, dim, hc, head_dim, cols, tokens):
    arrays = Arrays(1, dim=dim, hc=hc, cols=cols, head_dim=head_dim)
    rows = bf16_bits(np.random.default_rng(tokens).standard_normal((tokens, arrays.k)))
    streams = streams_of(arrays, tokens)
    with made(gpu, arrays, max_tokens=5, q2k=False, table=False) as (engram, _):
        engram.rows_from_bf16(0, rows)
        got, kv = apply(gpu, engram, 0, streams)
    assert relative(bf16_values(kv), dense_gemm(rows, arrays.wkv)) <= HALF_ULP
    assert relative(got, oracle.gate(streams, kv, arrays.qk[0] * arrays.qk[1], 1e-6)) <= GATE_BOUND


def test_layers_keep_their_rows_apart(gpu):
    first, second = (Arrays(seed, dim=64, hc=2, cols=3, layer=seed) for seed in (1, 14))
    streams = streams_of(first, 2)
    alone = []
    for arrays, ids in ((first, [[0, 1, 2], [3, 4, 5]]), (second, [[8, 8, 8], [7, 7, 7]])):
        with made(gpu, arrays, max_tokens=2) as (engram, _):
            engram.rows_from_ids(arrays.layer, np.array(ids))
            alone.append(apply(gpu, engram, arrays.layer, streams)[0])
    with made(gpu, first, max_tokens=2) as (engram, _):
        weights = second.upload(gpu)
        engram.add_layer(weights)
        engram.rows_from_ids(1, np.array([[0, 1, 2], [3, 4, 5]]))
        engram.rows_from_ids(14, np.array([[8, 8, 8], [7, 7, 7]]))
        together = [apply(gpu, engram, layer, streams)[0] for layer in (1, 14)]
        weights.free()
    np.testing.assert_array_equal(together, alone)
