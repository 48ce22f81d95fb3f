# SPDX-License-Identifier: MIT OR Apache-2.0
"""The layers that the tests of this folder run."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np

from metrale.engram_v41 import EngramTable, EngramV41, EngramV41LayerWeights
from metrale.engram_v41.weights import upload_qk
from metrale.formats.gguf import load_engram_layer
from metrale.formats.kquant import BF16, Q2_K
from metrale.gpu.owner import Owner
from metrale.moe_v41 import ResidentMat
from metrale.reference.bf16 import bf16_bits

DATA = Path(__file__).resolve().parent.parent / "data"
TINY = DATA / "tiny-v41.gguf"
LAYER = 1  # of the small model


@contextmanager
def running(gpu, max_tokens=1, **options):
    """`(engram, loaded)` of the small model's layer, given back at the end."""
    loaded = load_engram_layer(gpu, TINY, LAYER, **options)
    try:
        engram = EngramV41(gpu, **loaded.shape, max_tokens=max_tokens)
        try:
            engram.add_layer(loaded.weights)
            yield engram, loaded
        finally:
            engram.free()
    finally:
        loaded.free()


def q2_k_rows(rng, n, k):
    """Raw rows uint8 `[n, row bytes]` with weights about 1 in size."""
    blocks = rng.integers(0, 256, (n, k // 256, 84), np.uint8)
    blocks[..., 80:84] = np.array([1 / 12, 1 / 8], np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


class Arrays:
    """A layer of random weights, as arrays."""

    def __init__(self, seed, *, dim, hc, cols, head_dim=256, table_rows=9, layer=0):
        rng = np.random.default_rng([seed, dim, hc, cols])
        self.layer = layer
        self.shape = {"dim": dim, "hc": hc, "head_dim": head_dim, "cols": cols, "eps": 1e-6}
        self.n, self.k = (hc + 1) * dim, cols * head_dim
        if head_dim % 256 == 0:
            self.raw = q2_k_rows(rng, self.n, self.k)
            self.table = q2_k_rows(rng, table_rows, 256)
        self.wkv = bf16_bits(rng.standard_normal((self.n, self.k)))
        self.qk = rng.standard_normal((2, hc, dim)).astype(np.float32)

    def upload(self, gpu, *, q2k=True, bf16=True, table=True):
        with Owner(gpu, "Weights") as own:
            return EngramV41LayerWeights(
                self.layer,
                upload_qk(own, *self.qk),
                ResidentMat.upload(own, "wkv", BF16, (self.n, self.k), self.wkv) if bf16 else None,
                ResidentMat.upload(own, "wkv_q2k", Q2_K, (self.n, self.k), self.raw) if q2k else None,
                self._upload_table(gpu, own) if table else None,
                own,
            )

    def _upload_table(self, gpu, own):
        ptr = own.alloc("table", self.table.nbytes)
        gpu.copy_h2d(self.table, ptr)
        return EngramTable(len(self.table), ptr)


@contextmanager
def made(gpu, arrays, max_tokens=1, **options):
    """`(engram, weights)` of a layer of random weights."""
    weights = arrays.upload(gpu, **options)
    engram = EngramV41(gpu, **arrays.shape, max_tokens=max_tokens)
    try:
        engram.add_layer(weights)
        yield engram, weights
    finally:
        engram.free()
        weights.free()


def apply(gpu, engram, layer, streams):
    """`(streams, kv bits)` after a step on the rows in the workspace."""
    with gpu.upload(streams, "streams") as staged:
        engram.apply(layer, staged, len(streams))
        kv = np.zeros((len(streams), engram.out_features), np.uint16)
        gpu.copy_d2h(engram.kv_ptr(), kv)
        return staged.numpy("float32", streams.shape).copy(), kv


def rows_of(gpu, engram, layer, tokens):
    """The rows in the workspace, bf16 bits."""
    rows = np.zeros((tokens, engram.in_features), np.uint16)
    gpu.copy_d2h(engram.rows_ptr(layer), rows)
    return rows
