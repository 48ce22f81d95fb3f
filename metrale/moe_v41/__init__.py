# SPDX-License-Identifier: MIT OR Apache-2.0
"""The DeepSeek-V4.1 mixture of experts with K-quant experts."""

from metrale.moe_v41.arena import ArenaStats, ExpertArena
from metrale.moe_v41.config import BufferSpec, MoeV41Cfg
from metrale.moe_v41.moe import MoeV41, RoutedToken
from metrale.moe_v41.source import ArrayExperts, ExpertSource, GgufExperts
from metrale.moe_v41.weights import MoeV41LayerWeights, ResidentMat, RouterWeights, SlotLayout

__all__ = [
    "ArenaStats",
    "ArrayExperts",
    "BufferSpec",
    "ExpertArena",
    "ExpertSource",
    "GgufExperts",
    "MoeV41",
    "MoeV41Cfg",
    "MoeV41LayerWeights",
    "ResidentMat",
    "RoutedToken",
    "RouterWeights",
    "SlotLayout",
]
