# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsFloat, SupportsIndex

from metrale.gpu.backend import GpuBackend
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.protocols import PointerLike, StreamLike

def moe_v41_swiglu(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate: PointerLike,
    up: PointerLike,
    w: PointerLike,
    h: PointerLike,
    rows: SupportsIndex,
    inter: SupportsIndex,
    limit: SupportsFloat,
    stream: StreamLike,
) -> None: ...
def moe_v41_accumulate(
    gpu: GpuBackend,
    kernel: KernelHandle,
    acc: PointerLike,
    src: PointerLike,
    n: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_finish(
    gpu: GpuBackend,
    kernel: KernelHandle,
    acc: PointerLike,
    out: PointerLike,
    n: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_sum_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    acc: PointerLike,
    src: PointerLike,
    n_rows: SupportsIndex,
    dim: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_router_gemv_f32out(
    gpu: GpuBackend,
    kernel: KernelHandle,
    A: PointerLike,
    B: PointerLike,
    C: PointerLike,
    M: SupportsIndex,
    N: SupportsIndex,
    K: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_router_gemv_f32out_products(
    gpu: GpuBackend,
    kernel: KernelHandle,
    A: PointerLike,
    B: PointerLike,
    C: PointerLike,
    M: SupportsIndex,
    N: SupportsIndex,
    K: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_route_select(
    gpu: GpuBackend,
    kernel: KernelHandle,
    logits: PointerLike,
    bias: PointerLike,
    n_routed: SupportsIndex,
    topk: SupportsIndex,
    gate_temp: SupportsFloat,
    route_scale: SupportsFloat,
    norm_topk: bool,
    slot_of: PointerLike,
    arena_base: PointerLike,
    slot_bytes: SupportsIndex,
    gate_off: SupportsIndex,
    up_off: SupportsIndex,
    down_off: SupportsIndex,
    hdr: PointerLike,
    plan_w: PointerLike,
    plan_rows: PointerLike,
    ptrs: PointerLike,
    stream: StreamLike,
) -> None: ...
def moe_v41_slot_table_set(
    gpu: GpuBackend,
    kernel: KernelHandle,
    table: PointerLike,
    n_routed: SupportsIndex,
    triples: PointerLike,
    n: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_route_select_tokens(
    gpu: GpuBackend,
    kernel: KernelHandle,
    logits: PointerLike,
    bias: PointerLike,
    n_routed: SupportsIndex,
    topk: SupportsIndex,
    gate_temp: SupportsFloat,
    route_scale: SupportsFloat,
    norm_topk: bool,
    slot_of: PointerLike,
    hdr: PointerLike,
    tokens: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_gather_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    x: PointerLike,
    rows: PointerLike,
    out: PointerLike,
    n_rows: SupportsIndex,
    dim: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def moe_v41_scatter_add(
    gpu: GpuBackend,
    kernel: KernelHandle,
    acc: PointerLike,
    src: PointerLike,
    rows: PointerLike,
    n_rows: SupportsIndex,
    dim: SupportsIndex,
    stream: StreamLike,
) -> None: ...
