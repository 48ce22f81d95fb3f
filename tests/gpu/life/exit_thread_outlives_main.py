# SPDX-License-Identifier: MIT OR Apache-2.0
"""A thread that works on after the main thread's end finds the backend open, and leaves nothing."""

import threading

from things import everything, give_back, open_backend

things = everything(open_backend())


def work():
    threading.main_thread().join()
    for _ in range(100):
        things["launch"].launch()
        things["prepared"].launch()
    things["gpu"].synchronize()
    give_back(things)


threading.Thread(target=work).start()
