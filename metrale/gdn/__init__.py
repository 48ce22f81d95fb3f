# SPDX-License-Identifier: MIT OR Apache-2.0
"""Speculative verify steps on models with a gated delta rule."""

from metrale.gdn.config import GdnVerifyCfg
from metrale.gdn.pool import GdnVerifyPool

__all__ = ["GdnVerifyCfg", "GdnVerifyPool"]
