# SPDX-License-Identifier: MIT OR Apache-2.0
"""Objects whose constructor has not run, through every public method: an error, or nothing, and never a crash."""
# repeats: inside

from contextlib import suppress

from things import NUMBER, MetraleError, backend_class, everything, give_back, open_backend, uses, values_for

from metrale import KernelLaunch
from metrale.gpu import Allocation, DeviceBuffer, KernelHandle, Ledger

REFUSALS = (MetraleError, AttributeError, TypeError, NotImplementedError)


def use_all(thing, values):
    for _, use in uses(thing, values):
        with suppress(*REFUSALS):
            use()


with open_backend() as gpu:
    things, values = everything(gpu), values_for(gpu)
    for _ in range(NUMBER):
        for kind in (backend_class(), DeviceBuffer, KernelHandle, Allocation, Ledger):
            use_all(kind.__new__(kind), values)
        use_all(KernelLaunch(gpu, KernelHandle.__new__(KernelHandle)), values)
    gpu.destroy_stream(values["stream"])
    gpu.destroy_event(values["event"])
    gpu.free(values["ptr"])
    give_back(things)
