# SPDX-License-Identifier: MIT OR Apache-2.0
"""A small model's steps through a GdnVerifyPool, and the same in float64."""

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from metrale.gdn import GdnVerifyPool
from metrale.reference.bf16 import bf16_bits
from metrale.reference.conv1d import conv1d_update
from metrale.reference.gdn import gated_delta_rule, unit_rows

LAYERS, SEQS, K_MAX = 2, 5, 4
K_HEADS, V_HEADS, K_DIM, V_DIM = 1, 2, 8, 12
CHANNELS = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
SHAPE = {"num_k_heads": K_HEADS, "num_v_heads": V_HEADS, "k_dim": K_DIM, "v_dim": V_DIM}


def pool_of(gpu, mode, seqs=SEQS, layers=LAYERS, k_max=K_MAX, dtype="f32"):
    return GdnVerifyPool(gpu, layers, seqs, k_max, **SHAPE, dtype=dtype, mode=mode)


class Tokens(NamedTuple):
    """Of a layer, for a batch: `[batch, tokens, ...]`."""

    x: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gate: np.ndarray
    beta: np.ndarray

    def first(self, count):
        return Tokens(*(array[:, :count] for array in self))

    def of(self, i):
        return Tokens(*(array[i : i + 1] for array in self))


def tokens_of(seed, batch, tokens=K_MAX):
    rng = np.random.default_rng(seed)

    def bits(*shape):
        return bf16_bits(rng.standard_normal((batch, tokens, *shape)))

    gate, beta = rng.uniform(0.2, 1, (2, batch, tokens, V_HEADS)).astype(np.float32)
    q, k = (bf16_bits(unit_rows(bits(K_HEADS, K_DIM))) for _ in "qk")
    return Tokens(bits(CHANNELS), q, k, bits(V_HEADS, V_DIM), gate, beta)


WEIGHT = bf16_bits(np.random.default_rng(1).standard_normal((CHANNELS, 4)))


class Step:
    """The device arrays of one layer's step, which can be run more than once. Free them with the ``with`` block."""

    def __init__(self, pool, seq_ids, tokens, pad=0):
        self.pool, self.seq_ids, self.pad = pool, seq_ids, pad
        self.batch, self.tokens = tokens.q.shape[:2]
        self._held = ExitStack()
        flat = [array.reshape(self.batch, self.tokens, -1) for array in tokens]
        padded = [np.pad(array, ((0, 0), (0, 0), (0, pad))) for array in flat[1:]]
        self.inputs = [self.upload(array) for array in (flat[0], *padded)]
        self.weight = self.upload(WEIGHT)
        self.conv_out = self.upload(np.zeros((self.batch, self.tokens, CHANNELS), np.uint16))
        self.out = self.upload(np.zeros((self.batch, self.tokens, V_HEADS, V_DIM), np.uint16))

    def upload(self, array):
        return self._held.enter_context(self.pool.gpu.upload(np.ascontiguousarray(array)))

    def run(self, layer, stream=None):
        x, *rest = self.inputs
        strides = {}
        if self.pad:
            rows = {"qk_stride": K_HEADS * K_DIM, "v_stride": V_HEADS * V_DIM, "gb_stride": V_HEADS}
            strides = {name: row + self.pad for name, row in rows.items()}
        self.pool.conv(layer, self.seq_ids, x, self.weight, None, self.conv_out, stream, tokens=self.tokens)
        self.pool.verify(layer, self.seq_ids, *rest, self.out, stream, tokens=self.tokens, **strides)

    def spoil_inputs(self):
        """What the next layer's activations do to buffers that are used again."""
        for array in self.inputs:
            self.pool.gpu.memset(array, 0xFF, array.nbytes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._held.close()


def step(pool, seq_ids, tokens_by_layer, pad=0):
    """All layers; the outputs `[layers]` of the rule."""
    outs = []
    for layer, tokens in enumerate(tokens_by_layer):
        with Step(pool, seq_ids, tokens, pad) as one:
            one.run(layer)
            outs.append(one.out.numpy("uint16").reshape(tokens.v.shape))
            one.spoil_inputs()
    return outs


def states(pool, layer, seq):
    """`(H, windows)` of a sequence."""
    dtype = np.float32 if pool.cfg.dtype == "f32" else np.float16
    h = np.empty((V_HEADS, K_DIM, V_DIM), dtype)
    window = np.empty((CHANNELS, 4), np.float32)
    pool.gpu.synchronize()
    pool.gpu.copy_d2h(pool.h_ptr(layer, seq), h)
    pool.gpu.copy_d2h(pool.window_ptr(layer, seq), window)
    return h, window


class Reference:
    """The states of every layer and sequence in float64, after plain decoding of what was accepted."""

    def __init__(self, seqs=SEQS, layers=LAYERS):
        self.h = np.zeros((layers, seqs, V_HEADS, K_DIM, V_DIM))
        self.windows = np.zeros((layers, seqs, CHANNELS, 4), np.float32)

    def decode(self, seq_ids, tokens_by_layer, counts):
        for layer, tokens in enumerate(tokens_by_layer):
            for i, (seq, count) in enumerate(zip(seq_ids, counts, strict=True)):
                if count:
                    part = tokens.of(i).first(count)
                    rule = gated_delta_rule(self.h[layer, seq][None], *part[1:])
                    self.h[layer, seq] = rule.states[-1, 0]
                    self.windows[layer, seq] = conv1d_update(self.windows[layer, seq][None], part.x, WEIGHT).windows[
                        -1, 0
                    ]

    def reset(self, seq):
        self.h[:, seq] = 0
        self.windows[:, seq] = 0


def assert_states(pool, reference):
    for layer in range(pool.cfg.layers):
        for seq in range(pool.cfg.seqs):
            h, windows = states(pool, layer, seq)
            np.testing.assert_allclose(h, reference.h[layer, seq], rtol=2e-5, atol=2e-6)
            assert (windows == reference.windows[layer, seq]).all()
