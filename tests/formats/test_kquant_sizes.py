# SPDX-License-Identifier: MIT OR Apache-2.0
import gguf as gguf_package
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import ArgumentError
from metrale.formats import kquant
from metrale.formats.kquant import kquant_mmq_act_bytes, kquant_q8_1_rows_bytes, kquant_weight_bytes

# Of q8_1 the gguf package describes an older layout, which no file stores.
STORED = [t for t in gguf_package.GGML_QUANT_SIZES if t.name != "Q8_1"]
K_QUANTS = (kquant.Q2_K, kquant.Q3_K, kquant.Q6_K)

counts = st.integers(0, 1 << 20)
super_blocks = st.integers(1, 1 << 10)


@pytest.mark.parametrize("kind", STORED, ids=lambda t: t.name)
def test_types_are_the_gguf_packages_or_unknown(kind):
    ours = kquant.quant_type(int(kind))
    if ours.known:
        assert (ours.name, ours.block_values, ours.block_bytes) == (
            kind.name,
            *gguf_package.GGML_QUANT_SIZES[kind],
        )
    else:
        assert (ours.name, ours.ggml_id) == (f"type {int(kind)}", int(kind))


@pytest.mark.parametrize("kind", [kquant.F32, kquant.F16, kquant.BF16, *K_QUANTS], ids=str)
def test_the_types_of_the_kernels_are_known_by_id(kind):
    assert kquant.quant_type(kind.ggml_id) is kind


@given(n=counts, blocks=super_blocks, kind=st.sampled_from(K_QUANTS))
def test_weight_bytes_are_rows_of_blocks(n, blocks, kind):
    assert kquant_weight_bytes(n, blocks * 256, kind.block_bytes) == n * blocks * kind.block_bytes
    assert kquant_weight_bytes(n, blocks * 256, kind.block_bytes) == n * kind.row_bytes(blocks * 256)


def test_an_expert_of_the_real_model():
    gate_and_up = 2 * kquant_weight_bytes(2304, 5120, kquant.Q2_K.block_bytes)
    assert gate_and_up + kquant_weight_bytes(5120, 2304, kquant.Q3_K.block_bytes) == 12_810_240


@given(m=counts, blocks=st.integers(1, 1 << 12))
def test_q8_1_rows_have_36_bytes_for_32_values(m, blocks):
    assert kquant_q8_1_rows_bytes(m, blocks * 32) == m * blocks * 36


@given(m=counts, blocks=st.integers(1, 1 << 12))
def test_mmq_activations_cover_their_rows_in_whole_tiles(m, blocks):
    k = blocks * 32
    size = kquant_mmq_act_bytes(m, k)
    tile = 128 * 2 * 144
    assert size % tile == 0
    assert size // tile == ((m + 127) // 128) * ((k + 255) // 256)


@given(k=st.integers(-512, 4096).filter(lambda k: k <= 0 or k % 32))
def test_k_that_ends_inside_a_block_is_refused(k):
    for size in (kquant_q8_1_rows_bytes, kquant_mmq_act_bytes):
        with pytest.raises(ArgumentError, match=f"k: got {k}, allowed: a positive multiple of 32"):
            size(1, k)
    with pytest.raises(ArgumentError, match=f"k: got {k}, allowed: a positive multiple of 256"):
        kquant_weight_bytes(1, k, 84)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kquant_weight_bytes(-1, 256, 84), "n: got -1, allowed: 0 or more"),
        (lambda: kquant_weight_bytes(1, 32, 84), "k: got 32, allowed: a positive multiple of 256"),
        (
            lambda: kquant_weight_bytes(1, 256, 144),
            r"block_bytes: got 144, allowed: 84 \(Q2_K\), 110 \(Q3_K\), 210",
        ),
        (lambda: kquant_q8_1_rows_bytes(-1, 32), "m: got -1"),
        (lambda: kquant_mmq_act_bytes(-1, 32), "m: got -1"),
        (lambda: kquant.Q3_K.row_bytes(255), r"k: got 255, allowed: a multiple of 256 \(Q3_K\)"),
        (
            lambda: kquant.quant_type(99).row_bytes(256),
            "type: got 'type 99', allowed: a type whose block size",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
