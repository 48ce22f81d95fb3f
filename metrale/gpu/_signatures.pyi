# SPDX-License-Identifier: MIT OR Apache-2.0
KERNELS: dict[str, dict[str, tuple[tuple[str, str], ...]]]
