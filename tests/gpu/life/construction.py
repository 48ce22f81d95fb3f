# SPDX-License-Identifier: MIT OR Apache-2.0
"""Constructors that raise half way: of a backend, of what owns device things, before and after each step."""
# repeats: inside

import gc
import weakref

from things import NUMBER, MetraleError, Owner, backend_class, nothing_left, open_backend, refusal

STEPS = 5


class Fails(backend_class()):
    made = None

    def __init__(self, opens_first, error):
        Fails.made = weakref.ref(self)
        if opens_first:
            super().__init__()
            Fails.ledger = self.ledger
        raise error


class Interrupting(backend_class()):
    """Raises at the n-th buffer, stream or event."""

    def __init__(self, step, error):
        super().__init__()
        self.step, self.error = step, error

    def count(self):
        self.step -= 1
        if self.step == 0:
            raise self.error

    def buffer(self, nbytes, tag=None):
        self.count()
        return super().buffer(nbytes, tag)

    def create_stream(self):
        self.count()
        return super().create_stream()

    def create_event(self, timing=False):
        self.count()
        return super().create_event(timing)


class Model:
    def __init__(self, gpu):
        with Owner(gpu, "Model") as own:
            own.alloc("weights", 64)
            own.stream()
            own.event()
            own.alloc("scratch", 64)
            own.event()
        self.own = own


for _ in range(NUMBER):
    for error in (ValueError(), KeyboardInterrupt(), MetraleError()):
        for opens_first in (False, True):
            try:
                Fails(opens_first, error)
            except type(error):
                error.__traceback__ = None
            gc.collect()
            assert Fails.made() is None
        for step in range(1, STEPS + 1):
            with Interrupting(step, error) as gpu:
                try:
                    Model(gpu)
                except type(error):
                    error.__traceback__ = None
                assert nothing_left(gpu), step
                model = Model(gpu)
                assert gpu.live_alloc_count == 2
                model.own.free()
                assert nothing_left(gpu)

    # A size that no memory has, at the second of two.
    with open_backend() as gpu:
        with Owner(gpu, "Model") as own:
            own.alloc("weights", 64)
            assert refusal(lambda own=own: own.alloc("too much", 1 << 50)) is not None
            assert refusal(lambda own=own: own.alloc("far too much", 1 << 62)) is not None
        assert gpu.live_alloc_count == 1
        own.free()
        assert nothing_left(gpu)

    # A second constructor, on top of one that ended well.
    with open_backend() as gpu, gpu.buffer(64) as buffer:
        for again in (gpu.__init__, lambda gpu=gpu, buffer=buffer: buffer.__init__(gpu, 64)):
            try:
                again()
            except TypeError as refused:
                assert "initialised once" in str(refused)
        assert gpu.live_alloc_count == 1
