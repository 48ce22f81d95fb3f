# SPDX-License-Identifier: MIT OR Apache-2.0
"""Oracles: every kernel family once more in NumPy, from its formula, in float64, plain and slow.

They judge the kernels and never call them. A function returns the value before the kernel's final rounding,
unless its docstring says otherwise; bf16 operands come as uint16 bits, K-quant matrices as their raw blocks.
"""
