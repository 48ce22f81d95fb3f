# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ``tools/bench.py`` runs: a module a benchmark, each with ``run`` and ``table``."""
