# SPDX-License-Identifier: MIT OR Apache-2.0
"""EngramHasher against published ids, and against the oracle."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import ROWS, TOKENS, VALUES, tables

from metrale.engram_v41 import EngramHasher, EngramTables
from metrale.errors import ArgumentError
from metrale.reference.engram import row_ids

SECONDS_OF_100_000_TOKENS = 1.0


@pytest.fixture
def hasher():
    return EngramHasher(tables(), 256)


def small_tables(ngram, heads):
    """Of a vocabulary of 9 tokens, two of them unmapped; multipliers large enough to wrap."""
    rng = np.random.default_rng([ngram, heads])
    primes = rng.integers(2, 1000, (2, (ngram - 1) * heads))
    return EngramTables(
        token_map=[5, -1, 2**31 - 1, 0, 77, -1, 2**30 + 1, 3, 5],
        pad_id=4,
        multipliers=rng.integers(0, 2**63, (2, ngram), np.uint64) * np.uint64(2) + np.uint64(1),
        primes=primes,
        offsets=np.cumsum(primes, axis=1) - primes,
        table_rows=primes.sum(axis=1),
    )


def test_a_prompt_at_once_has_the_published_ids(hasher):
    np.testing.assert_array_equal(hasher.append(TOKENS), ROWS)


def test_tokens_one_by_one_have_the_published_ids(hasher):
    np.testing.assert_array_equal([hasher.append([token])[0] for token in TOKENS], ROWS)


@given(cuts=st.lists(st.integers(0, len(TOKENS)), max_size=6))
def test_tokens_in_any_portions_have_the_published_ids(cuts):
    hasher = EngramHasher(tables(), len(TOKENS))
    parts = np.split(TOKENS, sorted(cuts))
    np.testing.assert_array_equal(np.concatenate([hasher.append(part) for part in parts]), ROWS)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.integers(2, 5), st.integers(1, 3))
def test_any_tokens_have_the_oracles_ids(tokens, ngram, heads):
    t = small_tables(ngram, heads)
    got = EngramHasher(t, 12).append(tokens)
    for site in range(2):
        expected = row_ids(t.token_map[tokens], t.multipliers[site], t.primes[site], t.offsets[site], t.pad)
        np.testing.assert_array_equal(got[:, site], expected)


@pytest.mark.parametrize("pos", [0, 1, 50, 95, 96])
def test_after_a_truncation_the_same_tokens_have_the_same_ids(hasher, pos):
    hasher.append(TOKENS)
    hasher.truncate(pos)
    assert len(hasher) == pos
    np.testing.assert_array_equal(hasher.append(TOKENS[pos:]), ROWS[pos:])


def test_rejected_tokens_leave_no_trace(hasher):
    hasher.append(TOKENS[:40])
    hasher.append(TOKENS[::-1])
    hasher.truncate(40)
    np.testing.assert_array_equal(hasher.append(TOKENS[40:]), ROWS[40:])


def test_a_fork_goes_on_by_itself(hasher):
    hasher.append(TOKENS[:30])
    fork = hasher.fork()
    hasher.append(TOKENS[::-1])
    np.testing.assert_array_equal(fork.append(TOKENS[30:]), ROWS[30:])


def test_a_fork_leaves_the_original_as_it_was(hasher):
    hasher.append(TOKENS[:30])
    hasher.fork().append(TOKENS[::-1])
    np.testing.assert_array_equal(hasher.append(TOKENS[30:]), ROWS[30:])


def test_compressed_ids_are_those_of_the_map(hasher):
    hasher.append(TOKENS)
    np.testing.assert_array_equal(hasher.compressed, VALUES["token_map"][TOKENS])


def test_compressed_ids_cannot_be_written(hasher):
    hasher.append(TOKENS)
    assert not hasher.compressed.flags.writeable


def test_a_prompt_of_100_000_tokens_is_hashed_well_within_a_second():
    tokens = np.random.default_rng(0).integers(0, len(VALUES["token_map"]), 100_000)
    hasher = EngramHasher(tables(), len(tokens))
    start = time.perf_counter()
    hasher.append(tokens)
    assert time.perf_counter() - start < SECONDS_OF_100_000_TOKENS


# Refusals


def test_no_tokens_are_no_error(hasher):
    assert hasher.append([]).shape == (0, 2, 24)


@pytest.mark.parametrize("token", [-1, 4096, 2**62])
def test_a_token_outside_the_vocabulary_is_refused_by_its_place(hasher, token):
    with pytest.raises(ArgumentError, match=rf"^tokens\[2\]: got {token}, allowed: 0 to 4095$"):
        hasher.append([0, 4095, token])


def test_refused_tokens_change_nothing(hasher):
    hasher.append(TOKENS[:30])
    with pytest.raises(ArgumentError):
        hasher.append([7, -1])
    np.testing.assert_array_equal(hasher.append(TOKENS[30:]), ROWS[30:])


def test_more_tokens_than_max_seq_are_refused():
    hasher = EngramHasher(tables(), 5)
    hasher.append([1, 2, 3])
    with pytest.raises(ArgumentError, match="^tokens: got '3 tokens after 3', allowed: max_seq, 5, in all$"):
        hasher.append([1, 2, 3])


@pytest.mark.parametrize("tokens", [[1.0], [[1, 2]], ["1"], 3])
def test_what_are_no_tokens_is_refused(hasher, tokens):
    with pytest.raises(ArgumentError, match="^tokens: got .*, allowed: integers of one dimension$"):
        hasher.append(tokens)


def test_truncation_to_more_than_there_is_is_refused(hasher):
    hasher.append([1, 2, 3])
    with pytest.raises(ArgumentError, match="^pos: got 4, allowed: 0 to 3, the tokens so far$"):
        hasher.truncate(4)


def test_max_seq_of_0_is_refused():
    with pytest.raises(ArgumentError, match="^max_seq: got 0, allowed: 1 or more$"):
        EngramHasher(tables(), 0)
