# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a model's engram sites hash by."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from metrale.errors import refuse

__all__ = ["EngramTables"]


@dataclass(frozen=True, slots=True, eq=False)
class EngramTables:
    """The constants of the hash, for all engram sites of a model; arrays are copied and read-only.

    ``token_map`` i32 ``[vocabulary]`` gives a token its compressed id, or -1; ``pad_id`` is the token that stands in
    for what is not there. Of each site ``multipliers`` u64 ``[sites, max_ngram]``, ``primes`` and ``offsets`` i64
    ``[sites, (max_ngram - 1) * heads]``, the heads of 2-grams first, and ``table_rows`` i64 ``[sites]``.

    Refuses an unmapped pad, an even multiplier, primes of a site that do not sum to its table's rows, an offset that
    leads out of the table.
    """

    token_map: npt.NDArray[np.int32]
    pad_id: int
    multipliers: npt.NDArray[np.uint64]
    primes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    table_rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype, dims in (
            ("token_map", np.int32, 1),
            ("multipliers", np.uint64, 2),
            ("primes", np.int64, 2),
            ("offsets", np.int64, 2),
            ("table_rows", np.int64, 1),
        ):
            object.__setattr__(self, name, _integers(name, getattr(self, name), dtype, dims))
        vocabulary, sites, cols = len(self.token_map), *self.primes.shape
        ngram = self.multipliers.shape[1]
        _require("token_map", self.token_map, self.token_map >= -1, "-1 (unmapped) or more")
        if not 0 <= self.pad_id < vocabulary or self.token_map[self.pad_id] < 0:
            refuse("pad_id", self.pad_id, f"a mapped token of the {vocabulary}")
        if ngram < 2 or len(self.multipliers) != sites:
            refuse("multipliers", f"shape {self.multipliers.shape}", f"({sites}, 2 or more), a row a site")
        _require("multipliers", self.multipliers, self.multipliers % 2 == 1, "odd numbers")
        if cols % (ngram - 1):
            refuse("primes", f"{cols} a site", f"a multiple of {ngram - 1}, the n-gram lengths")
        _require("primes", self.primes, self.primes >= 1, "1 or more")
        for name, shape in (("offsets", self.primes.shape), ("table_rows", (sites,))):
            if getattr(self, name).shape != shape:
                refuse(name, f"shape {getattr(self, name).shape}", f"{shape}")
        for site, (primes, rows) in enumerate(zip(self.primes, self.table_rows, strict=True)):
            if sum(map(int, primes)) != rows:
                refuse(f"primes of site {site}", f"a sum of {sum(map(int, primes))}", f"{rows}, the rows of its table")
        inside = (self.offsets >= 0) & (self.offsets <= self.table_rows[:, None] - self.primes)
        _require("offsets", self.offsets, inside, "0 to the rows of the site's table less the prime")

    @property
    def sites(self) -> int:
        """Engram layers."""
        return len(self.primes)

    @property
    def max_ngram(self) -> int:
        """Tokens of the longest n-gram."""
        return int(self.multipliers.shape[1])

    @property
    def heads(self) -> int:
        """Rows an n-gram length."""
        return self.cols // (self.max_ngram - 1)

    @property
    def cols(self) -> int:
        """Rows a token gathers in one layer."""
        return int(self.primes.shape[1])

    @property
    def pad(self) -> int:
        """The pad's compressed id."""
        return int(self.token_map[self.pad_id])


def _integers(name: str, values: Any, dtype: type[np.integer[Any]], dims: int) -> npt.NDArray[Any]:
    given = np.asarray(values)
    if given.ndim != dims or given.size == 0:
        refuse(name, f"shape {given.shape}", f"{dims} dimension{'s' if dims > 1 else ''}, none of them 0")
    limits = np.iinfo(dtype)
    if given.dtype.kind not in "iu" or int(given.min()) < limits.min or int(given.max()) > limits.max:
        refuse(name, f"{given.dtype} of {given.min()} to {given.max()}", f"integers of {limits.min} to {limits.max}")
    copied = np.array(given, dtype, order="C")
    copied.flags.writeable = False
    return copied


def _require(name: str, values: npt.NDArray[Any], good: npt.NDArray[np.bool_], allowed: str) -> None:
    if not good.all():
        at = tuple(int(i) for i in np.argwhere(~good)[0])
        refuse(f"{name}[{', '.join(map(str, at))}]", int(values[at]), allowed)
