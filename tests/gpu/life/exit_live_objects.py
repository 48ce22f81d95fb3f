# SPDX-License-Identifier: MIT OR Apache-2.0
"""Live objects at the end, a backend's in each place that a program can keep them: each backend says one line."""
# stderr: (metrale: .*: never freed: 3 allocations, 448 bytes: .*; 1 streams \(.*\); 1 events \(.*\)\n){8}

import builtins
import gc
import random
import sys
import threading
from contextvars import ContextVar
from types import ModuleType

from things import NUMBER, everything, open_backend

chance = random.Random(NUMBER)
gc.disable()


def shuffled():
    """Everything that stands on a backend, by name, in an order of chance."""
    return dict(chance.sample(sorted(everything(open_backend()).items()), 7))


def suspended(things):
    yield things


def failing(things):
    raise ValueError(things)


class Cycle:
    def __init__(self, thing):
        self.thing, self.me = thing, self


class Session:
    things = shuffled()

    def __init__(self, things=things):
        self.launch, self.gpu = things["launch"], things["gpu"]


def in_globals():
    for name, thing in shuffled().items():
        globals()[chance.choice(("", "_")) + name] = thing


def in_cycles():
    for thing in shuffled().values():
        Cycle(thing)


def in_a_class():
    Session.instance = Session()


def in_modules():
    module = sys.modules["kept"] = ModuleType("kept")
    for name, thing in shuffled().items():
        sys.modules[f"kept {name}"] = thing
        setattr(module, name, thing)


def in_builtins():
    for name, thing in shuffled().items():
        setattr(builtins, f"kept_{name}", thing)


def in_a_generator():
    global generator
    generator = suspended(shuffled())
    next(generator)


def in_a_traceback():
    try:
        failing(shuffled())
    except ValueError as error:
        sys.last_value = error


def in_contexts():
    global local, variable
    local, variable = threading.local(), ContextVar("variable")
    local.things = shuffled()
    variable.set(local.things)


places = [in_globals, in_cycles, in_a_class, in_modules, in_builtins, in_a_generator, in_a_traceback, in_contexts]
for keep in chance.sample(places, len(places)):
    keep()
