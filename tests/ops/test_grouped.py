# SPDX-License-Identifier: MIT OR Apache-2.0
"""Module moe_grouped, and the kernels for many rows of module moe_v41."""

import launches
import launches_grouped
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import assert_bf16_near, bf16, kquant_rows, same_bits

from metrale.formats.kquant import Q2_K, Q3_K
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.kquant import mmvq, quantize_q8_1_rows
from metrale.reference.mmq import quantize_mmq
from metrale.reference.moe import accumulate

NO_PICK = NO_ROW = 0xFFFFFFFF
KINDS = pytest.mark.parametrize("kind", [Q2_K, Q3_K], ids=str)


@st.composite
def selections(draw):
    """`(hdr, n_routed)`: headers `[tokens, 1 + 3 * topk]` of distinct picks, some tokens without any."""
    n = draw(st.integers(1, 40))
    topk, tokens = draw(st.integers(1, min(n, 6))), draw(st.integers(1, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    hdr = np.zeros((tokens, 1 + 3 * topk), np.uint32)
    for row in hdr:
        row[1 : 1 + topk] = rng.permutation(n)[:topk] if rng.random() < 0.9 else NO_PICK
        row[1 + topk : 1 + 2 * topk] = rng.random(topk, np.float32).view(np.uint32)
    return hdr, n


def assignments(hdr):
    """`(expert, token, weight)` of every row, in the order of the rows."""
    topk = hdr.shape[1] // 3
    found = [
        (int(row[1 + p]), token, row[1 + topk + p].view(np.float32))
        for token, row in enumerate(hdr)
        for p in range(topk)
        if row[1 + p] != NO_PICK
    ]
    return sorted(found, key=lambda a: a[:2])


@given(selections(), st.sampled_from([8, 16, 128]), st.data())
def test_rows_and_tiles_cover_every_assignment_once(gpu, selection, tile_rows, data):
    hdr, n = selection
    topk, want = hdr.shape[1] // 3, assignments(hdr)
    first = data.draw(st.integers(0, n - 1))
    last = data.draw(st.integers(first + 1, n))
    schedule = launches_grouped.tiles(gpu, hdr, topk, n, tile_rows, first, last)
    experts = [expert for expert, _, _ in want]
    assert schedule.offsets.tolist() == [sum(e < expert for e in experts) for expert in range(n + 1)]
    covered = []
    for expert, start, rows in schedule.tiles:
        assert 1 <= rows <= tile_rows
        assert experts[start : start + rows] == [expert] * rows
        covered += range(start, start + rows)
    assert covered == [row for row, expert in enumerate(experts) if first <= expert < last]


@given(selections())
def test_rows_go_by_expert_and_then_by_token(gpu, selection):
    hdr, n = selection
    topk, want = hdr.shape[1] // 3, assignments(hdr)
    offsets = launches_grouped.tiles(gpu, hdr, topk, n, 8).offsets
    slot_of = np.where(np.arange(n) % 3 == 2, -1, n - np.arange(n)).astype(np.int32)
    rows = launches_grouped.rows(gpu, hdr, topk, offsets, slot_of)
    assert rows.token[: len(want)].tolist() == [token for _, token, _ in want]
    assert rows.weight[: len(want)].tolist() == [weight for _, _, weight in want]
    for token, listed in enumerate(rows.of_token):
        mine = [row for row, (_, t, _) in enumerate(want) if t == token]
        assert listed.tolist() == (mine or [NO_ROW] * topk)
    blocks = (1 << 20) + np.maximum(slot_of, 0).astype(np.uint64) * 4096
    assert same_bits(rows.ptrs, np.array([blocks, blocks + 1024, blocks + 2048], np.uint64))


@pytest.mark.parametrize(("tokens", "topk", "n"), [(4096, 6, 384), (3, 32, 1024), (1, 1, 1)])
def test_rows_of_real_sizes(device, tokens, topk, n):
    rng = np.random.default_rng(n)
    hdr = np.zeros((tokens, 1 + 3 * topk), np.uint32)
    hdr[:, 1 : 1 + topk] = [rng.permutation(n)[:topk] for _ in range(tokens)]
    want = assignments(hdr)
    schedule = launches_grouped.tiles(device, hdr, topk, n, 16)
    rows = launches_grouped.rows(device, hdr, topk, schedule.offsets, np.arange(n, dtype=np.int32))
    assert schedule.offsets[-1] == len(want) == tokens * topk
    assert rows.token.tolist() == [token for _, token, _ in want]


def test_tokens_are_selected_as_one_by_one(gpu):
    rng = np.random.default_rng(7)
    logits, bias = rng.normal(size=(5, 40)).astype(np.float32), rng.normal(size=40).astype(np.float32)
    logits[3, 7] = np.nan
    slot_of = np.where(np.arange(40) % 5 == 0, -1, np.arange(40)).astype(np.int32)
    together = launches_grouped.route_select_tokens(gpu, logits, bias, 4, slot_of, route_scale=1.5)
    for token, row in enumerate(logits):
        alone = launches.route_select(gpu, row, bias, 4, route_scale=1.5, slot_of=slot_of)
        assert same_bits(together[token], alone.hdr)


# Sums


@pytest.mark.parametrize(("tokens", "topk", "dim"), [(1, 1, 8), (3, 6, 2056), (7, 2, 511)])
def test_combined_rows_have_the_bits_of_adding_one_by_one(gpu, tokens, topk, dim):
    rng = np.random.default_rng([tokens, dim])
    src, shared = bf16(rng, tokens * topk + 3, dim), bf16(rng, tokens, dim)
    listed = rng.permutation(len(src))[: tokens * topk].reshape(tokens, topk).astype(np.uint32)
    listed[-1] = NO_ROW if tokens > 1 else listed[-1]
    acc, out = launches_grouped.combine(gpu, src, listed, shared)
    for token in range(tokens):
        want = np.zeros(dim, np.float32)
        for row in listed[token][listed[token] != NO_ROW]:
            want = accumulate(want, src[row])
        want = accumulate(want, shared[token])
        assert same_bits(acc[token], want)
        assert same_bits(out[token], bf16_bits(want.astype(np.float64)))


def test_one_tokens_rows_need_no_list(gpu):
    rng = np.random.default_rng(2)
    src, shared = bf16(rng, 6, 300), bf16(rng, 1, 300)
    listed = launches_grouped.combine(gpu, src, np.arange(6, dtype=np.uint32)[None], shared)
    for got, want in zip(launches_grouped.combine(gpu, src, None, shared), listed, strict=True):
        assert same_bits(got, want)


def test_gathered_rows(gpu):
    x = bf16(np.random.default_rng(3), 9, 2051)
    rows = np.array([8, 0, 3, 3], np.uint32)
    assert same_bits(launches_grouped.gather_rows(gpu, x, rows), x[rows])


def test_scattered_rows_are_added_in_f32(gpu):
    rng = np.random.default_rng(4)
    acc, src, rows = rng.normal(size=(6, 300)).astype(np.float32), bf16(rng, 3, 300), np.array([5, 0, 2], np.uint32)
    want = acc.copy()
    want[rows] = [accumulate(acc[row], src[i]) for i, row in enumerate(rows)]
    assert same_bits(launches_grouped.scatter_add(gpu, acc, src, rows), want)


# Products

EXPERTS, N, K = 3, 133, 512
TILES = np.array([[2, 0, 5], [0, 5, 8], [2, 13, 1], [1, 14, 3]], np.uint32)
ROWS = 17
LISTED = np.array([4, 0, 3, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 0, 1, 2], np.uint32)


def expert_of_rows():
    return [next(int(e) for e, first, rows in TILES if first <= row < first + rows) for row in range(ROWS)]


@KINDS
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "in order"])
def test_grouped_gemvs_have_the_bits_of_single_ones(gpu, kind, listed):
    rng = np.random.default_rng(5)
    weights = kquant_rows(rng, kind, 2, EXPERTS, N, K)
    y = quantize_q8_1_rows(bf16(rng, 11 if listed else ROWS, K)).stored
    got = launches_grouped.grouped(gpu, "mmvq", kind, weights, y, 0, TILES, ROWS, LISTED if listed else None)
    for row, expert in enumerate(expert_of_rows()):
        source = y[LISTED[row] if listed else row][None]
        for projection in range(2):
            want = launches.mmvq(gpu, kind, weights[projection, expert], source)
            assert same_bits(got[projection, row], want[0])


@KINDS
@pytest.mark.parametrize("tile_rows", [16, 128])
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "in order"])
def test_grouped_tiles_have_the_bits_of_the_dense_product(gpu, kind, tile_rows, listed):
    rng = np.random.default_rng(6)
    weights, x = kquant_rows(rng, kind, 2, EXPERTS, N, K), bf16(rng, 11 if listed else ROWS, K)
    layout = launches_grouped.LAYOUTS[kind.name]
    y = quantize_mmq(x, layout)
    got = launches_grouped.grouped(
        gpu, tile_rows, kind, weights, y.stored, len(x), TILES, ROWS, LISTED if listed else None
    )  # fmt: skip
    for expert in range(EXPERTS):
        rows = [row for row, e in enumerate(expert_of_rows()) if e == expert]
        source = quantize_mmq(x[LISTED[rows] if listed else rows], layout).stored
        for projection in range(2):
            want = launches_grouped.mmq128(gpu, kind, weights[projection, expert], source, len(rows))
            assert same_bits(got[projection, rows], want)


@KINDS
def test_grouped_products_are_near_float64(gpu, kind):
    rng = np.random.default_rng(8)
    weights, x = kquant_rows(rng, kind, 1, EXPERTS, N, K), bf16(rng, ROWS, K)
    q8 = quantize_q8_1_rows(x)
    by_gemv = launches_grouped.grouped(gpu, "mmvq", kind, weights, q8.stored, 0, TILES, ROWS)[0]
    y = quantize_mmq(x, launches_grouped.LAYOUTS[kind.name])
    by_tile = launches_grouped.grouped(gpu, 16, kind, weights, y.stored, ROWS, TILES, ROWS)[0]
    exact = np.array([mmvq(kind, weights[0, e], q8)[row] for row, e in enumerate(expert_of_rows())])
    assert_bf16_near(by_gemv, exact)
    assert np.linalg.norm(bf16_values(by_tile) - exact) <= 3e-2 * np.linalg.norm(exact)
