# SPDX-License-Identifier: MIT OR Apache-2.0
"""An exit while daemon threads launch, copy and wait: what they are in is waited for, what they begin is refused."""
# stderr: metrale: .*: never freed: 8 allocations, .*; 5 streams \(.*\); 1 events \(.*\)\n

import threading

from things import SPIN, MetraleError, finish, open_backend, spin

N = 200_000  # floats
STEPS = 5_000_000  # some 10 ms

gpu = open_backend()
gpu.add_module(SPIN)
event = gpu.create_event()
kept = []


def buffer(nbytes):
    kept.append(gpu.buffer(nbytes))
    return kept[-1]


def launches(stream):
    launch = finish(gpu, buffer(4 * N), buffer(2 * N), N)
    return lambda: launch.launch(stream)


def prepared_launches(stream):
    prepared = finish(gpu, buffer(4 * N), buffer(2 * N), N).prepare()
    return lambda: prepared.launch(stream)


def synchronizes(stream):
    launch = spin(gpu, buffer(64), STEPS)
    return lambda: (launch.launch(stream), gpu.synchronize(stream))


def waits_for_an_event(stream):
    launch = spin(gpu, buffer(64), STEPS)
    return lambda: (launch.launch(stream), gpu.record_event(event, stream), gpu.event_synchronize(event))


def reads(stream):
    out, host = buffer(4 * N), bytearray(4 * N)
    launch = spin(gpu, out, STEPS)
    buffer(64)
    return lambda: (launch.launch(stream), gpu.copy_d2h_on_stream(out, host, stream))


def work(make, ready):
    step = make(gpu.create_stream())
    try:
        while True:
            step()
            ready.set()
    except MetraleError:
        pass


started = []
for make in (launches, prepared_launches, synchronizes, waits_for_an_event, reads):
    started.append(threading.Event())
    threading.Thread(target=work, args=(make, started[-1]), daemon=True).start()
for ready in started:
    ready.wait()
