# SPDX-License-Identifier: MIT OR Apache-2.0
"""The causal convolution of any number of tokens as functions of NumPy arrays, in all forms."""

import numpy as np
from launches import BF16, Arrays
from launches_gdn import states_on_device, table

from metrale import ops


def chunk(gpu, state, x, weight, bias=None, is_table=False):
    """`(out, windows)`: bf16 `[batch, K, dim]`, f32 `[K, batch, dim, 4]`, after each token."""
    (batch, dim, width), tokens = state.shape, x.shape[1]
    kernel = gpu.kernel("causal_conv1d", f"causal_conv1d_update_chunk{tokens}{'_table' if is_table else ''}")
    with Arrays(gpu) as a:
        out = a.output(x.shape, BF16)
        last, read = states_on_device(a, state, is_table, a.updated)
        if is_table:
            others = [[a.output(one.shape, np.float32) for one in state] for _ in range(tokens - 1)]
            middle = table(a, others) if others else None
        else:
            middle = a.output((tokens - 1, *state.shape), np.float32) if tokens > 1 else None
        ops.conv1d_update_chunkn(
            gpu, kernel, last, a.input(x), a.input(weight), out, middle, dim, width, batch, None, a.input(bias)
        )
        if tokens == 1:
            return out.read(), read()[None]
        kept = np.array([[one.read() for one in slab] for slab in others]) if is_table else middle.read()
        return out.read(), np.concatenate([kept, read()[None]])


def form(name, is_table):
    return "causal_conv1d", f"causal_conv1d_{name}{'_table' if is_table else ''}"


def verify(gpu, state, x, weight, bias=None, is_table=False):
    """bf16 `[batch, K, dim]`; the windows are inputs, which must not change."""
    (batch, dim, width), tokens = state.shape, x.shape[1]
    with Arrays(gpu) as a:
        out = a.output(x.shape, BF16)
        windows, _ = states_on_device(a, state, is_table, a.input)
        ops.conv1d_verify(
            gpu, gpu.kernel(*form("verify", is_table)), windows, a.input(x), a.input(weight), out, tokens, dim, width,
            batch, None, a.input(bias),
        )  # fmt: skip
        return out.read()


def commit(gpu, state, x, accepted, is_table=False):
    """The windows after it, f32 `[batch, dim, 4]`."""
    (batch, dim, width), tokens = state.shape, x.shape[1]
    with Arrays(gpu) as a:
        windows, read = states_on_device(a, state, is_table, a.updated)
        counts = a.input(np.asarray(accepted, np.int32))
        kernel = gpu.kernel(*form("commit", is_table))
        ops.conv1d_commit(gpu, kernel, windows, a.input(x), counts, tokens, dim, width, batch, None)
        return read()
