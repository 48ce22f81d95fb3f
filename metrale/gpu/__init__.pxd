# SPDX-License-Identifier: MIT OR Apache-2.0
# What other Cython code cimports: `from metrale.gpu cimport GpuBackend, KernelHandle, Launch, launch, ...`
# docs/embedding.md says which of it stays as it is.
from metrale.gpu.backend cimport GpuBackend
from metrale.gpu.builder cimport KernelLaunch
from metrale.gpu.buffer cimport DeviceBuffer, PinnedBuffer
from metrale.gpu.driver cimport (
    COPY_D2D, COPY_D2H, COPY_H2D, LAUNCH_CLUSTER, LAUNCH_COOPERATIVE, LAUNCH_OVERLAP_PREVIOUS, CopyKind, Launch,
    LaunchFlag, Rows, copy_launch,
)
from metrale.gpu.interop cimport address_of, as_ptr
from metrale.gpu.kernel cimport KIND_BYTES, MAX_PARAM_BYTES, MAX_PARAMS, KernelHandle, param_code
from metrale.gpu.launch cimport (
    check_fit, launch, launch_cluster, launch_geometry, push_bytes, push_f32, push_f64,
    push_i32, push_i64, push_ptr, push_u32, push_u64,
)
from metrale.gpu.ledger cimport Allocation, Ledger
from metrale.gpu.prepared cimport PreparedLaunch
