# SPDX-License-Identifier: MIT OR Apache-2.0
"""close() while another thread launches graphs: none of their work touches memory that has been freed."""
# repeats: inside

import threading
import time
import warnings

from things import NUMBER, finish, nothing_left, open_backend, refusal

LARGE = 48 << 20  # bytes: what malloc gives back to the system at once
STEPS = 200
DELAY = 0.002  # seconds: a graph is running by then
ROUNDS = 20  # of which some are closed between two steps

warnings.simplefilter("ignore", ResourceWarning)

for _ in range(NUMBER):
    for _ in range(ROUNDS):
        gpu = open_backend()
        acc, out = gpu.buffer(LARGE), gpu.buffer(LARGE)
        launch = finish(gpu, acc, out, 8).prepare()
        gpu.begin_capture()
        for _ in range(STEPS):
            launch.launch()
            gpu.memset_async(acc, 0, 16, None)
        graph = gpu.end_capture()
        launching = threading.Event()

        def work(gpu=gpu, graph=graph, launching=launching):
            launching.set()
            while (said := refusal(lambda: gpu.launch_graph(graph))) is None:
                pass
            assert said.endswith("closed"), said

        thread = threading.Thread(target=work)
        thread.start()
        launching.wait()
        time.sleep(DELAY)
        gpu.close()
        thread.join()
        assert nothing_left(gpu)
