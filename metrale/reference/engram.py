# SPDX-License-Identifier: MIT OR Apache-2.0
"""The DeepSeek-V4.1 engram memory: row ids from n-grams, rows, their projection, and the gate onto the highway.

    roll_1 = tok_0 * m_0;  roll_n = roll_(n-1) ^ tok_(n-1) * m_(n-1)              64-bit, signed, wrapping
    id     = roll_n mod prime + offset                                            for n = 2 .. max_ngram, each head
    kv     = wkv * rows                                                           hc keys and a value, of dim each
    dot    = sum(h * qk * key) * rsqrt(mean(h^2) + eps) * rsqrt(mean(key^2) + eps) / sqrt(dim)
    h     += sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) * value

`tok_j` is the compressed id `j` tokens back. From the first look-back that falls before the start or on an
unmapped token on, all are the pad's.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from metrale.formats.kquant import Q2_K
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.kquant import dequantize

__all__ = ["dequant_q2_k_to_bf16", "gate", "row_ids", "rows", "wkv"]

Bits = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]

SMALLEST_DOT = 1e-6


def row_ids(
    compressed: npt.ArrayLike,
    multipliers: Iterable[int],
    primes: npt.ArrayLike,
    offsets: npt.ArrayLike,
    pad: int,
) -> npt.NDArray[np.int64]:
    """Ids `[T, cols]` of one site for the compressed ids `[T]` (-1: unmapped) of a sequence from its start.

    multipliers `[max_ngram]`; primes and offsets `[cols]`, the heads of 2-grams first, then those of 3-grams.
    """
    tokens = [int(token) for token in np.asarray(compressed)]
    factors = [int(factor) for factor in multipliers]
    moduli = np.asarray(primes).reshape(len(factors) - 1, -1)
    starts = np.asarray(offsets).reshape(moduli.shape)
    ids = np.empty((len(tokens), *moduli.shape), np.int64)
    for p in range(len(tokens)):
        window = tokens[max(p - len(factors) + 1, 0) : p + 1][::-1]
        known = window.index(-1) if -1 in window else len(window)
        window = window[:known] + [int(pad)] * (len(factors) - known)
        roll = _wrapped(window[0] * factors[0])
        for n in range(1, len(factors)):
            roll ^= _wrapped(window[n] * factors[n])
            for head, (prime, start) in enumerate(zip(moduli[n - 1], starts[n - 1], strict=True)):
                ids[p, n - 1, head] = roll % int(prime) + int(start)
    return ids.reshape(len(tokens), -1)


def dequant_q2_k_to_bf16(raw: U8) -> Bits:
    """The bf16 bits `[..., K]` nearest to ggml's f32 values of raw Q2_K rows `[..., row bytes]`."""
    return bf16_bits(dequantize(Q2_K, raw))


def rows(table: U8, ids: npt.ArrayLike) -> Bits:
    """bf16 bits `[..., head_dim]` of the rows of a raw Q2_K table `[rows, row bytes]`; zeros for an id outside it."""
    at = np.asarray(ids, np.int64)
    inside = (at >= 0) & (at < len(table))
    found = dequant_q2_k_to_bf16(table[np.where(inside, at, 0)])
    found[~inside] = 0
    return found


def wkv(a: Bits, weight: U8) -> F64:
    """`kv[t, n] = sum_k a[t, k] * bf16(weight[n, k])` for bf16 bits `a` `[T, K]` and raw Q2_K rows `weight`."""
    return bf16_values(a) @ bf16_values(dequant_q2_k_to_bf16(weight)).T


def gate(streams: npt.ArrayLike, kv: Bits, qk: npt.ArrayLike, eps: float) -> F64:
    """Gated streams `[T, hc, dim]` of f32 streams, bf16 bits `kv` `[T, (hc + 1) * dim]`, f32 `qk` `[hc, dim]`."""
    h = np.asarray(streams, np.float64)
    tokens, hc, dim = h.shape
    parts = bf16_values(kv).reshape(tokens, hc + 1, dim)
    key, value = parts[:, :hc], parts[:, hc:]
    scale = np.float64(np.float32(eps))
    with np.errstate(invalid="ignore", over="ignore"):
        dot = (h * np.asarray(qk, np.float64) * key).sum(-1, keepdims=True)
        for x in (h, key):
            dot = dot / np.sqrt((x * x).mean(-1, keepdims=True) + scale)
        dot = dot / np.sqrt(dim)
        g = np.copysign(np.sqrt(np.maximum(np.abs(dot), SMALLEST_DOT)), dot)
        gated: F64 = h + value / (1 + np.exp(-g))
    return gated


def _wrapped(product: int) -> int:
    """The signed 64-bit integer of the same low bits."""
    return (product + (1 << 63)) % (1 << 64) - (1 << 63)
