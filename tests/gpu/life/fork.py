# SPDX-License-Identifier: MIT OR Apache-2.0
"""A forked child: every public method says so or is harmless, its end takes nothing from the parent, who goes on."""

# repeats: inside

import gc

import numpy as np
from things import NUMBER, everything, give_back, in_child, open_backend, refusal, uses, values_for

KNOWN_WITHOUT_A_DEVICE = {
    "__repr__", "close", "has_module", "alloc_report", "snapshot", "live_bytes", "live_alloc_count", "peak_bytes",
    "usable", "ledger", "kind", "name", "closed", "sm_count", "compute_capability", "order", "seed", "strict",
    "workers", "ordinal", "driver_version", "arch", "overhead",
}  # fmt: skip

gpu = open_backend()
content = np.arange(64, dtype=np.float32)
kept, dropped = gpu.upload(content, "kept"), gpu.upload(content, "dropped")
things = everything(gpu)
values = values_for(gpu)


def child():
    global dropped, things
    for name, use in uses(gpu, values):
        if name not in KNOWN_WITHOUT_A_DEVICE:
            said = refusal(use)
            assert said is not None and "fork()" in said, (name, said)
    assert not gpu.usable
    assert "fork()" in refusal(things["launch"].launch)
    assert "fork()" in refusal(things["prepared"].launch)
    kept.free()
    things["own"].free()
    del dropped
    things = None
    gc.collect()
    assert gpu.close() == []
    assert gpu.closed


def child_that_only_exits():
    pass


for _ in range(NUMBER):
    assert in_child(child) == 0
    assert in_child(child_that_only_exits) == 0
    things["launch"].launch()
    things["prepared"].launch()
    gpu.synchronize()
assert (kept.numpy(np.float32) == content).all()
assert (dropped.numpy(np.float32) == content).all()
assert gpu.live_alloc_count == 6
give_back(things)
kept.free()
dropped.free()
gpu.free(values["ptr"])
gpu.destroy_stream(values["stream"])
gpu.destroy_event(values["event"])
assert gpu.close() == []
