# SPDX-License-Identifier: MIT OR Apache-2.0
"""close() while other threads launch, copy, wait, allocate and free: it waits for their calls, and refuses the next."""
# repeats: inside

import random
import threading
import time
import warnings

from things import NUMBER, MetraleError, everything, finish, nothing_left, open_backend

N = 1 << 16  # floats
LONGEST = 0.004  # seconds until close()

warnings.simplefilter("ignore", ResourceWarning)
chance = random.Random(NUMBER)


def working(gpu, step, ready, said):
    """Do ``step()`` until an error ends it, and put its text down."""
    try:
        while True:
            step()
            ready.set()
    except MetraleError as error:
        said.append(str(error))
        ready.set()


def steps(gpu):
    acc, out, event = gpu.buffer(4 * N), gpu.buffer(2 * N), gpu.create_event()
    launch, host = finish(gpu, acc, out, N), bytearray(4 * N)
    prepared = launch.prepare()

    def events():
        gpu.record_event(event)
        gpu.event_synchronize(event)

    return (launch.launch, prepared.launch, events, gpu.synchronize, lambda: finish(gpu, acc, out, N).launch(),
            lambda: gpu.copy_d2h(acc, host), lambda: gpu.copy_h2d(host, acc), lambda: gpu.buffer(N).free(),
            lambda: gpu.destroy_stream(gpu.create_stream()))  # fmt: skip


for _ in range(NUMBER):
    gpu = open_backend()
    everything(gpu)
    said, threads = [], []
    for step in steps(gpu):
        ready = threading.Event()
        threads.append(threading.Thread(target=working, args=(gpu, step, ready, said)))
        threads[-1].start()
        ready.wait()
    time.sleep(chance.uniform(0, LONGEST))
    gpu.close()
    for thread in threads:
        thread.join()
    assert len(said) == len(threads)
    assert all("closed" in text or "freed" in text for text in said), said
    assert nothing_left(gpu)
