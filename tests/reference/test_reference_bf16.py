# SPDX-License-Identifier: MIT OR Apache-2.0
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.reference.bf16 import bf16_bits, bf16_round, bf16_values

FINITE = np.concatenate([np.arange(0x0000, 0x7F80), np.arange(0x8000, 0xFF80)]).astype(np.uint16)


def test_every_finite_value_and_infinity_survives():
    bits = np.concatenate([FINITE, np.array([0x7F80, 0xFF80], np.uint16)])
    assert (bf16_bits(bf16_values(bits)) == bits).all()


def test_nan_stays_nan():
    bits = np.concatenate([np.arange(0x7F81, 0x8000), np.arange(0xFF81, 0x10000)]).astype(np.uint16)
    assert np.isnan(bf16_values(bits)).all()
    assert np.isnan(bf16_round(bf16_values(bits))).all()


@given(st.floats(-3e38, 3e38) | st.floats(-1e-38, 1e-38))
def test_the_nearest_value_is_taken(x):
    taken = Fraction(float(bf16_round(x)))
    bits = int(bf16_bits(abs(x)))
    for neighbour in (max(bits - 1, 0), min(bits + 1, 0x7F7F)):
        other = Fraction(float(np.copysign(bf16_values(np.uint16(neighbour)), x)))
        assert abs(taken - Fraction(x)) <= abs(other - Fraction(x))


@pytest.mark.parametrize("bits", [0x3F80, 0x3F81, 0x0000, 0x0001, 0x7F7E, 0x7F7F])
def test_ties_go_to_the_even_neighbour_and_anything_beyond_does_not(bits):
    below = float(bf16_values(np.uint16(bits)))
    above = float(bf16_values(np.uint16(bits + 1))) if bits < 0x7F7F else 2.0**128
    tie = below + (above - below) / 2
    assert bf16_bits(tie) == bits + bits % 2
    assert bf16_bits(np.nextafter(tie, np.inf)) == bits + 1
    assert bf16_bits(np.nextafter(tie, 0)) == bits
    assert bf16_bits(-tie) == 0x8000 | (bits + bits % 2)


def test_beyond_the_range_is_infinity_or_signed_zero():
    assert bf16_bits([1e300, -1e300, 1e-300, -1e-300]).tolist() == [0x7F80, 0xFF80, 0x0000, 0x8000]
