# SPDX-License-Identifier: MIT OR Apache-2.0
"""The causal depthwise convolution in front of a gated delta rule."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metrale.reference.bf16 import bf16_values

__all__ = ["ConvSteps", "ConvUpdate", "conv1d_update", "conv1d_update_chunk2"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class ConvUpdate(NamedTuple):
    """What two tokens leave behind."""

    out: F64
    """`[batch, 2, dim]`, before the rounding to bf16"""
    state_mid: F32
    """the windows after the first token, `[batch, dim, 4]`"""
    state: F32
    """the windows after the second"""


class ConvSteps(NamedTuple):
    """What K tokens leave behind."""

    out: F64
    """`[batch, K, dim]`, before the rounding to bf16"""
    windows: F32
    """the windows after each token, `[K, batch, dim, 4]`"""


def conv1d_update(
    state: F32, x: npt.NDArray[np.uint16], weight: npt.NDArray[np.uint16], bias: F32 | None = None
) -> ConvSteps:
    """Tokens through the windows of each channel.

    A token appends to the window, whose oldest value falls out; `out = silu(bias + sum(window * weight))`.

    state: f32 `[batch, dim, 4]`, oldest first; x: bf16 bits `[batch, K, dim]`; weight: bf16 bits `[dim, 4]`;
    bias: f32 `[dim]` or None. Nothing is changed in place.
    """
    window = state
    outs, windows = [], []
    for token in range(x.shape[1]):
        newest = bf16_values(x[:, token])[..., None].astype(np.float32)
        window = np.concatenate([window[..., 1:], newest], axis=-1)
        y = (window.astype(np.float64) * bf16_values(weight)).sum(axis=-1)
        if bias is not None:
            y = y + bias.astype(np.float64)
        outs.append(y / (1 + np.exp(-y)))
        windows.append(window)
    return ConvSteps(np.stack(outs, axis=1), np.stack(windows))


def conv1d_update_chunk2(
    state: F32, x: npt.NDArray[np.uint16], weight: npt.NDArray[np.uint16], bias: F32 | None = None
) -> ConvUpdate:
    """`conv1d_update` of two tokens."""
    steps = conv1d_update(state, x, weight, bias)
    return ConvUpdate(steps.out, steps.windows[0], steps.windows[1])
