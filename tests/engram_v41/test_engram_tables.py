# SPDX-License-Identifier: MIT OR Apache-2.0
"""What EngramTables accepts."""

import re

import numpy as np
import pytest
from published import arguments, tables

from metrale.engram_v41 import EngramTables
from metrale.errors import ArgumentError


def with_value(name, at, value):
    values = np.array(arguments()[name], np.int64)
    values[at] = value
    return {name: values}


REFUSED = [
    ({"token_map": np.zeros((2, 2), int)}, "token_map: got 'shape (2, 2)', allowed: 1 dimension"),
    ({"token_map": np.zeros(0, int)}, "token_map: got 'shape (0,)', allowed: 1 dimension"),
    ({"token_map": [1.5, 2.5, 3.5]}, "token_map: got 'float64 of 1.5 to 3.5', allowed: integers of -2147483648 to"),
    ({"token_map": [0, 1, 2**31]}, "token_map: got 'int64 of 0 to 2147483648', allowed: integers of -2147483648 to"),
    (with_value("token_map", 70, -2), "token_map[70]: got -2, allowed: -1 (unmapped) or more"),
    ({"pad_id": 4096}, "pad_id: got 4096, allowed: a mapped token of the 4096"),
    ({"pad_id": -1}, "pad_id: got -1, allowed: a mapped token of the 4096"),
    (with_value("token_map", 2, -1), "pad_id: got 2, allowed: a mapped token of the 4096"),
    ({"multipliers": np.ones((1, 4), int)}, "multipliers: got 'shape (1, 4)', allowed: (2, 2 or more), a row a site"),
    ({"multipliers": np.ones((2, 1), int)}, "multipliers: got 'shape (2, 1)', allowed: (2, 2 or more), a row a site"),
    (with_value("multipliers", (1, 2), 40), "multipliers[1, 2]: got 40, allowed: odd numbers"),
    (
        {"multipliers": np.ones((2, 6), int)},
        "primes: got '24 a site', allowed: a multiple of 5, the n-gram lengths",
    ),
    (with_value("primes", (0, 3), 0), "primes[0, 3]: got 0, allowed: 1 or more"),
    ({"offsets": np.zeros((2, 23), int)}, "offsets: got 'shape (2, 23)', allowed: (2, 24)"),
    ({"table_rows": [1]}, "table_rows: got 'shape (1,)', allowed: (2,)"),
    (
        {"table_rows": [384006168, 384016681]},
        "primes of site 1: got 'a sum of 384016682', allowed: 384016681, the rows of its table",
    ),
    (
        with_value("offsets", (0, 0), -1),
        "offsets[0, 0]: got -1, allowed: 0 to the rows of the site's",
    ),
    (with_value("offsets", (1, 23), 384016681), "offsets[1, 23]: got 384016681, allowed: 0 to the rows of"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[message.split(",")[0] for _, message in REFUSED])
def test_what_is_wrong_is_refused_by_name(changed, message):
    with pytest.raises(ArgumentError, match="^" + re.escape(message)):
        EngramTables(**arguments() | changed)


def test_the_published_constants_are_accepted():
    t = tables()
    assert (t.sites, t.max_ngram, t.heads, t.cols, t.pad) == (2, 4, 8, 24, 2)


def test_the_last_id_of_a_table_is_in_range():
    t = tables()
    assert (t.offsets + t.primes).max(axis=1).tolist() == t.table_rows.tolist()


def test_arrays_are_copies_that_cannot_be_written():
    given = arguments()
    t = EngramTables(**given)
    given["primes"][0, 0] = 1
    assert t.primes[0, 0] != 1
    assert not t.primes.flags.writeable
