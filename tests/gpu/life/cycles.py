# SPDX-License-Identifier: MIT OR Apache-2.0
"""Cycles of backends, buffers and closures, which a thread collects while others make more: all of it is given back."""
# repeats: inside

import gc
import threading
import warnings
import weakref

from things import NUMBER, backend_class, everything

MAKERS = 3
EACH = 2

# In a cycle with its buffers a backend may go first, and then says what was left.
warnings.simplefilter("ignore", ResourceWarning)


class Mine(backend_class()):
    """A backend that can hold things."""


def maker(seen):
    for _ in range(EACH):
        gpu = Mine()
        gpu.things = everything(gpu)
        gpu.again = lambda gpu=gpu: gpu.things["launch"].launch()
        gpu.again()
        seen.append((weakref.ref(gpu), gpu.ledger))


def collector(stop):
    while not stop.is_set():
        gc.collect()


for _ in range(NUMBER):
    seen, stop = [], threading.Event()
    collecting = threading.Thread(target=collector, args=(stop,))
    makers = [threading.Thread(target=maker, args=(seen,)) for _ in range(MAKERS)]
    for thread in (collecting, *makers):
        thread.start()
    for thread in makers:
        thread.join()
    stop.set()
    collecting.join()
    gc.collect()
    for gone, ledger in seen:
        assert gone() is None
        assert (len(ledger), ledger.streams, ledger.events) == (0, {}, {})
