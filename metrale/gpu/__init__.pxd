# SPDX-License-Identifier: MIT OR Apache-2.0
# What other Cython code cimports: `from metrale.gpu cimport GpuBackend, KernelHandle, Launch, launch, ...`
from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.buffer cimport DeviceBuffer, PinnedBuffer
from metrale.gpu.driver cimport Launch
from metrale.gpu.interop cimport as_ptr
from metrale.gpu.kernel cimport KernelHandle
from metrale.gpu.launch cimport (
    KernelLaunch, PreparedLaunch, launch, launch_geometry, push_bytes, push_f32, push_f64, push_i32, push_i64,
    push_ptr, push_u32, push_u64,
)
from metrale.gpu.ledger cimport Allocation, Ledger
