# SPDX-License-Identifier: MIT OR Apache-2.0
# cython: cdivision=True, boundscheck=False, wraparound=False
"""EngramHasher: the table rows that a sequence's tokens gather, as it grows."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from metrale.errors import refuse

from metrale.ops.check cimport u32

cdef extern from "common/engram.cuh" namespace "metrale" nogil:
    int64_t engram_roll(const int32_t* compressed, uint64_t position, uint32_t n, const uint64_t* multipliers,
                        int32_t pad)
    int64_t engram_id(int64_t roll, int64_t prime, int64_t offset)


cdef class EngramHasher:
    """Row ids of one sequence, by the constants of an ``EngramTables``.

    ``append(tokens)`` gives the ids of these tokens' positions, the same whether they come together or one by one;
    ``truncate(pos)`` takes tokens back, ``fork()`` copies the sequence. At most ``max_seq`` tokens.
    """

    cdef readonly object tables
    cdef readonly uint32_t max_seq
    cdef object _compressed
    cdef int32_t[::1] _ids
    cdef uint32_t _length

    def __init__(self, tables, max_seq):
        self.max_seq = u32("max_seq", max_seq)
        if self.max_seq == 0:
            refuse("max_seq", max_seq, "1 or more")
        self.tables = tables
        self._compressed = np.empty(self.max_seq, np.int32)
        self._ids = self._compressed
        self._length = 0

    def __len__(self):
        return self._length

    @property
    def compressed(self):
        """The compressed ids of the tokens, i32, a read-only view: what ``ops.engram_v41_hash`` reads."""
        view = self._compressed[:self._length]
        view.flags.writeable = False
        return view

    def append(self, tokens):
        """Add tokens and return the ids of their positions, i64 ``[len(tokens), sites, cols]``.

        Refuses what are no tokens of the vocabulary and more than ``max_seq`` allows, before anything changes.
        """
        token_map = self.tables.token_map
        given = np.asarray(tokens)
        if given.ndim != 1 or (given.size > 0 and given.dtype.kind not in "iu"):
            refuse("tokens", f"{given.dtype} of shape {given.shape}", "integers of one dimension")
        if len(given) > self.max_seq - self._length:
            refuse("tokens", f"{len(given)} tokens after {self._length}", f"max_seq, {self.max_seq}, in all")
        wrong = np.flatnonzero((given < 0) | (given >= len(token_map)))
        if len(wrong) > 0:
            refuse(f"tokens[{wrong[0]}]", int(given[wrong[0]]), f"0 to {len(token_map) - 1}")
        cdef uint32_t start = self._length, stop = start + <uint32_t>len(given)
        self._compressed[start:stop] = token_map[given.astype(np.intp)]
        ids = np.empty((len(given), self.tables.sites, self.tables.cols), np.int64)
        if len(given) > 0:
            hash_positions(self._ids, start, stop, self.tables, ids)
        self._length = stop
        return ids

    def truncate(self, pos):
        """Keep the first ``pos`` tokens. Refuses more than there are."""
        cdef uint32_t kept = u32("pos", pos)
        if kept > self._length:
            refuse("pos", pos, f"0 to {self._length}, the tokens so far")
        self._length = kept

    def fork(self):
        """A hasher of its own with the same tokens."""
        cdef EngramHasher copy = EngramHasher(self.tables, self.max_seq)
        memcpy(&copy._ids[0], &self._ids[0], self._length * sizeof(int32_t))
        copy._length = self._length
        return copy


cdef hash_positions(const int32_t[::1] compressed, uint32_t start, uint32_t stop, tables, int64_t[:, :, ::1] ids):
    cdef const uint64_t[:, ::1] multipliers = tables.multipliers
    cdef const int64_t[:, ::1] primes = tables.primes, offsets = tables.offsets
    cdef uint32_t sites = tables.sites, ngram = tables.max_ngram, heads = tables.heads
    cdef int32_t pad = tables.pad
    cdef uint32_t p, site, n, col
    cdef int64_t roll
    with nogil:
        for p in range(start, stop):
            for site in range(sites):
                for n in range(2, ngram + 1):
                    roll = engram_roll(&compressed[0], p, n, &multipliers[site, 0], pad)
                    for col in range((n - 2) * heads, (n - 1) * heads):
                        ids[p - start, site, col] = engram_id(roll, primes[site, col], offsets[site, col])
