#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Speculative decoding on a model with a gated delta rule: draft, verify, roll back.

    speculative_gdn.py [--backend host|cuda] [--mode snapshot|deferred] [--tokens N]

A toy language model with random weights generates text for a queue of prompts, a few sequences at a time, each with up
to five drafted tokens a step: those that followed the last token when it was seen before. Then every prompt is decoded
again, token by token. Text and states must be the same, to the bit. Projections and sampling run in NumPy, convolution
and delta rule in the kernels; a GdnVerifyPool keeps the states. Exit status 0 if all is the same.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import metrale
from metrale.gdn import GdnVerifyPool
from metrale.reference.bf16 import bf16_bits, bf16_values

VOCABULARY, DIM, LAYERS = 40, 32, 2
K_HEADS, V_HEADS, K_DIM, V_DIM = 1, 2, 16, 16
SEQS, STEP = 3, 6  # sequences at a time; tokens a step, the last certain one and the drafted ones
PROMPTS = ([1, 2, 3], [7], [5, 6], [30, 31, 32, 33], [11])


class Layer(NamedTuple):
    """Of the model: `[DIM, channels]`, `[channels, 4]`, `[DIM, V_HEADS]` twice, `[V_HEADS * V_DIM, DIM]`."""

    qkv: np.ndarray
    conv: np.ndarray
    gate: np.ndarray
    beta: np.ndarray
    out: np.ndarray


class Model:
    """Random weights, and a step through them: logits of each token, on top of the states of a pool."""

    def __init__(self, gpu: metrale.GpuBackend, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weight(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape) / np.sqrt(shape[0])

        self.gpu = gpu
        channels = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
        self.embedding, self.head = rng.standard_normal((VOCABULARY, DIM)), weight(DIM, VOCABULARY)
        self.layers = [
            Layer(
                weight(DIM, channels), rng.standard_normal((channels, 4)) / 2, weight(DIM, V_HEADS),
                weight(DIM, V_HEADS), weight(V_HEADS * V_DIM, DIM),
            )
            for _ in range(LAYERS)
        ]  # fmt: skip

    def step(self, pool: GdnVerifyPool, seq_ids: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """tokens `[batch, K]` -> the token that follows each of them. What is accepted is said to the pool later."""
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            qkv = self.convolved(pool, number, seq_ids, bf16_bits(rows_times(x, layer.qkv)), bf16_bits(layer.conv))
            q, k, v = np.split(qkv, [K_HEADS * K_DIM, 2 * K_HEADS * K_DIM], axis=-1)
            gate, beta = (sigmoid(rows_times(x, w)).astype(np.float32) for w in (layer.gate, layer.beta))
            arrays = (bf16_bits(unit(q, K_DIM)), bf16_bits(unit(k, K_DIM)), bf16_bits(v), gate, beta)
            x = x + rows_times(self.ruled(pool, number, seq_ids, arrays), layer.out)
        return rows_times(x, self.head).argmax(axis=-1)

    def convolved(
        self, pool: GdnVerifyPool, layer: int, seq_ids: Sequence[int], x: np.ndarray, weight: np.ndarray
    ) -> np.ndarray:
        with self.gpu.upload(x) as inputs, self.gpu.upload(weight) as taps, self.gpu.buffer(x.nbytes) as out:
            pool.conv(layer, seq_ids, inputs, taps, None, out, tokens=x.shape[1])
            return bf16_values(out.numpy("uint16")).reshape(x.shape)

    def ruled(
        self, pool: GdnVerifyPool, layer: int, seq_ids: Sequence[int], arrays: Sequence[np.ndarray]
    ) -> np.ndarray:
        held = [self.gpu.upload(np.ascontiguousarray(array)) for array in arrays]
        held.append(self.gpu.buffer(arrays[2].nbytes))
        try:
            pool.verify(layer, seq_ids, *held, tokens=arrays[2].shape[1])
            return bf16_values(held[-1].numpy("uint16")).reshape(arrays[2].shape)
        finally:
            for buffer in held:
                buffer.free()


def rows_times(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight, each row by itself: a library may add in another order for another number of rows."""
    return np.stack([row @ weight for row in x.reshape(-1, x.shape[-1])]).reshape(*x.shape[:-1], -1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def unit(x: np.ndarray, dim: int) -> np.ndarray:
    heads = x.reshape(*x.shape[:-1], -1, dim)
    return (heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True) + 1e-6)).reshape(x.shape)


class Running(NamedTuple):
    """Text, of which the pool's states have seen the first ``seen`` tokens."""

    prompt: int
    text: list[int]
    seen: list[int]


class Generated(NamedTuple):
    """The text of a prompt, and the bytes of its states in the end."""

    text: list[int]
    states: bytes


def draft(text: Sequence[int], count: int) -> list[int]:
    """What followed the last token when it was seen before, or the token itself."""
    before = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
    copied = list(text[before[-1] + 1 :]) if before else [text[-1]]
    return [copied[i % len(copied)] for i in range(count)]


def speculate(gpu: metrale.GpuBackend, mode: str, length: int) -> tuple[list[Generated], float]:
    """Every prompt continued to ``length`` tokens, and the tokens a step accepted, on average."""
    model, waiting = Model(gpu), list(range(len(PROMPTS)))
    running: dict[int, Running] = {}
    finished: dict[int, Generated] = {}
    accepted = steps = 0
    pool = pool_of(gpu, mode)
    try:
        while waiting or running:
            for seq in set(range(SEQS)) - running.keys():
                if waiting:
                    prompt = waiting.pop(0)
                    running[seq] = Running(prompt, list(PROMPTS[prompt]), [0])
                    pool.reset(seq)
            ids = list(running)
            certain = [one.text[one.seen[0] :][:STEP] for one in running.values()]
            steps += len(ids)
            batch = np.array(
                [
                    tokens + draft(one.text, STEP - len(tokens))
                    for tokens, one in zip(certain, running.values(), strict=True)
                ]
            )
            followers = model.step(pool, ids, batch)
            counts = []
            for tokens, one, fed, next_tokens in zip(certain, running.values(), batch, followers, strict=True):
                count = len(tokens)
                if one.seen[0] + count == len(one.text):  # the prompt is through: the model's own tokens begin
                    while len(one.text) < length:
                        one.text.append(int(next_tokens[count - 1]))
                        if count == STEP or fed[count] != one.text[-1] or len(one.text) == length:
                            break
                        count += 1
                one.seen[0] += count
                accepted += count
                counts.append(count)
            pool.accept(ids, counts)
            for seq in ids:
                if len(running[seq].text) == length:
                    one = running.pop(seq)
                    finished[one.prompt] = Generated(one.text, states_of(pool, seq))
    finally:
        pool.free()
    return [finished[prompt] for prompt in range(len(PROMPTS))], accepted / steps


def decode(gpu: metrale.GpuBackend, prompt: Sequence[int], length: int) -> Generated:
    """The same, a token at a time: of each step of two the first is accepted."""
    model, text = Model(gpu), list(prompt)
    pool = pool_of(gpu, "deferred")
    try:
        for i in range(length - 1):
            follower = model.step(pool, [0], np.array([[text[i], text[i]]]))[0, 0]
            pool.accept([0], [1], tokens=2)
            if i + 1 == len(text):
                text.append(int(follower))
        return Generated(text, states_of(pool, 0))
    finally:
        pool.free()


def pool_of(gpu: metrale.GpuBackend, mode: str) -> GdnVerifyPool:
    return GdnVerifyPool(gpu, LAYERS, SEQS, STEP, K_HEADS, V_HEADS, K_DIM, V_DIM, mode=mode)


def states_of(pool: GdnVerifyPool, seq: int) -> bytes:
    """States and windows of all layers."""
    found = []
    for layer in range(LAYERS):
        for ptr, nbytes in (
            (pool.h_ptr(layer, seq), pool.cfg.h_bytes),
            (pool.window_ptr(layer, seq), pool.cfg.window_bytes),
        ):
            found.append(np.empty(nbytes, np.uint8))
            pool.gpu.copy_d2h(ptr, found[-1])
    return b"".join(part.tobytes() for part in found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), help="default: the GPU if there is one")
    parser.add_argument("--mode", choices=("snapshot", "deferred"), default="deferred")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="of each text, prompt included")
    options = parser.parse_args(arguments)
    with metrale.open(options.backend) as gpu:
        texts, a_step = speculate(gpu, options.mode, options.tokens)
        plain = [decode(gpu, prompt, options.tokens) for prompt in PROMPTS]
        print(f"{gpu.name}, mode {options.mode}: {a_step:.2f} tokens accepted a step, of {STEP}")
    same = True
    for prompt, fast, slow in zip(PROMPTS, texts, plain, strict=True):
        text, states = fast.text == slow.text, fast.states == slow.states
        same = same and text and states
        print(f"{prompt}: text {'same' if text else 'DIFFERS'}, states {'same' if states else 'DIFFER'}")
        print("   ", *fast.text)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
