# SPDX-License-Identifier: MIT OR Apache-2.0
"""close() and the last reference end open captures and destroy graphs, and the device works on in the same thread."""
# repeats: inside

import warnings

from things import NUMBER, N, everything, finish, give_back, nothing_left, open_backend

warnings.simplefilter("ignore", ResourceWarning)


def leave_open(gpu):
    """A live graph, a capture with a stream that has joined it, an empty one, and one on the default stream."""
    things = everything(gpu)
    launch, event = things["launch"], gpu.create_event()
    one, other, third = (gpu.create_stream() for _ in range(3))
    gpu.begin_capture(one)
    launch.launch(one)
    gpu.launch_graph(gpu.end_capture(one))
    gpu.begin_capture(one)
    launch.launch(one)
    gpu.record_event(event, one)
    gpu.stream_wait_event(other, event)
    launch.launch(other)
    gpu.begin_capture(third)
    gpu.begin_capture()
    things["prepared"].launch()
    gpu.memset_async(things["acc"], 0, 4 * N, None)
    return things


def check_that_the_device_works():
    with open_backend() as gpu:
        things = everything(gpu)
        gpu.synchronize()
        things["prepared"].launch()
        things["acc"].numpy("float32")
        give_back(things)


for _ in range(NUMBER):
    gpu = open_backend()
    leave_open(gpu)
    gpu.close()
    assert nothing_left(gpu)
    check_that_the_device_works()

    gpu = open_backend()
    things, ledger = leave_open(gpu), gpu.ledger
    del gpu, things
    assert (len(ledger), ledger.streams, ledger.events, ledger.graphs) == (0, {}, {}, {})
    check_that_the_device_works()

    # An error in a capture, which is then given up.
    with open_backend() as gpu, gpu.buffer(4 * N) as acc, gpu.buffer(2 * N) as out:
        try:
            gpu.begin_capture()
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert gpu.abort_capture_if_active()
        finish(gpu, acc, out).launch()
        gpu.synchronize()
        assert not gpu.stream_is_capturing()
