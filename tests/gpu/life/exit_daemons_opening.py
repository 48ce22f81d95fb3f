# SPDX-License-Identifier: MIT OR Apache-2.0
"""An exit while daemon threads open and close backends."""

import threading

from things import open_backend


def work(opened):
    while True:
        with open_backend():
            pass
        opened.set()


started = [threading.Event() for _ in range(3)]
for opened in started:
    threading.Thread(target=work, args=(opened,), daemon=True).start()
for opened in started:
    opened.wait()
