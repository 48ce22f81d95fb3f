# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forks while other threads launch, allocate and free: each child works with a backend of its own."""
# repeats: inside

import threading

from things import KIND, NUMBER, finish, in_child, open_backend, refusal

MANY = 1 << 14  # elements: enough for more than one thread of the host's

gpu = open_backend()
stop = threading.Event()


def work(n, ready):
    with gpu.buffer(4 * n) as acc, gpu.buffer(2 * n) as out:
        launch = finish(gpu, acc, out, n)
        while not stop.is_set():
            launch.launch()
            with gpu.buffer(64):
                pass
            ready.set()


def child():
    assert "fork()" in refusal(gpu.synchronize)
    if KIND == "cuda":
        return
    with open_backend() as own, own.buffer(4 * MANY) as acc, own.buffer(2 * MANY) as out:
        for n in (64, MANY):
            finish(own, acc, out, n).launch()


threads = []
for n in (64, MANY, MANY):
    ready = threading.Event()
    threads.append(threading.Thread(target=work, args=(n, ready)))
    threads[-1].start()
    ready.wait()
try:
    for _ in range(NUMBER):
        assert in_child(child) == 0
finally:
    stop.set()
    for thread in threads:
        thread.join()
assert gpu.close() == []
