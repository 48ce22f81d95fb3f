# SPDX-License-Identifier: MIT OR Apache-2.0
"""metrale: CUDA kernels launched for the price of the driver call, with every byte of GPU memory on a ledger.

``metrale.open()`` gives the device; ``KernelLaunch`` launches; ``metrale.ops`` has a launcher for each kernel of
the package and ``metrale.moe_v41`` the model part on top of them.
"""

from metrale import errors
from metrale.gpu import DeviceBuffer, DevicePtr, GpuBackend, Graph, KernelHandle, KernelLaunch, open

__all__ = ["DeviceBuffer", "DevicePtr", "GpuBackend", "Graph", "KernelHandle", "KernelLaunch", "errors", "open"]
__version__ = "0.1.0"
