# SPDX-License-Identifier: MIT OR Apache-2.0
"""Everything dropped, freed and closed in any order: the last reference takes the backend along."""
# repeats: inside

import itertools
import random
import warnings
import weakref

from things import NUMBER, everything, nothing_left, open_backend

EACH = 1  # orders a repeat

chance = random.Random(NUMBER)
orders = list(itertools.permutations(("gpu", "acc", "out", "own", "kernel", "launch", "prepared")))
for order in chance.sample(orders, min(EACH * NUMBER, len(orders))):
    things = everything(open_backend())
    gone, ledger = weakref.ref(things["gpu"]), things["gpu"].ledger
    for name in order:
        del things[name]
    assert gone() is None, order
    assert (len(ledger), ledger.streams, ledger.events) == (0, {}, {}), order

# A backend that is closed before the others are freed says what was left.
warnings.simplefilter("ignore", ResourceWarning)
for _ in range(EACH * NUMBER):
    things = everything(open_backend())
    gpu = things["gpu"]
    drops = [lambda name=name, things=things: things.pop(name, None) for name in things]
    steps = [gpu.close, things["acc"].free, things["out"].free, things["own"].free, *drops] * 2
    chance.shuffle(steps)
    for step in steps:
        step()
    assert gpu.closed
    assert nothing_left(gpu)
