# SPDX-License-Identifier: MIT OR Apache-2.0
"""Storage types of GGUF tensors and the byte counts of everything made of blocks.

The Python side of the package takes every block size from here.
"""

from dataclasses import dataclass

from metrale.errors import refuse

__all__ = [
    "BF16",
    "F16",
    "F32",
    "Q2_K",
    "Q3_K",
    "Q6_K",
    "Q8_1_BLOCK_BYTES",
    "Q8_1_BLOCK_VALUES",
    "SUPER_BLOCK",
    "QuantType",
    "kquant_mmq_act_bytes",
    "kquant_q8_1_rows_bytes",
    "kquant_weight_bytes",
    "quant_type",
]

SUPER_BLOCK = 256
"""Weights of one K-quant block."""
Q8_1_BLOCK_VALUES = 32
Q8_1_BLOCK_BYTES = 36
"""Two halves (scale, sum of the inputs), then 32 int8."""
MMQ_TILE_ROWS = 128
MMQ_ACT_BLOCK_VALUES = 128
MMQ_ACT_BLOCK_BYTES = 144
"""16 bytes of scales and sums, then 128 int8."""


@dataclass(frozen=True, slots=True)
class QuantType:
    """How one tensor type stores a row: `block_bytes` for every `block_values` values of it.

    A type that this package has no sizes for has zero for both, and keeps its id and name.
    """

    name: str
    ggml_id: int
    block_values: int
    block_bytes: int

    def __str__(self) -> str:
        return self.name

    @property
    def known(self) -> bool:
        """Whether the sizes are known."""
        return self.block_values > 0

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of `k` values; refuses a row that does not end with a block."""
        if not self.known:
            refuse("type", self.name, "a type whose block size is known")
        if k < 0 or k % self.block_values:
            refuse("k", k, f"a multiple of {self.block_values} ({self.name})")
        return k // self.block_values * self.block_bytes


F32 = QuantType("F32", 0, 1, 4)
F16 = QuantType("F16", 1, 1, 2)
BF16 = QuantType("BF16", 30, 1, 2)
Q2_K = QuantType("Q2_K", 10, SUPER_BLOCK, 84)
Q3_K = QuantType("Q3_K", 11, SUPER_BLOCK, 110)
Q6_K = QuantType("Q6_K", 14, SUPER_BLOCK, 210)

# Files hold ggml's other types beside the ones that the kernels read: their bytes are handed out and their
# names reported all the same.
_OTHERS = (
    ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24),
    ("Q8_0", 8, 32, 34), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176), ("Q8_K", 15, 256, 292),
    ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18), ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82), ("IQ4_XS", 23, 256, 136),
    ("I8", 24, 1, 1), ("I16", 25, 1, 2), ("I32", 26, 1, 4), ("I64", 27, 1, 8), ("F64", 28, 1, 8),
    ("IQ1_M", 29, 256, 56), ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17),
    ("NVFP4", 40, 64, 36), ("Q1_0", 41, 128, 18),
)  # fmt: skip
_TYPES = {t.ggml_id: t for t in (F32, F16, BF16, Q2_K, Q3_K, Q6_K, *(QuantType(*row) for row in _OTHERS))}
_K_QUANTS = {t.block_bytes: t.name for t in (Q2_K, Q3_K, Q6_K)}


def quant_type(ggml_id: int) -> QuantType:
    """The type of that ggml id; for an id outside the table one with a name made of it, and no sizes."""
    return _TYPES.get(ggml_id) or QuantType(f"type {ggml_id}", ggml_id, 0, 0)


def kquant_weight_bytes(n: int, k: int, block_bytes: int) -> int:
    """Bytes of an `[n, k]` K-quant matrix whose super-blocks have `block_bytes`.

    Refuses n < 0, k not a positive multiple of 256, and block sizes of no K-quant format that has kernels.
    """
    _check_rows("n", n)
    _check_k(k, SUPER_BLOCK)
    if block_bytes not in _K_QUANTS:
        refuse("block_bytes", block_bytes, ", ".join(f"{size} ({name})" for size, name in _K_QUANTS.items()))
    return n * (k // SUPER_BLOCK) * block_bytes


def kquant_q8_1_rows_bytes(m: int, k: int) -> int:
    """Bytes of `[m, k]` activations as q8_1 rows. Refuses m < 0 and k not a positive multiple of 32."""
    _check_rows("m", m)
    _check_k(k, Q8_1_BLOCK_VALUES)
    return m * (k // Q8_1_BLOCK_VALUES) * Q8_1_BLOCK_BYTES


def kquant_mmq_act_bytes(m: int, k: int) -> int:
    """Bytes of `[m, k]` activations in the int8 tensor-core layout, rows padded to 128 and k to 256.

    Refuses m < 0 and k not a positive multiple of 32.
    """
    _check_rows("m", m)
    _check_k(k, Q8_1_BLOCK_VALUES)
    rows = _round_up(m, MMQ_TILE_ROWS)
    blocks = _round_up(k, SUPER_BLOCK) // MMQ_ACT_BLOCK_VALUES
    return rows * blocks * MMQ_ACT_BLOCK_BYTES


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _check_rows(name: str, rows: int) -> None:
    if rows < 0:
        refuse(name, rows, "0 or more")


def _check_k(k: int, step: int) -> None:
    if k <= 0 or k % step:
        refuse("k", k, f"a positive multiple of {step}")
