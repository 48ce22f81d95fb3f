# SPDX-License-Identifier: MIT OR Apache-2.0
"""A stream, a pointer, a tag or a size whose Python code closes the backend: the call says that it is closed."""
# repeats: inside

import warnings
from functools import partial

from things import NUMBER, everything, open_backend, refusal

warnings.simplefilter("ignore", ResourceWarning)


class Closing:
    """An argument of any kind."""

    def __init__(self, gpu, value):
        self.gpu, self.value = gpu, value

    def __cuda_stream__(self):
        self.gpu.close()
        return 0, self.value

    def __index__(self):
        self.gpu.close()
        return self.value

    def __str__(self):
        self.gpu.close()
        return str(self.value)

    def data_ptr(self):
        return self.__index__()


CALLS = {
    "synchronize": lambda gpu, t, stream, event: gpu.synchronize(Closing(gpu, stream)),
    "record_event": lambda gpu, t, stream, event: gpu.record_event(event, Closing(gpu, stream)),
    "record_event, the event": lambda gpu, t, stream, event: gpu.record_event(Closing(gpu, event)),
    "stream_wait_event": lambda gpu, t, stream, event: gpu.stream_wait_event(Closing(gpu, stream), event),
    "destroy_stream": lambda gpu, t, stream, event: gpu.destroy_stream(Closing(gpu, stream)),
    "destroy_event": lambda gpu, t, stream, event: gpu.destroy_event(Closing(gpu, event)),
    "event_query": lambda gpu, t, stream, event: gpu.event_query(Closing(gpu, event)),
    "event_elapsed_ms": lambda gpu, t, stream, event: gpu.event_elapsed_ms(event, Closing(gpu, event)),
    "alloc": lambda gpu, t, stream, event: gpu.alloc(Closing(gpu, 64)),
    "alloc, the tag": lambda gpu, t, stream, event: gpu.alloc(64, Closing(gpu, "tag")),
    "buffer": lambda gpu, t, stream, event: gpu.buffer(Closing(gpu, 64)),
    "memset": lambda gpu, t, stream, event: gpu.memset(Closing(gpu, 64), 0, 16),
    "copy_d2d": lambda gpu, t, stream, event: gpu.copy_d2d(t["acc"], t["out"], Closing(gpu, 16)),
    "copy_h2d": lambda gpu, t, stream, event: gpu.copy_h2d(bytes(16), Closing(gpu, 64)),
    "copy_d2h": lambda gpu, t, stream, event: gpu.copy_d2h_on_stream(t["acc"], bytearray(16), Closing(gpu, stream)),
    "free": lambda gpu, t, stream, event: gpu.free(Closing(gpu, 64)),
    "launch": lambda gpu, t, stream, event: t["launch"].launch(Closing(gpu, stream)),
    "prepared": lambda gpu, t, stream, event: t["prepared"].launch(Closing(gpu, stream)),
}

for _ in range(NUMBER):
    for name, call in CALLS.items():
        gpu = open_backend()
        things = everything(gpu)
        stream, event = gpu.create_stream(), gpu.create_event(timing=True)
        try:
            said = refusal(partial(call, gpu, things, stream, event))
        except BaseException as error:
            raise AssertionError(name) from error
        assert gpu.closed, name
        assert said is not None, f"{name} went on"
