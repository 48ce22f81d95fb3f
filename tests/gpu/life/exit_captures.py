# SPDX-License-Identifier: MIT OR Apache-2.0
"""A live graph and open captures at the end, one of them of a thread that is gone: one line says what is left."""
# stderr: metrale: .*: never freed: 2 allocations, .*; 2 streams \(.*\); 1 graphs \(.*\)\n

import threading

from things import N, finish, open_backend

gpu = open_backend()
acc, out = gpu.buffer(4 * N), gpu.buffer(2 * N)
launch = finish(gpu, acc, out)
streams = [gpu.create_stream() for _ in range(2)]
launch.launch()
gpu.synchronize()


def begin(stream):
    gpu.begin_capture(stream)
    launch.launch(stream)


begin(streams[0])
graph = gpu.end_capture(streams[0])
gpu.launch_graph(graph)
thread = threading.Thread(target=begin, args=(streams[1],))
thread.start()
thread.join()
begin(streams[0])
begin(None)
