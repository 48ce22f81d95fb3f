# SPDX-License-Identifier: MIT OR Apache-2.0
"""Threads that allocate, launch, copy and free on one backend: each gets its own results, and nothing is left."""
# repeats: inside

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from things import NUMBER, N, finish, open_backend

THREADS = 8
ROUNDS = 5


def work(seed):
    stream = gpu.create_stream()
    for step in range(ROUNDS):
        x = np.full(N, seed + step / ROUNDS, np.float32)
        got = np.empty(N, np.uint16)
        with gpu.upload(x, f"acc {seed}") as acc, gpu.buffer(2 * N) as out, gpu.buffer(2 * N) as copy:
            launch = finish(gpu, acc, out)
            launch.launch(stream)
            gpu.copy_d2d_async(out, copy, 2 * N, stream)
            launch.prepare().set("out", out).launch(stream)
            gpu.copy_d2h_on_stream(copy, got, stream)
        np.testing.assert_allclose((got.astype(np.uint32) << 16).view(np.float32), x, rtol=2**-8)
    gpu.destroy_stream(stream)


gpu = open_backend()
with ThreadPoolExecutor(THREADS) as pool:
    for _ in range(NUMBER):
        list(pool.map(work, range(THREADS)))
assert gpu.close() == []
assert (gpu.ledger.streams, gpu.ledger.events) == ({}, {})
