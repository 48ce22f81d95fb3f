# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an arena keeps, over thousands of tokens, beside a simulation of its policy."""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from experts import LAYOUT, arena_of, contents, slot_bytes

EXPERTS, SLOTS, PICKS, TOKENS = 400, 40, 6, 2000


@dataclass
class Policy:
    """Who is resident, in a list with the one that was fetched longest ago at its head.

    The misses of a token replace, one after another, the head, or any of the ``share`` of the slots next to it. What
    the token asks for stays.
    """

    share: float
    seed: int
    line: list = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    def __post_init__(self):
        self.chance = random.Random(self.seed)

    def token(self, picks):
        room = SLOTS - len(self.line)
        for pick in picks:
            if pick in self.line:
                self.hits += 1
                continue
            self.misses += 1
            if room > 0:
                room -= 1
                continue
            others = [e for e in self.line if e not in picks]
            oldest = others[: max(1, int(self.share * SLOTS))]
            index = self.chance.randrange(len(oldest)) if len(oldest) > 1 else 0
            self.line.remove(oldest[index])
            self.evictions += 1
        self.line = [e for e in self.line if e not in picks] + list(picks)


def zipf_tokens(seed):
    """Picks of each token: expert ``e`` with a weight of ``1 / (1 + rank)``, the ranks in an order of their own."""
    rng = np.random.default_rng(seed)
    weight = np.empty(EXPERTS)
    weight[rng.permutation(EXPERTS)] = 1 / np.arange(1, EXPERTS + 1)
    for _ in range(TOKENS):
        yield [int(e) for e in rng.choice(EXPERTS, PICKS, replace=False, p=weight / weight.sum())]


@pytest.mark.parametrize("share", [0.05, 0, 0.25], ids=lambda share: f"share-{share}")
def test_2000_tokens_of_a_layer_ten_times_the_arena_go_as_simulated(device, share):
    policy = Policy(share, seed=7)
    with arena_of(device, SLOTS, random_share=share, seed=7) as (arena, _):
        for n, picks in enumerate(zipf_tokens(11)):
            policy.token(picks)
            slots = arena.fetch([(0, e) for e in picks])
            if n % 50 == 0:
                for expert, slot in zip(picks, slots, strict=True):
                    np.testing.assert_array_equal(contents(arena, slot), slot_bytes(0, expert))
            arena.release()
        stats, there = arena.stats, arena.slots_of(0)
    assert (stats.hits, stats.misses, stats.evictions) == (policy.hits, policy.misses, policy.evictions)
    assert stats.bytes_read == policy.misses * LAYOUT.slot_bytes
    assert set(there) == set(policy.line)
    assert stats.hits > 0.3 * TOKENS * PICKS  # what is asked for often is kept


def test_the_share_changes_what_is_kept():
    def misses(share):
        policy = Policy(share, seed=7)
        for picks in itertools.islice(zipf_tokens(11), 300):
            policy.token(picks)
        return policy.misses

    assert len({misses(share) for share in (0, 0.05, 0.25)}) == 3
