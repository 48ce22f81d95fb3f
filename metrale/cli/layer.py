# SPDX-License-Identifier: MIT OR Apache-2.0
"""A MoE layer, and its engram if it has one, on the device and the references beside them, for ``demo`` and
``verify``."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

import metrale
from metrale.cli.engram import EngramUnderTest, open_engram
from metrale.formats.deepseek41 import MoeLayerSpec, engram_layer_spec, engram_layers, moe_layer_spec
from metrale.formats.gguf import GgufFile
from metrale.formats.load import expert_source, upload_moe_layer
from metrale.formats.synthetic import random_engram_layer, random_moe_layer
from metrale.gpu import DevicePtr, GpuBackend, Graph
from metrale.moe_v41 import ArrayExperts, ExpertArena, MoeV41, SlotLayout
from metrale.reference import moe as reference
from metrale.reference.bf16 import bf16_bits

__all__ = [
    "OUTPUT_BOUND",
    "PATH_BOUND",
    "WEIGHT_BOUND",
    "LayerUnderTest",
    "Step",
    "Way",
    "batches",
    "largest_difference",
    "open_layer",
    "relative_l2",
    "tokens",
]

WEIGHT_BOUND = 1e-5
"""Largest error of a routing weight."""
OUTPUT_BOUND = 2.5e-3
"""Largest relative L2 error of a bf16 vector against float64 of what its kernel reads."""
PATH_BOUND = 3e-2
"""Largest relative L2 difference of a layer's output by q8_1 rows and by the int8 tensor cores."""


@dataclass(frozen=True)
class Way:
    """How the layer is run: so many tokens at a time, over an arena of so many slots (None: all experts are resident),
    and captured in a graph that is launched again for each step."""

    batch: int = 1
    slots: int | None = None
    graph: bool = False


@dataclass(frozen=True)
class LayerUnderTest:
    """An open backend, a layer on it, and the same layer as the reference sees it."""

    gpu: GpuBackend
    title: str
    spec: MoeLayerSpec
    moe: MoeV41
    experts: ExpertArena
    oracle: reference.MoeLayer
    engram: EngramUnderTest | None

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self.spec.layer

    @contextmanager
    def step(self, batch: int, path: str, graph: bool) -> "Iterator[Step]":
        """What runs ``batch`` tokens, captured once if ``graph``."""
        with self.gpu.buffer(2 * batch * self.spec.dim, "layer.x") as x, ExitStack() as stack:
            if not graph:
                yield Step(self, batch, path, x.ptr)
                return
            stream = self.gpu.create_stream()
            stack.callback(self.gpu.destroy_stream, stream)
            captured = Graph(self.gpu, stream)
            stack.callback(captured.free)
            with captured:
                self.moe.forward(self.layer, x, stream, tokens=batch, path=path)
            yield Step(self, batch, path, x.ptr, captured, stream)

    def read(self, name: str, dtype: str, *shape: int) -> npt.NDArray[Any]:
        """The first elements of a workspace buffer, as an array of that shape."""
        out = np.empty(shape, dtype)
        self.gpu.copy_d2h(self.moe.buffer(name), out)
        return out


@dataclass(frozen=True)
class Step:
    """A step of ``batch`` tokens at ``x``, in a graph if there is one."""

    run: LayerUnderTest
    batch: int
    path: str
    x: DevicePtr
    graph: Graph | None = None
    stream: int | None = None

    def __call__(self, tokens: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """The output's bits ``[batch, dim]`` of tokens' bits of that shape."""
        gpu, moe, layer = self.run.gpu, self.run.moe, self.run.layer
        gpu.copy_h2d(tokens, self.x)
        if self.graph is None:
            moe.forward(layer, self.x, tokens=self.batch, path=self.path)
        else:
            self.graph.launch(self.stream)
            if not moe.settle(layer, stream=self.stream):  # it fetched what was missing
                self.graph.launch(self.stream)
        gpu.synchronize(self.stream)
        return self.run.read("out", "uint16", *tokens.shape)


@contextmanager
def open_layer(model: str | None, layer: int, way: Way) -> Iterator[LayerUnderTest]:
    """Load a layer of a file (None: one of random weights) onto the device there is; all is given back at the end."""
    with ExitStack() as stack:
        engram_spec = None
        if model is None:
            spec = random_moe_layer(0, layer=layer, dim=512, inter=256, n_routed=16, topk=4)
            engram_spec = random_engram_layer(0, layer=layer, dim=512, hc=4, heads=2, max_ngram=3, table_rows=1000)
            title = "random weights"
        else:
            gguf = stack.enter_context(GgufFile(model))
            spec = moe_layer_spec(gguf, layer)
            if layer in engram_layers(gguf):
                engram_spec = engram_layer_spec(gguf, layer)
            title = model
        gpu = stack.enter_context(metrale.open())
        arena = None
        if way.slots is not None:
            experts: Any = ArrayExperts({layer: tuple(t.numpy() for t in (spec.gate, spec.up, spec.down))})
            experts = experts if model is None else stack.enter_context(expert_source(model))
            arena = ExpertArena(gpu, SlotLayout(spec.dim, spec.inter), way.slots, experts)
            stack.callback(arena.free)
        loaded = upload_moe_layer(gpu, spec, arena)
        stack.callback(loaded.free)
        moe = MoeV41(gpu, replace(loaded.cfg, max_tokens=way.batch))
        stack.callback(moe.free)
        moe.add_layer(layer, loaded.weights, loaded.experts)
        engram = None if engram_spec is None else stack.enter_context(open_engram(gpu, engram_spec))
        yield LayerUnderTest(gpu, title, spec, moe, loaded.experts, reference.MoeLayer.of(spec), engram)


def batches(inputs: Iterator[npt.NDArray[np.uint16]], size: int) -> Iterator[tuple[npt.NDArray[np.uint16], int]]:
    """Tokens ``[size, dim]`` each, taken when they are needed, and how many they are: the last are filled up with the
    last token."""
    while part := list(islice(inputs, size)):
        yield np.array(part + part[-1:] * (size - len(part))), len(part)


def tokens(seed: int, dim: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Normally distributed tokens without end, bf16 bits ``[dim]`` each."""
    rng = np.random.default_rng(seed)
    while True:
        yield bf16_bits(rng.standard_normal(dim))


def relative_l2(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """``|got - expected| / |expected|``; infinity if anything is not finite."""
    difference = np.linalg.norm(np.asarray(got, np.float64) - expected)
    return _finite(difference / max(float(np.linalg.norm(expected)), np.finfo(np.float64).tiny))


def largest_difference(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Of all elements; infinity if anything is not finite."""
    return _finite(np.abs(got - expected).max())


def _finite(error: Any) -> float:
    # A NaN compares with no bound and no other error.
    return float(error) if np.isfinite(error) else float("inf")
