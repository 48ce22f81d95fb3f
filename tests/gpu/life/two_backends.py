# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two backends on one device, used in turns and closed in both orders: each keeps its kernels and
memory, and works on while the other closes."""
# repeats: inside

import threading
import time
from functools import partial

import numpy as np
from things import FINISH, NUMBER, KernelLaunch, N, everything, finish, give_back, open_backend, refusal

ONE = 0x3F80  # 1.0 in bf16


def work(gpu, stop, results):
    """Allocate, launch, copy and free until told to stop, and put down whether the results were right."""
    while not stop.is_set():
        with gpu.upload(np.ones(N, np.float32)) as acc, gpu.buffer(2 * N) as out:
            finish(gpu, acc, out).launch()
            results.append((out.numpy(np.uint16) == ONE).all())


for _ in range(NUMBER):
    for first_closes_first in (True, False):
        pair = [open_backend(), open_backend()]
        kept = [everything(gpu) for gpu in pair]
        for _ in range(3):
            for gpu, things in zip(pair, kept, strict=True):
                things["launch"].launch()
                things["prepared"].launch()
                gpu.synchronize()
        one, other = pair
        ours, theirs = kept

        # A kernel fits its own backend only; memory is freed by its own only.
        foreign = KernelLaunch(other, ours["kernel"]).arg_ptr(0).arg_ptr(0).arg_u32(0)
        assert "belongs to another backend" in refusal(foreign.launch)
        assert "belongs to another backend" in refusal(foreign.prepare)
        address = one.alloc(64)
        assert "allowed: the base of a live device allocation of this backend" in refusal(partial(other.free, address))
        one.free(address)

        # One device, one memory: a launch of the one may read a buffer of the other.
        launch = finish(other, ours["acc"], theirs["out"])
        one.synchronize()
        launch.launch()
        other.synchronize()

        if not first_closes_first:
            pair, kept = pair[::-1], kept[::-1]
        give_back(kept[0])
        results, stop = [], threading.Event()
        thread = threading.Thread(target=work, args=(pair[1], stop, results))
        thread.start()
        while not results:
            time.sleep(1e-4)
        assert pair[0].close() == []
        seen = len(results)
        while len(results) == seen:
            time.sleep(1e-4)
        stop.set()
        thread.join()
        assert all(results)
        kept[1]["launch"].launch()
        assert pair[1].kernel(*FINISH) is kept[1]["kernel"]
        give_back(kept[1])
        assert pair[1].close() == []
