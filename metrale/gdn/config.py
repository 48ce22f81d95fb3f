# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shape of a verify pool and the buffers it needs."""

from dataclasses import dataclass

from metrale.errors import refuse
from metrale.moe_v41.config import BufferSpec, integer
from metrale.ops.gdn import VERIFY_WY_TABLE_SEQS

__all__ = ["GdnVerifyCfg"]

BF16_BYTES, F32_BYTES, I32_BYTES, PTR_BYTES = 2, 4, 4, 8
STATE_BYTES = {"f32": 4, "f16": 2}
MODES = ("snapshot", "deferred")
CONV_WIDTH = 4
MIN_TOKENS, MAX_TOKENS = 2, 17
MAX_DIM = 128
LARGEST = 1 << 24  # of the other sizes: none is ever near, and products stay far from what a pointer holds


@dataclass(frozen=True, slots=True)
class GdnVerifyCfg:
    """What a ``GdnVerifyPool`` is made for; the arguments are its own."""

    layers: int
    seqs: int
    k_max: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int = CONV_WIDTH
    dtype: str = "f32"
    mode: str = "snapshot"

    def __post_init__(self) -> None:
        integer("k_max", self.k_max, MIN_TOKENS, MAX_TOKENS)
        for name in ("layers", "seqs", "num_k_heads", "num_v_heads"):
            integer(name, getattr(self, name), 1, LARGEST)
        for name in ("k_dim", "v_dim"):
            integer(name, getattr(self, name), 1, MAX_DIM)
        if self.k_dim % 4:
            refuse("k_dim", self.k_dim, f"a multiple of 4, 4 to {MAX_DIM}")
        if self.num_v_heads % self.num_k_heads:
            refuse("num_v_heads", self.num_v_heads, f"a positive multiple of {self.num_k_heads}")
        if self.conv_width != CONV_WIDTH:
            refuse("conv_width", self.conv_width, str(CONV_WIDTH))
        if self.dtype not in STATE_BYTES:
            refuse("dtype", self.dtype, " or ".join(STATE_BYTES))
        if self.mode not in MODES:
            refuse("mode", self.mode, " or ".join(MODES))

    @property
    def channels(self) -> int:
        """Of the convolution: those of query, key and value."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def h_bytes(self) -> int:
        """Of the states of one layer and sequence."""
        return STATE_BYTES[self.dtype] * self.num_v_heads * self.k_dim * self.v_dim

    @property
    def window_bytes(self) -> int:
        """Of the convolution's windows of one layer and sequence."""
        return F32_BYTES * CONV_WIDTH * self.channels

    @property
    def kept(self) -> int:
        """Copies of a state and of its windows: the tokens of a step, or 1."""
        return self.k_max if self.mode == "snapshot" else 1

    @property
    def groups(self) -> int:
        """Launches of a batch of all sequences."""
        return -(-self.seqs // VERIFY_WY_TABLE_SEQS)

    def buffer_table(self) -> list[BufferSpec]:
        """Every buffer of a ``GdnVerifyPool``, in the order of allocation; ``state_bytes`` is 4 for f32, 2 for f16."""
        rows, k = self.layers * self.seqs, self.k_max
        state = "layers * seqs * {}state_bytes * num_v_heads * k_dim * v_dim"
        window = "layers * seqs * {}4 * conv_width * channels"
        table_bytes = self.layers * self.groups * 2 * self.kept * VERIFY_WY_TABLE_SEQS * PTR_BYTES
        specs = [
            ("H", state.format(""), rows * self.h_bytes),
            ("windows", window.format(""), rows * self.window_bytes),
            ("tables", f"8 * layers * groups * 2 * {'k_max' if self.kept > 1 else '1'} * 32", table_bytes),
        ]
        if self.mode == "snapshot":
            specs += [
                ("Hi", state.format("(k_max - 1) * "), rows * (k - 1) * self.h_bytes),
                ("windows_i", window.format("(k_max - 1) * "), rows * (k - 1) * self.window_bytes),
            ]
        else:
            heads, width = self.num_v_heads, self.num_k_heads * self.k_dim
            specs += [
                (
                    "corrections",
                    "layers * seqs * k_max * 4 * num_v_heads * v_dim",
                    rows * k * F32_BYTES * heads * self.v_dim,
                ),
                ("keys", "layers * seqs * k_max * 2 * num_k_heads * k_dim", rows * k * BF16_BYTES * width),
                ("gates", "layers * seqs * k_max * 4 * num_v_heads", rows * k * F32_BYTES * heads),
                ("inputs", "layers * seqs * k_max * 2 * channels", rows * k * BF16_BYTES * self.channels),
                ("accepted", "4 * seqs", I32_BYTES * self.seqs),
            ]
        return [BufferSpec(*spec) for spec in specs]
