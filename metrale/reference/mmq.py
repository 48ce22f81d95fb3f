# SPDX-License-Identifier: MIT OR Apache-2.0
"""Activations of the int8 tensor cores: D4 and D2S6, 144 bytes for 128 values.

    D4     f32 d[4]                of each 32 values; for Q3_K
    D2S6   f16 d[2], f16 s[6]      d of each 64 values, s = d * sum(q) of groups of 16, the first six; for Q2_K
    then   int8 q[128],            value = d * q

A matrix [M, K] is stored as [ceil256(K) / 128][ceil128(M)] blocks, what is beyond K and M as zeros.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metrale.errors import refuse
from metrale.formats.kquant import SUPER_BLOCK
from metrale.reference.bf16 import bf16_values

__all__ = ["MmqActivations", "quantize_mmq"]

VALUES, ROWS = 128, 128
SCALE_VALUES = {"d4": 32, "d2s6": 64}
F16_NAN = 0x7FFF


@dataclass(frozen=True, slots=True, eq=False)
class MmqActivations:
    """What a quantiser makes of bf16 `[M, K]`."""

    stored: npt.NDArray[np.uint8]
    """`[blocks, padded rows, 144]`, what the kernel writes"""
    values: npt.NDArray[np.float64]
    """`[M, K]`, `d * q` with the stored scale"""


def quantize_mmq(x: npt.NDArray[np.uint16], layout: str) -> MmqActivations:
    """Quantise bf16 bits `[M, K]`, K a multiple of 32, in the layout "d4" or "d2s6", bit for bit.

    `d = amax / 127` in f32 over the values of a scale, `q = round(x / d)`, halves away from zero. D2S6 stores d as f16,
    and its sums are that f16 times the exact sum, rounded to f16. Zeros give zeros; a NaN or an infinity gives
    the values of its scale a NaN for d and zero ints.
    """
    if layout not in SCALE_VALUES:
        refuse("layout", layout, ", ".join(SCALE_VALUES))
    m, k = x.shape
    span = SCALE_VALUES[layout]
    padded = np.zeros((-(-m // ROWS) * ROWS, -(-k // SUPER_BLOCK) * SUPER_BLOCK), np.float32)
    padded[:m, :k] = bf16_values(x)
    groups = padded.reshape(len(padded), -1, span)
    with np.errstate(all="ignore"):
        amax = np.abs(groups).max(axis=-1, keepdims=True)
        good = np.isfinite(groups).all(axis=-1, keepdims=True)
        d = np.where(good, amax / np.float32(127), np.float32(np.nan))
        ratio = (groups / np.where(good & (amax > 0), d, np.float32(1))).astype(np.float64)
        q = np.where(good & (amax > 0), np.sign(ratio) * np.floor(np.abs(ratio) + 0.5), 0).astype(np.int8)

    blocks = padded.shape[1] // VALUES
    stored = np.zeros((len(padded), blocks, 144), np.uint8)
    stored[..., 16:] = q.reshape(len(padded), blocks, VALUES).view(np.uint8)
    if layout == "d4":
        kept = d[..., 0]
        stored[..., :16] = kept.astype("<f4").reshape(len(padded), blocks, 4).view(np.uint8)
    else:
        halves = _f16(d[..., 0])
        kept = halves.view(np.float16).astype(np.float32)
        sums = q.astype(np.int64).reshape(len(padded), -1, 4, 16).sum(axis=-1)
        with np.errstate(all="ignore"):
            group_sums = _f16(kept[..., None] * sums.astype(np.float32)).reshape(len(padded), blocks, 8)
        header = np.concatenate([halves.reshape(len(padded), blocks, 2), group_sums[..., :6]], axis=-1)
        stored[..., :16] = header.astype("<u2").view(np.uint8)
    with np.errstate(invalid="ignore"):
        values = (kept.astype(np.float64)[..., None] * q).reshape(padded.shape)[:m, :k]
    return MmqActivations(np.ascontiguousarray(stored.transpose(1, 0, 2)), values)


def _f16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    with np.errstate(over="ignore", under="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(F16_NAN), bits).astype(np.uint16)
