# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsFloat, SupportsIndex

from metrale.gpu.backend import GpuBackend
from metrale.gpu.kernel import KernelHandle
from metrale.gpu.protocols import PointerLike, StreamLike

def dequant_q2_k_to_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    raw: PointerLike,
    out: PointerLike,
    n_blocks: SupportsIndex,
    row_bytes: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def engram_v41_wkv_q2k_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    A: PointerLike,
    B: PointerLike,
    C: PointerLike,
    N: SupportsIndex,
    K: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def engram_v41_wkv_q2k_gemv_gather(
    gpu: GpuBackend,
    kernel: KernelHandle,
    ids: PointerLike,
    table: PointerLike,
    B: PointerLike,
    C: PointerLike,
    N: SupportsIndex,
    K: SupportsIndex,
    table_rows: SupportsIndex,
    flag: PointerLike,
    stream: StreamLike,
) -> None: ...
def engram_v41_gate(
    gpu: GpuBackend,
    kernel: KernelHandle,
    streams: PointerLike,
    kv: PointerLike,
    qk: PointerLike,
    dim: SupportsIndex,
    hc: SupportsIndex,
    eps: SupportsFloat,
    tokens: SupportsIndex,
    stream: StreamLike,
) -> None: ...
def engram_v41_rows_gather(
    gpu: GpuBackend,
    kernel: KernelHandle,
    ids: PointerLike,
    table: PointerLike,
    out: PointerLike,
    n_rows: SupportsIndex,
    table_rows: SupportsIndex,
    flag: PointerLike,
    stream: StreamLike,
) -> None: ...
def engram_v41_hash(
    gpu: GpuBackend,
    kernel: KernelHandle,
    compressed: PointerLike,
    out: PointerLike,
    tokens: SupportsIndex,
    start: SupportsIndex,
    multipliers: PointerLike,
    primes: PointerLike,
    offsets: PointerLike,
    sites: SupportsIndex,
    ngram: SupportsIndex,
    heads: SupportsIndex,
    pad: SupportsIndex,
    stream: StreamLike,
) -> None: ...
