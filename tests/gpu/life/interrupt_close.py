# SPDX-License-Identifier: MIT OR Apache-2.0
"""A KeyboardInterrupt while close() waits for a launch in another thread: a second close() ends what it began."""
# repeats: inside

import signal
import threading
import warnings

from things import NUMBER, nothing_left, open_backend, refusal, spin

STEPS = 20_000_000  # a tenth of a second or so
DELAY = 0.01

signal.signal(signal.SIGALRM, signal.default_int_handler)
warnings.simplefilter("ignore", ResourceWarning)

for _ in range(NUMBER):
    gpu = open_backend()
    buffer = gpu.buffer(64)
    gpu.create_stream()
    launch = spin(gpu, buffer, STEPS)
    launching = threading.Event()

    def work(gpu=gpu, launch=launch, launching=launching):
        launching.set()
        said = refusal(launch.launch)
        assert said is None or said.endswith("closed"), said

    thread = threading.Thread(target=work)
    thread.start()
    launching.wait()
    try:
        signal.setitimer(signal.ITIMER_REAL, DELAY)
        gpu.close()
        signal.pause()
    except KeyboardInterrupt:
        pass
    thread.join()
    gpu.close()
    assert gpu.closed
    assert nothing_left(gpu)
