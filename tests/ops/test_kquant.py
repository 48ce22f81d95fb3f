# SPDX-License-Identifier: MIT OR Apache-2.0
"""Modules kquant_moe and kquant_probe against ggml's values and float64."""

from pathlib import Path

import launches
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from samples import KINDS, assert_bf16_near, assert_near, bf16, kquant_rows, same_bits

from metrale.formats.kquant import Q2_K, Q3_K, kquant_q8_1_rows_bytes
from metrale.reference import kquant as oracle
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.kquant import quantize_q8_1_rows

EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
EXPERT_KINDS = pytest.mark.parametrize("kind", [Q2_K, Q3_K], ids=str)
NAN, INF = 0x7FC0, 0x7F80


@pytest.fixture(scope="module")
def ggml():
    """Rows quantised by ggml, with the values it reads back."""
    with np.load(Path(__file__).parents[1] / "data" / "kquant_blocks.npz", allow_pickle=False) as file:
        return dict(file)


def ggml_rows(ggml, kind):
    return ggml[f"{kind.name.lower()}_blocks"]


# Decoding


@EACH_KIND
def test_blocks_decode_to_ggmls_bits(gpu, ggml, kind):
    blocks = ggml_rows(ggml, kind).reshape(-1, kind.block_bytes)
    expected = ggml[f"{kind.name.lower()}_dequant_f32"].reshape(-1, 256)
    assert same_bits(launches.decode(gpu, kind, blocks), expected)


@EACH_KIND
def test_any_bits_decode_as_the_oracle_does(gpu, kind):
    blocks = kquant_rows(np.random.default_rng(3), kind, 77, 256)
    assert same_bits(launches.decode(gpu, kind, blocks), oracle.dequantize(kind, blocks))


# Activations


@given(hnp.arrays(np.uint16, st.tuples(st.integers(1, 3), st.just(96)), elements=st.integers(0, 0xFFFF)))
def test_activations_equal_the_oracles_bytes(gpu, x):
    assert same_bits(launches.quantise(gpu, x), quantize_q8_1_rows(x).stored)


@pytest.mark.parametrize(("m", "k"), [(1, 32), (3, 256), (9, 288), (2, 5120)])
def test_activations_of_any_shape_equal_the_oracles_bytes(gpu, m, k):
    x = bf16(np.random.default_rng([m, k]), m, k)
    assert same_bits(launches.quantise(gpu, x), quantize_q8_1_rows(x).stored)


@pytest.mark.parametrize("zero", [0x0000, 0x8000], ids=["+0", "-0"])
def test_zeros_of_either_sign_give_zero_bytes(gpu, zero):
    assert not launches.quantise(gpu, np.full((2, 64), zero, np.uint16)).any()


@pytest.mark.parametrize("bad", [NAN, INF, INF | 0x8000])
def test_a_value_that_is_not_finite_spoils_its_block_only(gpu, bad):
    x = bf16(np.random.default_rng(0), 1, 96)
    clean = launches.quantise(gpu, x).reshape(3, 36)
    x[0, 40] = bad
    got = launches.quantise(gpu, x).reshape(3, 36)
    assert np.isnan(got[1, :2].view(np.float16)).all()
    assert not got[1, 4:].any()
    assert same_bits(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "inter"), [(1, 32), (3, 256), (7, 288)])
def test_swiglu_and_quantise_in_one_pass_has_the_bits_of_the_two(gpu, rows, inter, weighted, limit):
    rng = np.random.default_rng([rows, inter])
    gate, up = bf16(rng, rows, inter, scale=3), bf16(rng, rows, inter, scale=3)
    w = rng.uniform(0.1, 2, rows).astype(np.float32) if weighted else None
    h = launches.swiglu(gpu, gate, up, w, limit)
    fused_h, fused_y = launches.swiglu_quantise(gpu, gate, up, w, limit)
    assert same_bits(fused_h, h)
    assert same_bits(fused_y, launches.quantise(gpu, h))


# Products


@EACH_KIND
@pytest.mark.parametrize("k", [256, 512, 768, 2304])
@pytest.mark.parametrize("n", [1, 3, 4, 6, 33])
def test_products_in_bf16(gpu, kind, n, k):
    rng = np.random.default_rng([n, k])
    weight, y = kquant_rows(rng, kind, n, k), quantize_q8_1_rows(bf16(rng, 2, k))
    assert_bf16_near(launches.mmvq(gpu, kind, weight, y.stored), oracle.mmvq(kind, weight, y))


@EACH_KIND
@pytest.mark.parametrize("m", range(1, 9))
def test_products_in_f32(gpu, kind, m):
    rng = np.random.default_rng(m)
    weight, y = kquant_rows(rng, kind, 21, 1280), quantize_q8_1_rows(bf16(rng, m, 1280))
    assert_near(launches.mmvq_f32(gpu, kind, weight, y.stored), oracle.mmvq(kind, weight, y))


@EACH_KIND
def test_products_with_each_kind_of_row_that_ggml_quantised(gpu, ggml, kind):
    rows = ggml_rows(ggml, kind)
    y = quantize_q8_1_rows(bf16(np.random.default_rng(4), 8, 1024))
    got = launches.mmvq(gpu, kind, rows, y.stored)
    want = oracle.mmvq(kind, rows, y)
    assert len(rows) == 2 * len(ggml["names"])
    for first in range(0, len(rows), 2):
        assert_bf16_near(got[:, first : first + 2], want[:, first : first + 2])


def test_products_do_not_use_the_stored_sums(gpu):
    rng = np.random.default_rng(5)
    weight, y = kquant_rows(rng, Q2_K, 10, 512), quantize_q8_1_rows(bf16(rng, 1, 512) & 0x7FFF).stored
    other_sums = y.copy().reshape(-1, 36)
    other_sums[:, 2:4] = 0xFF
    got = launches.mmvq(gpu, Q2_K, weight, other_sums.reshape(y.shape))
    assert same_bits(got, launches.mmvq(gpu, Q2_K, weight, y))


@EACH_KIND
def test_a_row_does_not_depend_on_the_rows_beside_it(gpu, kind):
    rng = np.random.default_rng(6)
    weight, y = kquant_rows(rng, kind, 19, 768), quantize_q8_1_rows(bf16(rng, 8, 768)).stored
    alone = np.concatenate([launches.mmvq(gpu, kind, weight, row[None]) for row in y])
    for m in range(1, 9):
        assert same_bits(launches.mmvq(gpu, kind, weight, y[:m]), alone[:m])


@EACH_KIND
def test_blocks_need_no_more_alignment_than_their_size_gives(gpu, kind):
    rng = np.random.default_rng(7)
    weight, y = kquant_rows(rng, kind, 9, 768), quantize_q8_1_rows(bf16(rng, 1, 768)).stored
    shift = 4 if kind is Q2_K else 2
    assert same_bits(launches.mmvq(gpu, kind, weight, y, shift=shift), launches.mmvq(gpu, kind, weight, y))


@EACH_KIND
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_spoilt_activation_spoils_its_row_of_outputs_only(gpu, kind, bad):
    rng = np.random.default_rng(8)
    weight, x = kquant_rows(rng, kind, 9, 512), bf16(rng, 3, 512)
    x[1, 300] = bad
    got = bf16_values(launches.mmvq(gpu, kind, weight, quantize_q8_1_rows(x).stored))
    assert np.isnan(got).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(got[[0, 2]]).all()


# Experts


@EXPERT_KINDS
@pytest.mark.parametrize("warps", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("n", [5, 16])
def test_experts_have_the_bits_of_launches_of_their_own(gpu, kind, warps, m, n):
    rng = np.random.default_rng([warps, m, n])
    weights, x = kquant_rows(rng, kind, 4, n, 768), bf16(rng, 5, m, 768)
    y = np.stack([quantize_q8_1_rows(rows).stored for rows in x])
    order = [2, 0, 3, 0, 1]
    stride = m * kquant_q8_1_rows_bytes(1, 768) + 8
    got = launches.mmvq_experts(gpu, kind, weights, y, warps, stride, order)
    for e, expert in enumerate(order):
        assert same_bits(got[e], launches.mmvq(gpu, kind, weights[expert], y[e]))


@EXPERT_KINDS
@pytest.mark.parametrize("warps", [2, 4, 8])
def test_experts_share_activations_for_a_stride_of_0(gpu, kind, warps):
    rng = np.random.default_rng(9)
    weights, y = kquant_rows(rng, kind, 3, 10, 512), quantize_q8_1_rows(bf16(rng, 2, 512)).stored
    got = launches.mmvq_experts(gpu, kind, weights, y, warps)
    for e in range(3):
        assert same_bits(got[e], launches.mmvq(gpu, kind, weights[e], y))


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [2, 4, 8])
@pytest.mark.parametrize(("kind", "n", "k"), [(Q2_K, 2304, 5120), (Q3_K, 5120, 2304)], ids=str)
def test_six_experts_of_the_real_model(cuda, kind, n, k, warps):
    rng = np.random.default_rng(10)
    weights, y = kquant_rows(rng, kind, 6, n, k), quantize_q8_1_rows(bf16(rng, 1, k))
    got = launches.mmvq_experts(cuda, kind, weights, y.stored, warps)
    assert_bf16_near(got[:, 0], np.stack([oracle.mmvq(kind, weight, y)[0] for weight in weights]))


@pytest.mark.gpu
@EACH_KIND
@pytest.mark.parametrize("m", [1, 8])
def test_a_square_matrix_of_the_real_model(cuda, kind, m):
    rng = np.random.default_rng(m)
    weight, y = kquant_rows(rng, kind, 5120, 5120), quantize_q8_1_rows(bf16(rng, m, 5120))
    want = oracle.mmvq(kind, weight, y)
    assert_bf16_near(launches.mmvq(cuda, kind, weight, y.stored), want)
    assert_near(launches.mmvq_f32(cuda, kind, weight, y.stored), want)


@pytest.mark.gpu
def test_a_prompts_activations_equal_the_oracles_bytes(cuda):
    x = bf16(np.random.default_rng(11), 512, 5120)
    assert same_bits(launches.quantise(cuda, x), quantize_q8_1_rows(x).stored)


@pytest.mark.gpu
def test_values_near_halves_round_as_the_oracle_does(cuda):
    """Ratios x / d with d = 1 and every half of the range, then many with other scales."""
    halves = bf16_bits(np.concatenate([np.full(32, 127.0), np.arange(-63.5, 64.5)]))
    x = np.resize(halves, (40, 3200))
    x[:, ::32] = bf16_bits(np.geomspace(100, 400, 40))[:, None]
    assert same_bits(launches.quantise(cuda, x), quantize_q8_1_rows(x).stored)
