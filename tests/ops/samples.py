# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random inputs of kernels, and how far their results may be from the oracles'."""

import numpy as np

from metrale.formats.kquant import Q2_K, Q3_K, Q6_K
from metrale.reference.bf16 import bf16_bits, bf16_values

BF16_BOUND = 2.5e-3
F32_BOUND = 1e-3
HALF_ULP = 2.0**-8 * 1.001  # of bf16, at most, relative; and what f32 adds to it
KINDS = (Q2_K, Q3_K, Q6_K)
# Where the f16 factors of a block lie, and the size of the weights' other factor in it.
_F16_AT = {Q2_K: ((80, 8 * 1.5), (82, 8)), Q3_K: ((108, 16 * 2),), Q6_K: ((208, 64 * 16),)}


def bf16(rng, *shape, scale=1.0):
    """Normally distributed bf16 bits."""
    return bf16_bits(rng.standard_normal(shape) * scale)


def kquant_rows(rng, kind, *shape):
    """Raw rows uint8 `[..., row bytes]` for a shape `[..., K]`: any bits, with weights about 1 in size."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, kind.block_bytes), np.uint8)
    for at, size in _F16_AT[kind]:
        d = (rng.uniform(0.5, 1.5, blocks.shape[:-1]) / size).astype("<f2")
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def assert_near(got, want, bound=F32_BOUND):
    """Each vector along the last axis within a relative L2 error of `bound`."""
    error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=-1)
    assert (error <= bound * np.linalg.norm(want, axis=-1)).all()


def assert_bf16_near(bits, want):
    """Each vector within the bound of bf16 results. It counts on many roundings, each of up to half an ulp:
    where there are few, all of them may be near that."""
    assert_near(bf16_values(bits), want, BF16_BOUND if want.shape[-1] >= 128 else HALF_ULP)


def assert_bf16_rounded(bits, want):
    """Each element rounded once from an f32 value, exact to a few ulp; results below 1e-35 may vanish."""
    got = bf16_values(bits)
    assert (np.abs(got - want) <= HALF_ULP * np.abs(want) + 1e-35).all()


def same_bits(a, b):
    """Whether two arrays hold the same bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
