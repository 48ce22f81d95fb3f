# SPDX-License-Identifier: MIT OR Apache-2.0
"""The DeepSeek-V4.1 engram memory."""

from metrale.engram_v41.engram import EngramV41
from metrale.engram_v41.hasher import EngramHasher
from metrale.engram_v41.tables import EngramTables
from metrale.engram_v41.weights import EngramTable, EngramV41LayerWeights

__all__ = ["EngramHasher", "EngramTable", "EngramTables", "EngramV41", "EngramV41LayerWeights"]
