# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engram of a layer on the device and its reference beside it, for ``demo`` and ``verify``.

The token and the streams of a step are made of the input ``x`` of the MoE layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale.engram_v41 import EngramHasher, EngramV41
from metrale.formats.deepseek41 import EngramLayerSpec
from metrale.formats.kquant import BF16
from metrale.formats.load import upload_engram_layer
from metrale.gpu import GpuBackend
from metrale.reference import engram as reference
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.dense import dense_gemv

__all__ = ["EngramResult", "EngramUnderTest", "open_engram"]

TOKENS_AT_ONCE = 2
MAX_SEQ = 1 << 20  # tokens, after which the sequence starts anew


class EngramResult(NamedTuple):
    """What a step read and left: ids and rows of the token, kv (bf16 bits), and the streams before and after."""

    ids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint16]
    kv: npt.NDArray[np.uint16]
    before: npt.NDArray[np.float32]
    after: npt.NDArray[np.float32]


@dataclass(frozen=True)
class EngramUnderTest:
    """An engram layer on the device, whose table stays where it is stored, and the matrices of the reference."""

    gpu: GpuBackend
    spec: EngramLayerSpec
    engram: EngramV41
    hasher: EngramHasher
    wkv: npt.NDArray[np.uint16]
    """bf16 bits ``[(hc + 1) * dim, cols * head_dim]``"""
    qk: npt.NDArray[np.float32]

    def step(self, x: npt.NDArray[np.uint16], tokens: int = 1) -> EngramResult:
        """Append a token and run it, ``tokens`` times over at once."""
        spec, gpu, engram = self.spec, self.gpu, self.engram
        token = int(x.astype(np.int64).sum()) % len(spec.hash.token_map)
        if len(self.hasher) == MAX_SEQ:
            self.hasher.truncate(0)
        ids = self.hasher.append([token])[0, spec.site]
        raw = np.tile(spec.table.numpy()[ids], (tokens, 1))
        values = bf16_values(x).astype(np.float32)
        before = np.stack([np.roll(values, stream) for stream in range(spec.hc)])
        rows, kv = np.empty((tokens, engram.in_features), np.uint16), np.empty((tokens, engram.out_features), np.uint16)
        with gpu.upload(np.tile(before, (tokens, 1, 1)), "engram.streams") as streams:
            engram.rows_from_q2k(spec.layer, raw)
            engram.apply(spec.layer, streams, tokens)
            gpu.copy_d2h(engram.rows_ptr(spec.layer), rows)
            gpu.copy_d2h(engram.kv_ptr(), kv)
            after = streams.numpy("float32", (tokens, *before.shape))
        return EngramResult(ids, rows, kv, before, after)

    def expected_ids(self) -> npt.NDArray[np.int64]:
        """Of the token that was appended last."""
        constants, site = self.spec.hash, self.spec.site
        window = self.hasher.compressed[-constants.max_ngram :]
        ids = reference.row_ids(
            window, constants.multipliers[site], constants.primes[site], constants.offsets[site], constants.pad
        )
        last: npt.NDArray[np.int64] = ids[-1]
        return last

    def expected_rows(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """Of these ids, bf16 bits."""
        return reference.dequant_q2_k_to_bf16(self.spec.table.numpy()[ids]).reshape(-1)

    def expected_kv(self, rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
        """Of a token's rows."""
        return dense_gemv(rows, self.wkv)

    def expected_streams(self, before: npt.NDArray[np.float32], kv: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
        """Of a token's streams and kv."""
        streams: npt.NDArray[np.float64] = reference.gate(before[None], kv[None], self.qk, self.spec.eps)[0]
        return streams

    def exact_streams(self, result: EngramResult) -> npt.NDArray[np.float64]:
        """From the ids on, in float64 that is rounded where the kernels store."""
        kv = bf16_bits(self.expected_kv(self.expected_rows(result.ids)))
        return self.expected_streams(result.before, kv)


@contextmanager
def open_engram(gpu: GpuBackend, spec: EngramLayerSpec) -> Iterator[EngramUnderTest]:
    """Load the layer but its table, which may be larger than the device's memory; all is given back at the end."""
    loaded = upload_engram_layer(gpu, spec, resident=False)
    try:
        engram = EngramV41(gpu, **loaded.shape, max_tokens=TOKENS_AT_ONCE)
        try:
            engram.add_layer(loaded.weights)
            stored: Any = spec.wkv.numpy()
            wkv = stored if spec.wkv.type is BF16 else reference.dequant_q2_k_to_bf16(stored)
            yield EngramUnderTest(
                gpu, spec, engram, EngramHasher(spec.hash, MAX_SEQ), wkv, spec.q.numpy() * spec.k.numpy()
            )
        finally:
            engram.free()
    finally:
        loaded.free()
