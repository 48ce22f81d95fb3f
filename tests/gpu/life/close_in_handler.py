# SPDX-License-Identifier: MIT OR Apache-2.0
"""A signal handler that closes the backend while synchronize() waits: it does not wait for that call, which says that
the backend is closed. On the host there is nothing to wait for, and the handler comes after it."""
# repeats: inside

import signal
import time
import warnings

from things import KIND, NUMBER, nothing_left, open_backend, refusal, spin

STEPS = 200_000_000  # longer than it takes until a wait looks for signals
DELAY = 0.01

warnings.simplefilter("ignore", ResourceWarning)

for _ in range(NUMBER):
    gpu = open_backend()
    out = gpu.buffer(64)
    launch = spin(gpu, out, STEPS if KIND == "cuda" else 1)
    signal.signal(signal.SIGALRM, lambda *_, gpu=gpu: gpu.close())
    launch.launch()
    signal.setitimer(signal.ITIMER_REAL, DELAY)
    said = refusal(gpu.synchronize)
    while not gpu.closed:
        time.sleep(DELAY)
    assert said is None or said.endswith("closed"), said
    assert nothing_left(gpu)
