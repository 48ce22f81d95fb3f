# SPDX-License-Identifier: MIT OR Apache-2.0
"""K-quant blocks (`kquant`), GGUF files (`gguf`), and what a DeepSeek-V4.1 file holds (`deepseek41`)."""
