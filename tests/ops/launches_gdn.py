# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated delta rule's kernels as functions of NumPy arrays, through their launchers, each in all its forms."""

from typing import NamedTuple

import numpy as np
from launches import BF16, Arrays

from metrale import ops
from metrale.ops.gdn import VERIFY_WY_TABLE_SEQS


class Inputs(NamedTuple):
    """h `[batch, num_v_heads, k_dim, v_dim]`, f32 or f16; query, key bf16 `[batch, K, num_k_heads, k_dim]`; value bf16
    `[batch, K, num_v_heads, v_dim]`; gate, beta f32 `[batch, K, num_v_heads]`."""

    h: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    gate: np.ndarray
    beta: np.ndarray

    @property
    def tokens(self):
        return self.query.shape[1]

    def sequence(self, b):
        return Inputs(*(array[b : b + 1] for array in self))

    def sequences(self, order):
        return Inputs(*(array[order] for array in self))

    def first(self, count):
        """The first tokens only."""
        return Inputs(self.h, *(np.ascontiguousarray(array[:, :count]) for array in self[1:]))


class Snapshots(NamedTuple):
    """out bf16 `[batch, K, num_v_heads, v_dim]`; states `[K, batch, num_v_heads, k_dim, v_dim]`, after each token."""

    out: np.ndarray
    states: np.ndarray


def sizes(x, pad):
    batch, _, k_heads, k_dim = x.query.shape
    v_heads, v_dim = x.value.shape[2:]
    strides = (k_heads * k_dim + pad, v_heads * v_dim + pad, v_heads + pad)
    return batch, k_heads, v_heads, k_dim, v_dim, *strides


def rows(array, pad):
    """A token's row each, `pad` elements longer."""
    flat = array.reshape(*array.shape[:2], -1)
    return np.pad(flat, ((0, 0), (0, 0), (0, pad)), constant_values=np.array(-1).astype(array.dtype))


def inputs(a, x, pad, shift):
    """query, key, value, gate, beta on the device."""
    return [a.input(rows(array, pad), shift * array.itemsize) for array in x[1:]]


def table(a, addresses):
    """A slab of VERIFY_WY_TABLE_SEQS entries for each row of addresses; where there is no sequence, an address that
    faults."""
    entries = np.full((len(addresses), VERIFY_WY_TABLE_SEQS), 1, np.uint64)
    for slab, row in zip(entries, addresses, strict=True):
        slab[: len(row)] = [int(array.data_ptr()) for array in row]
    return a.input(entries)


def snapshots(gpu, form, x, pad=0, shift=0):
    """The kernels that keep every state. form: "wy", "wy table" (2 to 4 tokens), "wyn" or "wyn table"."""
    family, _, is_table = form.partition(" ")
    tokens = x.tokens
    f16 = "_f16" if x.h.dtype == np.float16 else ""
    with Arrays(gpu) as a:
        out = a.output(x.value.shape, BF16)
        arguments = inputs(a, x, pad, shift)
        if is_table:
            states = [[a.updated(one, shift * one.itemsize) for one in x.h]]
            for _ in range(tokens - 1):
                states.append([a.output(one.shape, one.dtype, shift * one.itemsize) for one in x.h])
            pointers = [table(a, [slab]) for slab in states]
        else:
            states = [a.updated(x.h, shift * x.h.itemsize)]
            states += [a.output(x.h.shape, x.h.dtype, shift * x.h.itemsize) for _ in range(tokens - 1)]
            pointers = states
        if family == "wy":
            kernel = gpu.kernel(
                f"gated_delta_rule_wy{'' if tokens == 2 else tokens}", f"gated_delta_rule_wy{tokens}{f16}"
            )
            launcher = {2: ops.gdn_decode_wy2, 3: ops.gdn_decode_wy3, 4: ops.gdn_decode_wy4}[tokens]
            launcher(gpu, kernel, pointers[0], *arguments, out, *pointers[1:], *sizes(x, pad), bool(is_table), None)
        else:
            name = f"gated_delta_rule_wy{'n' if tokens < 5 else ''}{tokens}{f16}{'_table' if is_table else ''}"
            kernel = gpu.kernel("gated_delta_rule_wyn", name)
            if is_table:
                launcher, inter, stride = ops.gdn_decode_wyn_table, table(a, states[1:]), VERIFY_WY_TABLE_SEQS
            else:
                spaced = x.h.size + 4 * pad
                inter = a.updated(np.full((tokens - 1, spaced), 7, x.h.dtype), shift * x.h.itemsize)
                launcher, stride = ops.gdn_decode_wyn, spaced
            launcher(gpu, kernel, pointers[0], *arguments, out, inter, stride, *sizes(x, pad), None)
        if is_table:
            kept = np.stack([np.stack([one.read() for one in slab]) for slab in states])
        elif family == "wyn":
            all_kept = inter.read()
            assert (all_kept[:, x.h.size :] == 7).all(), "the kernel wrote between the states"
            kept = np.concatenate([states[0].read()[None], all_kept[:, : x.h.size].reshape(-1, *x.h.shape)])
        else:
            kept = np.stack([one.read() for one in states])
        return Snapshots(out.read(), np.roll(kept, -1, axis=0))


class Raw(NamedTuple):
    """What goes with raw inputs: f32 `[num_v_heads]` both, or None."""

    a_log: np.ndarray | None = None
    dt_bias: np.ndarray | None = None
    unit_rows: bool = False


def states_on_device(a, h, is_table, make):
    """The launcher's argument, and what reads the states."""
    if not is_table:
        array = make(h)
        return array, array.read
    arrays = [make(one) for one in h]
    return table(a, [arrays]), lambda: np.stack([array.read() for array in arrays])


def verify(gpu, x, is_table=False, pad=0, shift=0, raw=Raw()):  # noqa: B008
    """`(out, corrections)`; H is an input, which must not change."""
    f16 = "_f16" if x.h.dtype == np.float16 else ""
    kernel = gpu.kernel(
        "gated_delta_rule_verify", f"gated_delta_rule_verify{x.tokens}{'_table' if is_table else ''}{f16}"
    )
    with Arrays(gpu) as a:
        out, corrections = a.output(x.value.shape, BF16), a.output(x.value.shape, np.float32)
        h, _ = states_on_device(a, x.h, is_table, lambda one: a.input(one, shift * one.itemsize))
        ops.gated_delta_rule_verify(
            gpu, kernel, h, *inputs(a, x, pad, shift), out, corrections, *sizes(x, pad), None,
            a.input(raw.a_log), a.input(raw.dt_bias), raw.unit_rows,
        )  # fmt: skip
        return out.read(), corrections.read()


def commit(gpu, x, corrections, accepted, is_table=False, pad=0, shift=0, raw=Raw()):  # noqa: B008
    """H after it."""
    f16 = "_f16" if x.h.dtype == np.float16 else ""
    kernel = gpu.kernel("gated_delta_rule_verify", f"gated_delta_rule_commit{'_table' if is_table else ''}{f16}")
    with Arrays(gpu) as a:
        h, read = states_on_device(a, x.h, is_table, lambda one: a.updated(one, shift * one.itemsize))
        _, key, _, gate, _ = inputs(a, x, pad, shift)
        ops.gated_delta_rule_commit(
            gpu, kernel, h, key, gate, a.input(corrections), a.input(np.asarray(accepted, np.int32)), x.tokens,
            *sizes(x, pad), None, a.input(raw.a_log), a.input(raw.dt_bias), raw.unit_rows,
        )  # fmt: skip
        return read()
