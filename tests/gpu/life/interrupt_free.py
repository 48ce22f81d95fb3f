# SPDX-License-Identifier: MIT OR Apache-2.0
"""A KeyboardInterrupt, or a signal handler that frees, while free() waits for a launch: the memory lives until that is
over, and the next free() frees it."""
# repeats: inside

import signal
import threading
import time

import numpy as np
from things import NUMBER, nothing_left, open_backend, spin

STEPS = 50_000_000  # a tenth of a second or more
DELAY = 0.02

for _ in range(NUMBER):
    for interrupts in (True, False):
        gpu = open_backend()
        used, first, second = gpu.upload(np.zeros(1, np.uint32)), gpu.buffer(64), gpu.buffer(64)
        launch = spin(gpu, used, STEPS)
        launching = threading.Event()
        handled = threading.Event()

        def work(launch=launch, launching=launching):
            launching.set()
            launch.launch()

        def free(*_, second=second, handled=handled):
            second.free()
            handled.set()

        signal.signal(signal.SIGALRM, signal.default_int_handler if interrupts else free)
        thread = threading.Thread(target=work)
        thread.start()
        launching.wait()
        time.sleep(DELAY)  # until the kernel runs
        try:
            signal.setitimer(signal.ITIMER_REAL, DELAY)
            first.free()
            while not handled.is_set():
                time.sleep(DELAY)
        except KeyboardInterrupt:
            second.free()
        assert used.numpy("uint32")[0] == 1, "freed while a kernel ran"
        first.free()
        thread.join()
        used.free()
        assert nothing_left(gpu)
        gpu.close()
