# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every public method of everything, on a closed backend: an error that says so, or harmless."""
# repeats: inside

import warnings

from things import NUMBER, everything, nothing_left, open_backend, refusal, uses, values_for

# What tells what is known without a device, gives back what close() has given back, or only fills a builder.
HARMLESS = {
    "gpu": {"__repr__", "close", "has_module", "alloc_report", "snapshot", "live_bytes", "live_alloc_count",
            "peak_bytes", "usable", "ledger", "kind", "name", "closed", "sm_count", "compute_capability", "order",
            "seed", "strict", "workers", "ordinal", "driver_version", "arch", "overhead"},
    "acc": {"__repr__", "free", "nbytes", "gpu"},
    "own": {"__repr__", "free", "__enter__"},
    "launch": {"__repr__", "grid", "block", "shared_mem", "arg_ptr", "arg_u32", "arg_i32", "arg_u64", "arg_i64",
               "arg_f32", "arg_f64", "arg_bytes", "prepare", "cluster", "cooperative", "overlap_previous"},
    "prepared": {"__repr__", "set"},
    "kernel": {"__repr__", "params", "module", "name", "address", "max_shared"},
}  # fmt: skip

for _ in range(NUMBER):
    things = everything(open_backend())
    gpu = things["gpu"]
    values = values_for(gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gpu.close()
    for what, harmless in HARMLESS.items():
        for name, use in uses(things[what], values):
            try:
                said = refusal(use)
            except AttributeError:
                assert name == "__cuda_array_interface__", (what, name)
                continue
            assert said is not None or name in harmless, f"{what}.{name} neither raises nor is said to be harmless"
            assert said is None or name in harmless or "closed" in said or "freed" in said, (what, name, said)
    assert nothing_left(gpu)
