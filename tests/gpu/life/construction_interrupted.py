# SPDX-License-Identifier: MIT OR Apache-2.0
"""A KeyboardInterrupt before each line and bytecode of building and freeing an Owner: nothing stays on the ledger."""
# repeats: inside

import sys

from things import NUMBER, Owner, nothing_left, open_backend

from metrale.gpu import owner

LEAST = 15  # lines and bytecodes: the work has more


class Interrupt:
    """A trace function that raises at the n-th line or bytecode run in owner.py."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != owner.__file__:
            return None
        frame.f_trace_opcodes = True
        if event in ("line", "opcode"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def work(gpu):
    with Owner(gpu, "Model") as own:
        own.alloc("weights", 64)
        own.stream()
        own.event()
    own.free()


def interrupted(gpu, at):
    """Whether ``work`` was interrupted: it has fewer than ``at`` steps if not."""
    sys.settrace(Interrupt(at))
    try:
        work(gpu)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


with open_backend() as gpu:
    for _ in range(NUMBER):
        at = 1
        while interrupted(gpu, at):
            assert nothing_left(gpu), at
            at += 1
        assert nothing_left(gpu)
        assert at > LEAST
