# SPDX-License-Identifier: MIT OR Apache-2.0
"""SIGINT while launches, copies and waits run: one KeyboardInterrupt, nothing lost, and the backend works on.

On a GPU it ends synchronize() and event_synchronize(), and not the kernel that they wait for. On the host a launch is
over when it returns, so that there is nothing to wait for: what is interrupted there comes after it.
"""
# repeats: inside

import os
import random
import signal
import threading
import time

from things import KIND, NUMBER, finish, nothing_left, open_backend, spin

SHORT = 300_000  # steps: about a millisecond
LONG = 40_000_000  # steps: on a GPU at least 0.1 seconds, twice as long as until a wait looks for signals
LARGE = 1 << 22  # bytes
LONGEST = 0.005  # seconds until the interrupt of short work

PATIENCE = 2000  # hundredths of a second for a signal to come, on a machine that is busy

chance = random.Random(NUMBER)
gpu = open_backend()


def interrupt(work, delay, ready=None):
    """``work()``, with a SIGINT from another thread, be it over by then or not: ``delay`` seconds after its start, or
    after it has set the event ``ready``."""

    def send():
        if ready:
            ready.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    try:
        thread.start()
        work()
        for _ in range(PATIENCE):
            time.sleep(0.01)
    except KeyboardInterrupt:
        thread.join()
    else:
        raise AssertionError("no KeyboardInterrupt")


def launches():
    with gpu.buffer(64) as out:
        for _ in range(3):
            spin(gpu, out, SHORT).launch()
        gpu.synchronize()


def copies():
    with gpu.buffer(LARGE) as buffer:
        host = bytearray(LARGE)
        for _ in range(5):
            gpu.copy_h2d(host, buffer)
            gpu.copy_d2h(buffer, host)


def builders():
    with gpu.buffer(256) as acc, gpu.buffer(256) as out:
        for _ in range(1000):
            launch = finish(gpu, acc, out)
            launch.launch()
            launch.prepare().set("n", 32).launch()
        gpu.synchronize()


def check_that_it_works():
    with gpu.buffer(64) as out:
        gpu.memset(out, 0, 64)
        spin(gpu, out, 10).launch()
        assert out.numpy("uint32")[0] == 1


def check_a_wait(wait, event):
    with gpu.buffer(64) as out:
        gpu.memset(out, 0, 64)
        launch, ready = spin(gpu, out, LONG), threading.Event()

        def work():
            launch.launch()
            gpu.record_event(event)
            ready.set()
            wait()

        interrupt(work, 0.01, ready)
        assert gpu.event_query(event) == (KIND == "host"), "the interrupt waited for the kernel"
        gpu.synchronize()
        assert out.numpy("uint32")[0] == 1


check_that_it_works()
builders()  # loads its kernel, where an interrupt would leave a file to the garbage collector
for _ in range(NUMBER):
    for work in (launches, copies, builders):
        interrupt(work, chance.uniform(0, LONGEST))
        assert gpu.live_alloc_count == 0, work
        check_that_it_works()
    event = gpu.create_event()
    check_a_wait(chance.choice((gpu.synchronize, lambda event=event: gpu.event_synchronize(event))), event)
    gpu.destroy_event(event)
assert nothing_left(gpu)
assert gpu.close() == []
