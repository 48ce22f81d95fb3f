# SPDX-License-Identifier: MIT OR Apache-2.0
"""GdnVerifyPool: the states of all layers and sequences, through verify steps and what is accepted of them."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from metrale import ops
from metrale.errors import CaptureError, MetraleError, refuse
from metrale.gdn._address import address
from metrale.gdn.config import BF16_BYTES, F32_BYTES, I32_BYTES, MIN_TOKENS, PTR_BYTES, GdnVerifyCfg
from metrale.gpu import DevicePtr, GpuBackend, KernelHandle
from metrale.gpu.owner import Owner
from metrale.moe_v41.config import integer
from metrale.ops.gdn import VERIFY_WY_TABLE_SEQS

__all__ = ["GdnVerifyPool"]

SLAB = VERIFY_WY_TABLE_SEQS * PTR_BYTES
MAX_STRIDE = 0xFFFFFFFF


class GdnVerifyPool:
    """The gated delta rule's states and convolution windows of ``layers`` layers and ``seqs`` sequences.

    A step is, for each layer, ``conv`` and ``verify`` over up to ``k_max`` tokens (2 to 17) of some sequences, then one
    ``accept`` of the first so many tokens of each. In mode "snapshot" a step writes the state after every token, and
    accepting changes pointers only; at least one token must be accepted. In mode "deferred" a step writes no state,
    and ``accept`` applies the accepted tokens, 0 too, from copies of key, gate and the convolution's input that the
    pool keeps. States are ``dtype`` "f32" or "f16", zero at first.

    All of a step, and ``accept``, is queued on one stream. The addresses of a batch's states lie in a table on the
    device, which is uploaded when it changes: for other ``seq_ids`` than the last, and in mode "snapshot" by an
    ``accept`` that changed it, so that a captured graph of a step stays valid. In a capture it cannot be uploaded:
    ``stage`` does so before. Batches of more than 32 sequences are several launches. ``free()`` gives everything back.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        layers: int,
        seqs: int,
        k_max: int,
        num_k_heads: int,
        num_v_heads: int,
        k_dim: int,
        v_dim: int,
        conv_width: int = 4,
        dtype: str = "f32",
        mode: str = "snapshot",
    ) -> None:
        self.gpu = gpu
        self.cfg = cfg = GdnVerifyCfg(
            layers, seqs, k_max, num_k_heads, num_v_heads, k_dim, v_dim, conv_width, dtype, mode
        )
        self.uploads = 0
        """Of the table so far"""
        # Which copy of its states a sequence has in the places 0 (before a step and after all its tokens), 1 (after the
        # first token), 2 (after the second), ...
        self._places = np.tile(np.arange(cfg.kept), (seqs, 1))
        self._staged: tuple[int, ...] | None = None
        self._stale = False  # the table that is staged has been overtaken
        self._convolves = False
        self._kernels: dict[tuple[str, str], KernelHandle] = {}
        with Owner(gpu, "GdnVerifyPool") as own:
            self._buffers = {spec.name: own.alloc(spec.name, spec.nbytes) for spec in cfg.buffer_table()}
            gpu.memset(self._buffers["H"], 0, layers * seqs * cfg.h_bytes)
            gpu.memset(self._buffers["windows"], 0, layers * seqs * cfg.window_bytes)
        self._own = own

    def stage(self, seq_ids: Sequence[int], stream: Any = None) -> None:
        """Upload the table of a batch, if it is not the one that is there. ``conv``, ``verify`` and ``accept`` do."""
        self._live()
        self._stage(self._batch(seq_ids), stream)

    def conv(
        self,
        layer: SupportsIndex,
        seq_ids: Sequence[int],
        x: Any,
        weight: Any,
        bias: Any,
        out: Any,
        stream: Any = None,
        *,
        tokens: SupportsIndex | None = None,
    ) -> None:
        """The convolution in front of ``verify``: x, out bf16 ``[batch, tokens, channels]``, weight bf16
        ``[channels, 4]``, bias f32 ``[channels]`` or null; channels are those of query, key and value. ``tokens``:
        ``k_max`` if not given."""
        cfg, gpu = self.cfg, self.gpu
        self._live()
        layer, ids, k = integer("layer", layer, 0, cfg.layers - 1), self._batch(seq_ids), self._tokens(tokens)
        x, out = (address(gpu, value, name, stream) for value, name in ((x, "x"), (out, "out")))
        deferred, row = cfg.mode == "deferred", BF16_BYTES * k * cfg.channels
        kernel = self._kernel("causal_conv1d", "verify_table" if deferred else f"update_chunk{k}_table")
        self._stage(ids, stream)
        for first, count, table in self._launches(layer, ids):
            window, middle = table.offset(cfg.kept * SLAB), table.offset((cfg.kept + 1) * SLAB)
            at = first * row
            if deferred:
                ops.conv1d_verify(
                    gpu, kernel, window, x.offset(at), weight, out.offset(at), k, cfg.channels, cfg.conv_width, count,
                    stream, bias,
                )  # fmt: skip
            else:
                ops.conv1d_update_chunkn(
                    gpu, kernel, window, x.offset(at), weight, out.offset(at), middle, cfg.channels, cfg.conv_width,
                    count, stream, bias,
                )  # fmt: skip
        if deferred:
            gpu.copy_d2d_async(x, self._of_layer("inputs", layer), len(ids) * row, stream)
        self._convolves = True

    def verify(
        self,
        layer: SupportsIndex,
        seq_ids: Sequence[int],
        q: Any,
        k: Any,
        v: Any,
        gate: Any,
        beta: Any,
        out: Any,
        stream: Any = None,
        *,
        tokens: SupportsIndex | None = None,
        qk_stride: SupportsIndex | None = None,
        v_stride: SupportsIndex | None = None,
        gb_stride: SupportsIndex | None = None,
    ) -> None:
        """``tokens`` tokens (``k_max`` if not given) of each sequence: q, k bf16 rows of ``[num_k_heads, k_dim]``, v of
        ``[num_v_heads, v_dim]``, gate, beta f32 of ``[num_v_heads]`` -> out bf16 ``[batch, tokens, num_v_heads,
        v_dim]``. A row begins ``qk_stride``, ``v_stride`` or ``gb_stride`` elements after the one before it; if not
        given, rows are dense."""
        cfg, gpu = self.cfg, self.gpu
        self._live()
        layer, ids, n = integer("layer", layer, 0, cfg.layers - 1), self._batch(seq_ids), self._tokens(tokens)
        qk_row, v_row, heads = cfg.num_k_heads * cfg.k_dim, cfg.num_v_heads * cfg.v_dim, cfg.num_v_heads
        qk_stride = self._stride("qk_stride", qk_stride, qk_row)
        v_stride = self._stride("v_stride", v_stride, v_row)
        gb_stride = self._stride("gb_stride", gb_stride, heads)
        qk_step, v_step, gb_step = BF16_BYTES * n * qk_stride, BF16_BYTES * n * v_stride, F32_BYTES * n * gb_stride
        names = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "out": out}
        q, k, v, gate, beta, out = (address(gpu, value, name, stream) for name, value in names.items())
        deferred, f16 = cfg.mode == "deferred", "_f16" if cfg.dtype == "f16" else ""
        if deferred:
            kernel = self._kernel("gated_delta_rule_verify", f"verify{n}_table{f16}")
        else:
            kernel = self._kernel("gated_delta_rule_wyn", f"wy{'n' if n < 5 else ''}{n}{f16}_table")
        self._stage(ids, stream)
        for first, count, table in self._launches(layer, ids):
            inputs = (
                q.offset(first * qk_step), k.offset(first * qk_step), v.offset(first * v_step),
                gate.offset(first * gb_step), beta.offset(first * gb_step),
                out.offset(first * n * BF16_BYTES * v_row),
            )  # fmt: skip
            sizes = (count, cfg.num_k_heads, cfg.num_v_heads, cfg.k_dim, cfg.v_dim, qk_stride, v_stride, gb_stride)
            if deferred:
                corrections = self._of_layer("corrections", layer).offset(first * n * F32_BYTES * v_row)
                ops.gated_delta_rule_verify(gpu, kernel, table, *inputs, corrections, *sizes, stream)
            else:
                ops.gdn_decode_wyn_table(
                    gpu, kernel, table, *inputs, table.offset(SLAB), VERIFY_WY_TABLE_SEQS, *sizes, stream
                )
        if deferred:
            rows = len(ids) * n
            for source, name, width, pitch in (
                (k, "keys", BF16_BYTES * qk_row, BF16_BYTES * qk_stride),
                (gate, "gates", F32_BYTES * heads, F32_BYTES * gb_stride),
            ):
                gpu.copy_d2d_2d_async(source, pitch, self._of_layer(name, layer), width, width, rows, stream)

    def accept(
        self, seq_ids: Sequence[int], counts: Any, stream: Any = None, *, tokens: SupportsIndex | None = None
    ) -> None:
        """Keep the first ``counts[i]`` of the ``tokens`` (``k_max`` if not given) tokens of sequence ``seq_ids[i]``, in
        all layers.

        The sequences are those of the step, in its order in mode "deferred". counts are integers, 0 to ``tokens``, or
        1 to ``tokens`` in mode "snapshot"; in mode "deferred" also a device pointer to i32 ``[len(seq_ids)]``, so that
        a captured step needs no number from the host.
        """
        self._live()
        ids, k = self._batch(seq_ids), self._tokens(tokens)
        if self.cfg.mode == "snapshot":
            if self.gpu.stream_is_capturing(stream):
                raise CaptureError('accept in mode "snapshot" changes the table of a batch, which a capture cannot')
            for seq, count in zip(ids, self._counts(counts, ids, 1, k), strict=True):
                if count < k:  # the state after `count` tokens takes the place of the last one
                    places = self._places[seq]
                    places[0], places[count] = places[count], places[0]
                    self._stale = True
            if self._staged is not None:
                self._stage(self._staged, stream)
            return
        if isinstance(counts, (Sequence, np.ndarray)):
            numbers = np.array(self._counts(counts, ids, 0, k), np.int32)
            self._stage(ids, stream)
            counts = self._buffers["accepted"]
            self.gpu.copy_h2d_async(numbers, counts, stream)
        self._commit(ids, address(self.gpu, counts, "counts", stream), k, stream)

    def reset(self, seq: SupportsIndex, stream: Any = None) -> None:
        """A sequence that begins: its states and windows are zero, in all layers."""
        self._live()
        cfg, seq = self.cfg, integer("seq", seq, 0, self.cfg.seqs - 1)
        for layer in range(cfg.layers):
            self.gpu.memset_async(self.h_ptr(layer, seq), 0, cfg.h_bytes, stream)
            self.gpu.memset_async(self.window_ptr(layer, seq), 0, cfg.window_bytes, stream)

    def h_ptr(self, layer: SupportsIndex, seq: SupportsIndex) -> DevicePtr:
        """Where the sequence's states lie, ``[num_v_heads, k_dim, v_dim]``; another place after an ``accept``."""
        return self._place(0, layer, seq)

    def window_ptr(self, layer: SupportsIndex, seq: SupportsIndex) -> DevicePtr:
        """Where its convolution's windows lie, f32 ``[channels, 4]``; another place after an ``accept``."""
        return self._place(1, layer, seq)

    def free(self) -> None:
        """Give everything back. A second call does nothing."""
        self._own.free()

    def _live(self) -> dict[str, DevicePtr]:
        """The buffers; refuses use after ``free()``."""
        if self._own.freed:
            raise MetraleError("the GdnVerifyPool has been freed")
        return self._buffers

    def _batch(self, seq_ids: Sequence[int]) -> tuple[int, ...]:
        ids = tuple(seq_ids)
        if ids != self._staged:  # that one has been looked at
            for seq in ids:
                integer("seq_ids", seq, 0, self.cfg.seqs - 1)
            if not ids or len(set(ids)) < len(ids):
                refuse("seq_ids", ids, "one sequence or more, each once")
        return ids

    def _tokens(self, tokens: SupportsIndex | None) -> int:
        return self.cfg.k_max if tokens is None else integer("tokens", tokens, MIN_TOKENS, self.cfg.k_max)

    def _stride(self, name: str, given: SupportsIndex | None, row: int) -> int:
        return row if given is None else integer(name, given, row, MAX_STRIDE)

    def _counts(self, counts: Any, ids: tuple[int, ...], least: int, most: int) -> list[int]:
        if not isinstance(counts, (Sequence, np.ndarray)) or len(counts) != len(ids):
            refuse("counts", counts, f"{len(ids)} integers, one for each sequence")
        return [integer("counts", count, least, most) for count in counts]

    def _kernel(self, module: str, name: str) -> KernelHandle:
        found = self._kernels.get((module, name))
        if found is None:
            prefix = module if module == "causal_conv1d" else "gated_delta_rule"
            found = self._kernels[module, name] = self.gpu.kernel(module, f"{prefix}_{name}")
        return found

    @cached_property
    def _bases(self) -> npt.NDArray[np.uint64]:
        """Addresses of every copy, ``[2 (states, windows), layers, seqs, kept]``."""
        cfg = self.cfg
        kinds = (("H", "Hi", cfg.h_bytes), ("windows", "windows_i", cfg.window_bytes))
        bases = np.empty((2, cfg.layers, cfg.seqs, cfg.kept), np.uint64)
        row = np.arange(cfg.layers * cfg.seqs, dtype=np.uint64).reshape(cfg.layers, cfg.seqs)
        for base, (first, others, nbytes) in zip(bases, kinds, strict=True):
            base[..., 0] = int(self._buffers[first]) + row * np.uint64(nbytes)
            for i in range(1, cfg.kept):
                copy = row * np.uint64(cfg.kept - 1) + np.uint64(i - 1)
                base[..., i] = int(self._buffers[others]) + copy * np.uint64(nbytes)
        return bases

    def _place(self, kind: int, layer: SupportsIndex, seq: SupportsIndex) -> DevicePtr:
        self._live()
        layer, seq = integer("layer", layer, 0, self.cfg.layers - 1), integer("seq", seq, 0, self.cfg.seqs - 1)
        return DevicePtr(self._bases[kind, layer, seq, self._places[seq, 0]])

    def _stage(self, ids: tuple[int, ...], stream: Any) -> None:
        """The table is ``[layers][groups][states by place, windows by place][32]``."""
        if ids == self._staged and not self._stale:
            return
        if self.gpu.stream_is_capturing(stream):
            raise CaptureError("the table of a batch cannot change in a capture: stage(seq_ids) before it")
        cfg = self.cfg
        table = np.zeros((cfg.layers, cfg.groups, 2, cfg.kept, VERIFY_WY_TABLE_SEQS), np.uint64)
        for i, seq in enumerate(ids):
            group, entry = divmod(i, VERIFY_WY_TABLE_SEQS)
            table[:, group, :, :, entry] = self._bases[:, :, seq, self._places[seq]].transpose(1, 0, 2)
        self._staged = None  # should the upload fail, nothing is known to be there
        self.gpu.copy_h2d_async(table, self._buffers["tables"], stream)
        self._staged, self._stale = ids, False
        self.uploads += 1

    def _launches(self, layer: int, ids: tuple[int, ...]) -> Iterator[tuple[int, int, DevicePtr]]:
        """The first sequence, the number of sequences and the table of each launch of a batch."""
        group_bytes = 2 * self.cfg.kept * SLAB
        for group, first in enumerate(range(0, len(ids), VERIFY_WY_TABLE_SEQS)):
            count = min(VERIFY_WY_TABLE_SEQS, len(ids) - first)
            yield first, count, self._buffers["tables"].offset((layer * self.cfg.groups + group) * group_bytes)

    def _of_layer(self, name: str, layer: int) -> DevicePtr:
        return self._buffers[name].offset(layer * self._layer_bytes[name])

    @cached_property
    def _layer_bytes(self) -> dict[str, int]:
        return {spec.name: spec.nbytes // self.cfg.layers for spec in self.cfg.buffer_table()}

    def _commit(self, ids: tuple[int, ...], counts: DevicePtr, k: int, stream: Any) -> None:
        cfg, gpu = self.cfg, self.gpu
        self._stage(ids, stream)
        rule = self._kernel("gated_delta_rule_verify", f"commit_table{'_f16' if cfg.dtype == 'f16' else ''}")
        conv = self._kernel("causal_conv1d", "commit_table")
        qk_row, v_row, heads = cfg.num_k_heads * cfg.k_dim, cfg.num_v_heads * cfg.v_dim, cfg.num_v_heads
        for layer in range(cfg.layers):
            keys, gates = self._of_layer("keys", layer), self._of_layer("gates", layer)
            corrections, inputs = self._of_layer("corrections", layer), self._of_layer("inputs", layer)
            for first, count, table in self._launches(layer, ids):
                accepted, row = counts.offset(first * I32_BYTES), first * k
                ops.gated_delta_rule_commit(
                    gpu, rule, table, keys.offset(row * BF16_BYTES * qk_row), gates.offset(row * F32_BYTES * heads),
                    corrections.offset(row * F32_BYTES * v_row), accepted, k, count, cfg.num_k_heads, heads, cfg.k_dim,
                    cfg.v_dim, qk_row, v_row, heads, stream,
                )  # fmt: skip
                if self._convolves:
                    x = inputs.offset(row * BF16_BYTES * cfg.channels)
                    window = table.offset(cfg.kept * SLAB)
                    ops.conv1d_commit(gpu, conv, window, x, accepted, k, cfg.channels, cfg.conv_width, count, stream)
