# SPDX-License-Identifier: MIT OR Apache-2.0
"""EngramV41: the DeepSeek-V4.1 engram memory, from gathered rows to the gated highway."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.engram_v41.weights import EngramTable, EngramV41LayerWeights, upload_qk
from metrale.errors import MetraleError, refuse
from metrale.formats.kquant import Q2_K, SUPER_BLOCK
from metrale.gpu import DevicePtr, GpuBackend, KernelHandle
from metrale.gpu.owner import Owner
from metrale.moe_v41.config import BF16_BYTES, U32_BYTES, BufferSpec, integer

__all__ = ["EngramV41"]

MAX_STREAMS = 4
ID_BYTES = 8
LARGEST = 2**31 - 1


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer of ``add_layer`` and its part of the workspace."""

    weights: EngramV41LayerWeights
    buffers: dict[str, DevicePtr]


class _Kernels(NamedTuple):
    gemv: KernelHandle
    gemv_q2k: KernelHandle
    gemv_gather: KernelHandle
    gemm: KernelHandle
    gate: KernelHandle
    dequant: KernelHandle
    gather: KernelHandle

    @classmethod
    def of(cls, gpu: GpuBackend) -> "_Kernels":
        return cls(
            gemv=gpu.kernel("gemv", "dense_gemv_bf16"),
            gemv_q2k=gpu.kernel("engram_v41", "engram_v41_wkv_q2k_gemv"),
            gemv_gather=gpu.kernel("engram_v41", "engram_v41_wkv_q2k_gemv_gather"),
            gemm=gpu.kernel("gemm", "dense_gemm_bf16"),
            gate=gpu.kernel("engram_v41", "engram_v41_gate"),
            dequant=gpu.kernel("dequant_gguf_bf16", "dequant_q2_k_to_bf16"),
            gather=gpu.kernel("engram_v41", "engram_v41_rows_gather"),
        )


class EngramV41:
    """The workspace and the step of the engram layers of a DeepSeek-V4.1 model.

    ``add_layer(weights)`` once for each layer; then for up to ``max_tokens`` tokens one of the ``rows_from_`` methods,
    which leaves the rows ``[tokens, cols * head_dim]`` of a layer in its part of the workspace, and ``apply``. Rows of
    all layers may be there at once. Weights stay their owners'. ``free()`` gives back every buffer.

    A token carries ``hc`` streams (1 to 4) of ``dim`` and gathers ``cols`` rows of ``head_dim``, which is 256 where
    rows come from Q2_K blocks.
    """

    def __init__(
        self, gpu: GpuBackend, dim: int, hc: int, head_dim: int, cols: int, eps: float, max_tokens: int
    ) -> None:
        self.gpu = gpu
        self.dim = integer("dim", dim, 1, LARGEST)
        self.hc = integer("hc", hc, 1, MAX_STREAMS)
        self.head_dim = integer("head_dim", head_dim, 1, LARGEST)
        self.cols = integer("cols", cols, 1, LARGEST)
        self.max_tokens = integer("max_tokens", max_tokens, 1, LARGEST)
        if not 0 <= eps < math.inf:
            refuse("eps", eps, "0 or more, finite")
        self.eps = eps
        self._layers: dict[int, _Layer] = {}
        self._workspace: dict[int, dict[str, DevicePtr]] = {}
        self._k = _Kernels.of(gpu)
        with Owner(gpu, "EngramV41") as own:
            self._kv = own.alloc("kv", BF16_BYTES * max_tokens * self.out_features)
        self._own = own

    @property
    def in_features(self) -> int:
        """Values of a token's rows."""
        return self.cols * self.head_dim

    @property
    def out_features(self) -> int:
        """Keys and the value of a token."""
        return (self.hc + 1) * self.dim

    def buffer_table(self) -> list[BufferSpec]:
        """Every buffer of an ``EngramV41`` with one layer, in the order of allocation; all but the first belong to a
        layer."""
        m, cols = self.max_tokens, self.cols
        return [
            BufferSpec("kv", "2 * max_tokens * (hc + 1) * dim", BF16_BYTES * m * self.out_features),
            BufferSpec("rows", "2 * max_tokens * cols * head_dim", BF16_BYTES * m * self.in_features),
            BufferSpec("raw", "84 * max_tokens * cols", Q2_K.block_bytes * m * cols),
            BufferSpec("ids", "8 * max_tokens * cols", ID_BYTES * m * cols),
            BufferSpec("flag", "4", U32_BYTES),
        ]

    def upload_qk(self, q: npt.ArrayLike, k: npt.ArrayLike) -> DevicePtr:
        """The product of f32 ``q`` and ``k`` ``[hc, dim]`` on the device, where it stays until ``free()``."""
        self._live()
        if np.shape(q) != (self.hc, self.dim):
            refuse("q", f"shape {np.shape(q)}", f"({self.hc}, {self.dim})")
        return upload_qk(self._own, q, k)

    def add_layer(self, weights: EngramV41LayerWeights) -> None:
        """Use ``weights`` for their layer, in place of earlier ones.

        Refuses weights of another shape, freed ones, and those of another backend.
        """
        self._live()
        if weights.own.gpu is not self.gpu:
            refuse("weights: backend", weights.own.gpu, f"the EngramV41's own, {self.gpu!r}")
        _check_held(weights)
        shape = (weights.out_features, weights.in_features)
        if shape != (self.out_features, self.in_features):
            refuse("weights", f"wkv {shape}", f"({self.out_features}, {self.in_features})")
        buffers = self._workspace.setdefault(weights.layer, {})
        for spec in self.buffer_table()[1:]:
            if spec.name not in buffers:  # one that is there is an earlier call's
                buffers[spec.name] = self._own.alloc(spec.name, spec.nbytes)
        self.gpu.memset(buffers["flag"], 0, U32_BYTES)
        self._layers[weights.layer] = _Layer(weights, buffers)

    def rows_from_q2k(self, layer: int, raw: Any, stream: Any = None) -> int:
        """The rows of a layer from their Q2_K blocks: a host buffer of ``[tokens, cols, 84]`` bytes. Returns tokens."""
        self._need_blocks()
        state = self._added(layer)
        tokens = self._tokens_of("raw", memoryview(raw).nbytes, Q2_K.block_bytes * self.cols)
        self.gpu.copy_h2d_async(raw, state.buffers["raw"], stream)
        ops.dequant_q2_k_to_bf16(
            self.gpu, self._k.dequant, state.buffers["raw"], state.buffers["rows"], tokens * self.cols,
            Q2_K.block_bytes, stream,
        )  # fmt: skip
        return tokens

    def rows_from_bf16(self, layer: int, rows: Any, stream: Any = None) -> int:
        """The rows of a layer from a host buffer of bf16 bits ``[tokens, cols, head_dim]``. Returns tokens."""
        state = self._added(layer)
        tokens = self._tokens_of("rows", memoryview(rows).nbytes, BF16_BYTES * self.in_features)
        self.gpu.copy_h2d_async(rows, state.buffers["rows"], stream)
        return tokens

    def rows_from_ids(self, layer: int, ids: Any, tokens: SupportsIndex | None = None, stream: Any = None) -> int:
        """The rows of a layer from its resident table. Returns tokens.

        ``ids`` is an array i64 ``[tokens, cols]`` on the host, of which one outside the table is refused; or, with
        ``tokens``, a device pointer to such ids, of which one outside gives zeros, and is told by ``check_ids``.
        """
        state = self._added(layer)
        table = self._resident(state)
        on_device = ids
        if isinstance(ids, np.ndarray):
            if ids.dtype != np.int64:
                refuse("ids", f"{ids.dtype}", "int64")
            count = self._tokens_of("ids", ids.nbytes, ID_BYTES * self.cols)
            wrong = (ids < 0) | (ids >= table.rows)
            if wrong.any():
                refuse("ids", int(ids[wrong][0]), f"0 to {table.rows - 1}, the rows of layer {layer}'s table")
            on_device = state.buffers["ids"]
            self.gpu.copy_h2d_async(np.ascontiguousarray(ids), on_device, stream)
        else:
            count = self._tokens("tokens", 0 if tokens is None else tokens)
        ops.engram_v41_rows_gather(
            self.gpu, self._k.gather, on_device, table.ptr, state.buffers["rows"], count * self.cols, table.rows,
            state.buffers["flag"], stream,
        )  # fmt: skip
        return count

    def check_ids(self, layer: int, stream: Any = None) -> None:
        """Wait for ``stream``; raise ``MetraleError`` if an id on the device was outside the layer's table since the
        last call."""
        state = self._added(layer)
        flag = np.zeros(1, np.uint32)
        self.gpu.copy_d2h_on_stream(state.buffers["flag"], flag, stream)
        if flag[0]:
            self.gpu.memset_async(state.buffers["flag"], 0, U32_BYTES, stream)
            raise MetraleError(f"engram: an id was outside the table of layer {layer}; its row was taken as zeros")

    def apply(self, layer: int, streams: Any, tokens: SupportsIndex, stream: Any = None) -> None:
        """Project the rows in the workspace and gate ``tokens`` positions of ``streams`` f32 ``[tokens, hc, dim]``, in
        place. Queued on ``stream``; device work only, which can be captured.

        One token goes off the raw Q2_K blocks if the layer has them, else through the bf16 GEMV, with the same bits;
        several through the bf16 GEMM. Refuses, before any launch, more than ``max_tokens`` tokens, a layer without
        weights or whose weights were freed, Q2_K weights whose width is no multiple of 256, and several tokens without
        bf16 weights.
        """
        self._live()
        count = self._tokens("tokens", tokens)
        state = self._added(layer)
        gpu, k, w = self.gpu, self._k, state.weights
        rows, n, width = state.buffers["rows"], self.out_features, self.in_features
        if count == 1 and w.wkv_q2k is not None:
            if width % SUPER_BLOCK:
                refuse("in_features", width, f"a multiple of {SUPER_BLOCK}: wkv is in Q2_K blocks")
            ops.engram_v41_wkv_q2k_gemv(gpu, k.gemv_q2k, rows, w.wkv_q2k.ptr, self._kv, n, width, stream)
        elif w.wkv is None:
            refuse("tokens", count, f"1: layer {layer} has no bf16 weights")
        elif count == 1:
            ops.dense_gemv(gpu, k.gemv, rows, w.wkv.ptr, self._kv, n, width, stream)
        else:
            ops.dense_gemm(gpu, k.gemm, rows, w.wkv.ptr, self._kv, count, n, width, stream)
        ops.engram_v41_gate(gpu, k.gate, streams, self._kv, w.qk, self.dim, self.hc, self.eps, count, stream)

    def apply_ids(self, layer: int, ids: Any, streams: Any, stream: Any = None) -> None:
        """``rows_from_ids`` and ``apply`` for one token, ``ids`` i64 ``[cols]`` on the device: the same bits with a
        launch less, and the rows in the workspace stay as they are. ``check_ids`` tells of an id outside the table.

        Refuses, before any launch, a layer without weights or whose weights were freed, a table that is not resident,
        and weights that are not in Q2_K blocks.
        """
        state = self._added(layer)
        table, w = self._resident(state), state.weights
        if w.wkv_q2k is None:
            refuse("layer", layer, "one whose wkv is in Q2_K blocks")
        gpu, k = self.gpu, self._k
        ops.engram_v41_wkv_q2k_gemv_gather(
            gpu, k.gemv_gather, ids, table.ptr, w.wkv_q2k.ptr, self._kv, self.out_features, self.in_features,
            table.rows, state.buffers["flag"], stream,
        )  # fmt: skip
        ops.engram_v41_gate(gpu, k.gate, streams, self._kv, w.qk, self.dim, self.hc, self.eps, 1, stream)

    def kv_ptr(self) -> DevicePtr:
        """The keys and values of the last step, bf16 ``[tokens, hc + 1, dim]``."""
        self._live()
        return self._kv

    def rows_ptr(self, layer: int) -> DevicePtr:
        """The rows of a layer, bf16 ``[tokens, cols, head_dim]``."""
        return self._added(layer).buffers["rows"]

    def free(self) -> None:
        """Give everything back. A second call does nothing."""
        self._layers.clear()
        self._own.free()

    def _live(self) -> None:
        if self._own.freed:
            raise MetraleError("the EngramV41 has been freed")

    def _added(self, layer: int) -> _Layer:
        self._live()
        state = self._layers.get(layer)
        if state is None:
            raise MetraleError(f"engram: layer {layer} has no weights")
        _check_held(state.weights)
        return state

    def _resident(self, state: _Layer) -> EngramTable:
        self._need_blocks()
        if state.weights.table is None:
            raise MetraleError(f"engram: the table of layer {state.weights.layer} is not resident")
        return state.weights.table

    def _need_blocks(self) -> None:
        if self.head_dim != SUPER_BLOCK:
            refuse("head_dim", self.head_dim, f"{SUPER_BLOCK} for rows of Q2_K blocks")

    def _tokens(self, name: str, count: SupportsIndex) -> int:
        return integer(name, count, 1, self.max_tokens)

    def _tokens_of(self, name: str, nbytes: int, token_bytes: int) -> int:
        tokens, rest = divmod(nbytes, token_bytes)
        if rest or not 1 <= tokens <= self.max_tokens:
            refuse(name, f"{nbytes} bytes", f"{token_bytes} for each of 1 to {self.max_tokens} tokens")
        return tokens


def _check_held(weights: EngramV41LayerWeights) -> None:
    if weights.own.freed:
        raise MetraleError(f"layer {weights.layer}: its weights have been freed")
