# SPDX-License-Identifier: MIT OR Apache-2.0
"""The published hash constants, and the ids that they give."""

from pathlib import Path

import numpy as np

from metrale.engram_v41 import EngramTables

DATA = Path(__file__).resolve().parent.parent / "data"

with np.load(DATA / "engram_hash.npz") as _file:
    VALUES = dict(_file)

SITES = len(VALUES["layer_ids"])
TOKENS = VALUES["tokens"]
ROWS = VALUES["rows"]


def arguments():
    """Of ``EngramTables``, copied each time."""
    primes = VALUES["primes"].reshape(SITES, -1).copy()
    return {
        "token_map": VALUES["token_map"].copy(),
        "pad_id": int(VALUES["pad_token_id"]),
        "multipliers": VALUES["multipliers"].reshape(SITES, -1).copy(),
        "primes": primes,
        "offsets": VALUES["offsets"].reshape(SITES, -1).copy(),
        "table_rows": primes.sum(axis=1),
    }


def tables():
    return EngramTables(**arguments())
