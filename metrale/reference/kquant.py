# SPDX-License-Identifier: MIT OR Apache-2.0
"""K-quant weights and q8_1 activations.

A super-block is 256 weights in 16 groups of 16, each group with its own scale. Weight `l` of group `g` is

    Q2_K   d * scale[g] * q - dmin * min[g]      q in 0..3, scale and min in 0..15
    Q3_K   d * (scale[g] - 32) * (q - 4)         q in 0..7, scale in 0..63
    Q6_K   d * scale[g] * (q - 32)               q in 0..63, scale int8

and the low bits of the weights are packed so that one byte serves the same `l` of several groups: with
`g = 8 * half + 2 * j + side`, the two bits of Q2_K and Q3_K are bits `2j, 2j + 1` of byte
`32 * half + 16 * side + l`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metrale.errors import refuse
from metrale.formats.kquant import (
    Q2_K,
    Q3_K,
    Q6_K,
    Q8_1_BLOCK_BYTES,
    Q8_1_BLOCK_VALUES,
    SUPER_BLOCK,
    QuantType,
    kquant_q8_1_rows_bytes,
)
from metrale.reference.bf16 import bf16_values

__all__ = ["Q8Rows", "dequantize", "mmvq", "quantize_q8_1_rows"]

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

GROUPS, GROUP = 16, 16
F16_NAN = 0x7FFF
"""The NaN of CUDA's f32 to f16 conversion."""


def dequantize(kind: QuantType, raw: U8) -> F32:
    """The f32 weights of raw rows: uint8 `[..., row bytes]` to f32 `[..., K]`, bit for bit those of ggml."""
    decoders = {Q2_K: _decode_q2_k, Q3_K: _decode_q3_k, Q6_K: _decode_q6_k}
    if kind not in decoders:
        refuse("kind", str(kind), "Q2_K, Q3_K, Q6_K")
    row_bytes = raw.shape[-1]
    if row_bytes % kind.block_bytes:
        refuse("row bytes", row_bytes, f"a multiple of {kind.block_bytes} ({kind})")
    blocks = np.ascontiguousarray(raw, np.uint8).reshape(-1, kind.block_bytes)
    with np.errstate(over="ignore", invalid="ignore"):
        values = decoders[kind](blocks)
    return values.reshape(*raw.shape[:-1], row_bytes // kind.block_bytes * SUPER_BLOCK)


@dataclass(frozen=True, slots=True, eq=False)
class Q8Rows:
    """bf16 `[M, K]` activations as q8_1 blocks `[M, K/32]`.

    `stored` is what the kernel writes: uint8 `[M, K/32 * 36]`, of each block the f16 scale, the f16 sum of
    the inputs, and 32 int8. `d_f32` is the scale that the ints were rounded with, before it is cut to f16.
    """

    d_f32: F32
    d_bits: npt.NDArray[np.uint16]
    sum_bits: npt.NDArray[np.uint16]
    q: npt.NDArray[np.int8]
    stored: U8

    def values(self) -> F64:
        """`d * q` with the stored f16 scale, float64 `[M, K]`: what a GEMV multiplies with."""
        d = self.d_bits.view(np.float16).astype(np.float64)
        return (d[..., None] * self.q).reshape(self.q.shape[0], -1)


def quantize_q8_1_rows(x: npt.NDArray[np.uint16]) -> Q8Rows:
    """Quantise bf16 bits `[M, K]`, K a multiple of 32, as `kquant_q8_1_rows_bf16` does, bit for bit.

    For each 32 values: `d = amax / 127` in f32, `q = round(x / d)` in f32, halves away from zero, d stored as
    f16. The sum is added in f32 pairwise over the distances 16, 8, 4, 2, 1, then stored as f16. `amax = 0`
    gives a block of zero bytes; a NaN or infinity in the block gives a NaN for d, zero ints, and whatever the
    sum is then.
    """
    m, k = x.shape
    row_bytes = kquant_q8_1_rows_bytes(1, k)
    blocks = bf16_values(x).astype(np.float32).reshape(m, -1, Q8_1_BLOCK_VALUES)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=-1)
        finite = np.isfinite(blocks).all(axis=-1)
        usable = finite & (amax > 0)

        d = np.where(usable, amax / np.float32(127), np.float32(0))
        d[~finite] = np.nan
        ratio = blocks / np.where(usable, d, np.float32(1))[..., None]
        rounded = np.copysign(np.floor(np.abs(ratio).astype(np.float64) + 0.5), ratio)
        q = np.where(usable[..., None], rounded, 0).astype(np.int8)

        tree = blocks
        while tree.shape[-1] > 1:
            half = tree.shape[-1] // 2
            tree = tree[..., :half] + tree[..., half:]
        total = np.where(amax == 0, np.float32(0), tree[..., 0])

    d_bits, sum_bits = _f16_bits(d), _f16_bits(total)
    stored = np.empty((m, k // Q8_1_BLOCK_VALUES, Q8_1_BLOCK_BYTES), np.uint8)
    stored[..., 0:2] = d_bits.astype("<u2")[..., None].view(np.uint8)
    stored[..., 2:4] = sum_bits.astype("<u2")[..., None].view(np.uint8)
    stored[..., 4:] = q.view(np.uint8)
    return Q8Rows(d, d_bits, sum_bits, q, stored.reshape(m, row_bytes))


def mmvq(kind: QuantType, weight: U8, y: Q8Rows) -> F64:
    """`out[m, n] = sum_k W[n, k] * y[m, k]`, float64 `[M, N]`, for raw rows `weight` `[N, row bytes]`.

    W is dequantised, y is `d * q`. The minimum term of Q2_K so becomes `dmin * min * d * sum(q)` over its
    group; the stored sums of the unquantised inputs are not used.
    """
    return y.values() @ dequantize(kind, weight).astype(np.float64).T


def _f16_bits(values: F32) -> npt.NDArray[np.uint16]:
    with np.errstate(over="ignore", under="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(F16_NAN), bits).astype(np.uint16)


def _f16(blocks: U8, at: int) -> F32:
    """The f16 at byte `at` of each block, as f32 `[blocks, 1, 1]` (exact)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32).reshape(-1, 1, 1)


def _bit_fields(packed: U8, shifts: tuple[int, ...], mask: int) -> U8:
    """A field of each byte `[blocks, halves, 32]` for each shift: `[blocks, 16 groups, 16]`, weight order."""
    fields: U8 = packed[:, :, None, :] >> np.array(shifts, np.uint8)[None, None, :, None]
    return (fields & np.uint8(mask)).reshape(-1, GROUPS, GROUP)


def _two_bits(packed: U8) -> U8:
    return _bit_fields(packed.reshape(-1, 2, 32), (0, 2, 4, 6), 3)


def _decode_q2_k(blocks: U8) -> F32:
    """16 bytes `min << 4 | scale`, 64 bytes of two-bit fields, d, dmin."""
    scales = blocks[:, :16, None]
    d, dmin = _f16(blocks, 80), _f16(blocks, 82)
    q = _two_bits(blocks[:, 16:80]).astype(np.float32)
    values: F32 = d * (scales & 15).astype(np.float32) * q - dmin * (scales >> 4).astype(np.float32)
    return values


def _decode_q3_k(blocks: U8) -> F32:
    """32 bytes of third bits, 64 of two-bit fields, 12 of scales (8 x low nibbles, 4 x high pairs), d.

    Bit `4 * half + j` of byte `16 * side + l` is the third bit. Scale g has its low four bits in nibble
    `g // 8` of byte `g % 8`, its high two in pair `g // 4` of byte `8 + g % 4`.
    """
    third = _bit_fields(blocks[:, None, :32], tuple(range(8)), 1)
    q = (_two_bits(blocks[:, 32:96]) | third << 2).astype(np.float32)
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | high << 4).astype(np.float32)[..., None]
    values: F32 = _f16(blocks, 108) * (scales - 32) * (q - 4)
    return values


def _decode_q6_k(blocks: U8) -> F32:
    """128 bytes of low nibbles, 64 of two-bit high fields, 16 int8 scales, d.

    In each half the low nibbles of 64 bytes are the first 64 weights, the high nibbles the other 64.
    """
    nibbles = blocks[:, :128].reshape(-1, 2, 64)
    low = np.stack([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, GROUPS, GROUP)
    q = (low | _two_bits(blocks[:, 128:192]) << 4).astype(np.float32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)[..., None]
    values: F32 = _f16(blocks, 208) * scales * (q - 32)
    return values
