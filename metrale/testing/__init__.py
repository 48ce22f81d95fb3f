# SPDX-License-Identifier: MIT OR Apache-2.0
"""For tests of programs that use metrale: a backend that fails on demand, and a pytest fixture that finds leaks."""

from metrale.testing.failing import CALLS, RELEASES, FailingBackend

__all__ = ["CALLS", "RELEASES", "FailingBackend"]
