# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers of random weights in the stored formats: for measuring and trying out, where there is no model file."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale.engram_v41.tables import EngramTables
from metrale.formats.deepseek41 import EngramLayerSpec, MoeLayerSpec
from metrale.formats.kquant import BF16, F32, Q2_K, Q3_K, SUPER_BLOCK, QuantType

__all__ = ["ArrayTensor", "random_blocks", "random_engram_layer", "random_moe_layer"]

# Standard deviation of a weight for d = 1 and uniformly random quants and scales, and what of d the minimum's scale
# takes so that the mean is 0.
_Q2_K_SPREAD, _Q2_K_MIN_SHARE = 12.0, 1.5
_Q3_K_SPREAD = 42.0


@dataclass(frozen=True, slots=True, eq=False)
class ArrayTensor:
    """A ``StoredTensor`` over an array: f32, bf16 bits as uint16, or uint8 ``[..., row bytes]``."""

    type: QuantType
    shape: tuple[int, ...]
    array: npt.NDArray[Any]

    @property
    def data(self) -> memoryview:
        """All bytes."""
        return self.array.data

    def slice(self, index: int) -> memoryview:
        """The bytes of one index of the outermost dim."""
        return memoryview(self.array[index])

    def numpy(self) -> npt.NDArray[Any]:
        """The array."""
        return self.array


def random_blocks(rng: np.random.Generator, kind: QuantType, shape: tuple[int, ...]) -> ArrayTensor:
    """Q2_K or Q3_K rows ``[..., K]`` of mean 0 and a variance near ``1 / K``: random bytes, scales set to fit."""
    k = shape[-1]
    blocks = rng.integers(0, 256, (*shape[:-1], k // SUPER_BLOCK, kind.block_bytes), np.uint8)
    if kind is Q2_K:
        d = 1 / (_Q2_K_SPREAD * np.sqrt(k))
        blocks[..., 80:84] = np.array([d, d * _Q2_K_MIN_SHARE], np.float16).view(np.uint8)
    else:
        blocks[..., 108:110] = np.array([1 / (_Q3_K_SPREAD * np.sqrt(k))], np.float16).view(np.uint8)
    return ArrayTensor(kind, shape, blocks.reshape(*shape[:-1], kind.row_bytes(k)))


def random_moe_layer(
    seed: int, *, dim: int, inter: int, n_routed: int, topk: int, layer: int = 0, route_scale: float = 1.5,
    swiglu_limit: float = 10.0, shared: QuantType = Q2_K,
) -> MoeLayerSpec:  # fmt: skip
    """A DeepSeek-V4.1 layer of random weights; the shared expert K-quant, or bf16 with ``shared=BF16``."""
    rng = np.random.default_rng(seed)

    def matrix(kind: QuantType, *shape: int) -> ArrayTensor:
        if kind is not BF16:
            return random_blocks(rng, kind, shape)
        values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        return ArrayTensor(BF16, shape, (values.view(np.uint32) >> 16).astype(np.uint16))

    return MoeLayerSpec(
        layer=layer,
        dim=dim,
        inter=inter,
        shared_inter=inter,
        n_routed=n_routed,
        topk=topk,
        route_scale=route_scale,
        norm_topk_prob=True,
        swiglu_limit=swiglu_limit,
        shared_swiglu_limit=swiglu_limit,
        router=matrix(BF16, n_routed, dim),
        bias=ArrayTensor(F32, (n_routed,), rng.normal(0, 0.05, n_routed).astype(np.float32)),
        gate=matrix(Q2_K, n_routed, inter, dim),
        up=matrix(Q2_K, n_routed, inter, dim),
        down=matrix(Q3_K, n_routed, dim, inter),
        shared_gate=matrix(shared, inter, dim),
        shared_up=matrix(shared, inter, dim),
        shared_down=matrix(BF16 if shared is BF16 else Q3_K, dim, inter),
    )


def random_engram_layer(
    seed: int, *, dim: int, hc: int, heads: int, max_ngram: int, table_rows: int, layer: int = 0, vocabulary: int = 128
) -> EngramLayerSpec:
    """A DeepSeek-V4.1 engram layer of random weights, with ``table_rows`` rows or some more; some tokens are not
    mapped."""
    rng = np.random.default_rng(seed)
    cols = (max_ngram - 1) * heads
    primes = table_rows // cols + 1 + 2 * np.arange(cols)
    token_map = rng.permutation(vocabulary).astype(np.int32)
    token_map[1::16] = -1
    rows = int(primes.sum())

    def weights(*shape: int) -> ArrayTensor:
        return ArrayTensor(F32, shape, (1 + 0.3 * rng.standard_normal(shape)).astype(np.float32))

    return EngramLayerSpec(
        layer=layer,
        site=0,
        dim=dim,
        hc=hc,
        head_dim=SUPER_BLOCK,
        eps=1e-6,
        hash=EngramTables(
            token_map=token_map,
            pad_id=0,
            multipliers=rng.integers(0, 2**40, (1, max_ngram), np.uint64) * np.uint64(2) + np.uint64(1),
            primes=primes[None],
            offsets=(np.cumsum(primes) - primes)[None],
            table_rows=np.array([rows]),
        ),
        table=random_blocks(rng, Q2_K, (rows, SUPER_BLOCK)),
        wkv=random_blocks(rng, Q2_K, ((hc + 1) * dim, cols * SUPER_BLOCK)),
        q=weights(hc, dim),
        k=weights(hc, dim),
    )
