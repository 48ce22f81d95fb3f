# SPDX-License-Identifier: MIT OR Apache-2.0
"""bfloat16 as uint16 bits: exact conversions, rounding to nearest even."""

import numpy as np
import numpy.typing as npt

__all__ = ["bf16_bits", "bf16_round", "bf16_values"]

CANONICAL_NAN = 0x7FFF


def bf16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    """The float64 values of bf16 bits (exact)."""
    singles = (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return singles.astype(np.float64)


def bf16_bits(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """The bits of the bf16 values nearest to float64 (or narrower) values, ties to even; NaN is 0x7FFF.

    The way through f32 must not round twice, so its own rounding is to odd: towards zero, with the last bit
    set if anything was cut off. The second rounding then sees on which side of a tie the value was.
    """
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = exact.astype(np.float32)
        words = near.view(np.uint32).astype(np.int64)
        words -= np.abs(near.astype(np.float64)) > np.abs(exact)
        words |= (near.astype(np.float64) != exact) & ~np.isnan(exact)
        rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return np.where(np.isnan(exact), CANONICAL_NAN, rounded).astype(np.uint16)


def bf16_round(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The bf16 values nearest to `values`, as float64."""
    return bf16_values(bf16_bits(values))
