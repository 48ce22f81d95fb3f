# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package's kernels as functions of NumPy arrays, through their launchers.

Outputs lie between guard bytes, which the kernel must leave alone, as it must its inputs; they are poisoned
beforehand, and each element must have been written. Inputs end with their allocation, where a sanitizer sees a
read beyond. bf16 arrays are uint16 bits.
"""

import numpy as np

from metrale import KernelLaunch, ops
from metrale.formats.kquant import kquant_q8_1_rows_bytes
from metrale.reference.moe import RouteBuffers

BF16 = np.uint16
GUARD_BYTES = 256
GUARD = 0xFF  # NaN in every float format: a value read from outside shows in the result


class DeviceArray:
    """A copy of a NumPy array, `shift` bytes off a 256-byte boundary, that launchers take as a pointer."""

    def __init__(self, gpu, values, shift=0, poison=None, after=GUARD_BYTES):
        values = np.ascontiguousarray(values)
        self.dtype, self.shape, self.poison = values.dtype, values.shape, poison
        self._inside = slice(GUARD_BYTES + shift, GUARD_BYTES + shift + values.nbytes)
        self._image = np.full(self._inside.stop + after, GUARD, np.uint8)
        self._image[self._inside] = values.reshape(-1).view(np.uint8)
        self.buffer = gpu.upload(self._image)

    def data_ptr(self):
        return self.buffer.ptr.offset(self._inside.start)

    def read(self):
        image = self.buffer.numpy()
        outside = np.delete(image, self._inside)
        assert (outside == GUARD).all(), "the kernel wrote outside the array"
        values = image[self._inside].copy().view(self.dtype).reshape(self.shape)
        if self.poison is not None and values.itemsize > 1:
            unwritten = values.view(f"u{values.itemsize}") == self.poison
            assert not unwritten.any(), f"{unwritten.sum()} of {values.size} elements were not written"
        return values

    def unchanged(self):
        return (self.buffer.numpy() == self._image).all()


class Arrays:
    """The arrays of one launch, freed together. When the block ends inputs must be as they were."""

    def __init__(self, gpu):
        self.gpu = gpu
        self._all, self._inputs = [], []

    def input(self, values, shift=0):
        """What the kernel reads; None is a null pointer."""
        if values is None:
            return None
        array = DeviceArray(self.gpu, values, shift, after=0)
        self._all.append(array)
        self._inputs.append(array)
        return array

    def updated(self, values, shift=0):
        """What the kernel reads and writes."""
        self._all.append(DeviceArray(self.gpu, values, shift))
        return self._all[-1]

    def output(self, shape, dtype, shift=0):
        """What the kernel writes. The poison is a NaN for floats that no arithmetic gives."""
        byte = 0xFF if dtype in (BF16, np.float16, np.float32) else 0xA5
        itemsize = np.dtype(dtype).itemsize
        poison = int.from_bytes(bytes([byte]) * itemsize, "little")
        values = np.full(shape, poison, f"u{itemsize}").view(dtype)
        self._all.append(DeviceArray(self.gpu, values, shift, poison))
        return self._all[-1]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                assert all(array.unchanged() for array in self._inputs), "the kernel wrote to an input"
        finally:
            for array in self._all:
                array.buffer.free()


# gemv, causal_conv1d


def dense_gemv(gpu, x, weight, shift=0):
    """bf16 `[N]` of bf16 `[K]` and `[N, K]`."""
    n, k = weight.shape
    with Arrays(gpu) as a:
        out = a.output(n, BF16, shift)
        kernel = gpu.kernel("gemv", "dense_gemv_bf16")
        ops.dense_gemv(gpu, kernel, a.input(x, shift), a.input(weight, shift), out, n, k, None)
        return out.read()


def conv1d_update_chunk2(gpu, state, x, weight, bias=None):
    """`(out, state_mid, state)`."""
    batch, dim, width = state.shape
    with Arrays(gpu) as a:
        s, mid = a.updated(state), a.output(state.shape, np.float32)
        out = a.output((batch, 2, dim), BF16)
        kernel = gpu.kernel("causal_conv1d", "causal_conv1d_update_chunk2")
        ops.conv1d_update_chunk2(
            gpu, kernel, s, a.input(x), a.input(weight), out, mid, dim, width, batch, None, a.input(bias)
        )
        return out.read(), mid.read(), s.read()


# kquant_moe, kquant_probe


def quantise(gpu, x):
    """uint8 `[M, K/32 * 36]` of bf16 `[M, K]`."""
    m, k = x.shape
    with Arrays(gpu) as a:
        y = a.output((m, kquant_q8_1_rows_bytes(1, k)), np.uint8)
        ops.kquant_q8_1_rows_bf16(gpu, gpu.kernel("kquant_moe", "kquant_q8_1_rows_bf16"), a.input(x), y, k, m, None)
        return y.read()


def swiglu_quantise(gpu, gate, up, w, limit):
    """`(h, y)`."""
    rows, inter = gate.shape
    with Arrays(gpu) as a:
        h, y = a.output(gate.shape, BF16), a.output((rows, kquant_q8_1_rows_bytes(1, inter)), np.uint8)
        kernel = gpu.kernel("kquant_moe", "kquant_swiglu_q8_1_rows_bf16")
        ops.kquant_swiglu_q8_1_rows_bf16(
            gpu, kernel, a.input(gate), a.input(up), a.input(w), h, y, rows, inter, limit, None
        )
        return h.read(), y.read()


def mmvq(gpu, kind, weight, y, shift=0):
    """bf16 `[M, N]` of raw rows `[N, row bytes]` and q8_1 rows `[M, ...]`."""
    n, m, k = len(weight), len(y), weight.shape[1] // kind.block_bytes * 256
    kernel = gpu.kernel("kquant_moe", f"kquant_mmvq_{kind.name.lower()}_w")
    with Arrays(gpu) as a:
        out = a.output((m, n), BF16)
        ops.kquant_mmvq_w(gpu, kernel, a.input(weight, shift), a.input(y), out, k, n, m, None)
        return out.read()


def mmvq_f32(gpu, kind, weight, y):
    """`mmvq` before its rounding, f32."""
    n, m, k = len(weight), len(y), weight.shape[1] // kind.block_bytes * 256
    kernel = gpu.kernel("kquant_probe", f"kquant_probe_mmvq_{kind.name.lower()}_f32")
    with Arrays(gpu) as a:
        out = a.output((m, n), np.float32)
        launch = KernelLaunch(gpu, kernel).grid(-(-n // 4)).block(128)
        launch.arg_ptr(a.input(weight)).arg_ptr(a.input(y)).arg_ptr(out).arg_u32(k).arg_u32(n).arg_u32(m).launch()
        return out.read()


def mmvq_experts(gpu, kind, weights, y, warps, y_stride=0, experts=None):
    """bf16 `[experts, M, N]`: expert e multiplies `weights[experts[e]]` with `y`, or with its own `y[e]`.

    y: q8_1 rows `[M, ...]` for a `y_stride` of 0, else `[experts, M, ...]`, laid out `y_stride` bytes apart.
    """
    experts = range(len(weights)) if experts is None else experts
    n, m, k = weights.shape[1], y.shape[-2], weights.shape[2] // kind.block_bytes * 256
    suffix = {2: "2", 4: "", 8: "8"}[warps]
    kernel = gpu.kernel("kquant_moe", f"kquant_mmvq_{kind.name.lower()}_experts_w{suffix}")
    if y_stride:
        spaced = np.full((len(y), y_stride), GUARD, np.uint8)
        spaced[:, : y[0].size] = y.reshape(len(y), -1)
        y = spaced
    with Arrays(gpu) as a:
        blocks = [a.input(weight) for weight in weights]
        tables = a.input(np.array([blocks[e].data_ptr() for e in experts], np.uint64))
        out = a.output((len(experts), m, n), BF16)
        ops.kquant_mmvq_experts_w(gpu, kernel, tables, a.input(y), out, k, n, m, y_stride, len(experts), warps, None)
        return out.read()


def decode(gpu, kind, raw):
    """f32 `[n, 256]` of blocks uint8 `[n, block bytes]`."""
    with Arrays(gpu) as a:
        out = a.output((len(raw), 256), np.float32)
        kernel = gpu.kernel("kquant_probe", f"kquant_probe_decode_{kind.name.lower()}")
        launch = KernelLaunch(gpu, kernel).grid(-(-len(raw) // 16)).block(256)
        launch.arg_ptr(a.input(raw)).arg_ptr(out).arg_u32(len(raw)).launch()
        return out.read()


# moe_v41


def swiglu(gpu, gate, up, w, limit, shift=0):
    """bf16 `[rows, inter]`."""
    rows, inter = gate.shape
    with Arrays(gpu) as a:
        h = a.output(gate.shape, BF16, shift)
        kernel = gpu.kernel("moe_v41", "moe_v41_swiglu")
        gate, up = a.input(gate, shift), a.input(up, shift)
        ops.moe_v41_swiglu(gpu, kernel, gate, up, a.input(w), h, rows, inter, limit, None)
        return h.read()


def accumulate(gpu, acc, src, shift=0):
    """f32 `[n]`."""
    with Arrays(gpu) as a:
        total = a.updated(acc, 2 * shift)
        kernel = gpu.kernel("moe_v41", "moe_v41_accumulate")
        ops.moe_v41_accumulate(gpu, kernel, total, a.input(src, shift), acc.size, None)
        return total.read()


def sum_rows(gpu, acc, src, shift=0):
    """f32 `[dim]`."""
    with Arrays(gpu) as a:
        total = a.updated(acc, 2 * shift)
        kernel = gpu.kernel("moe_v41", "moe_v41_sum_rows")
        ops.moe_v41_sum_rows(gpu, kernel, total, a.input(src, shift), *src.shape, None)
        return total.read()


def finish(gpu, acc, shift=0):
    """bf16 `[n]`."""
    with Arrays(gpu) as a:
        out = a.output(acc.size, BF16, shift)
        kernel = gpu.kernel("moe_v41", "moe_v41_finish")
        ops.moe_v41_finish(gpu, kernel, a.input(acc, 2 * shift), out, acc.size, None)
        return out.read()


ROUTERS = {
    "moe_v41_router_gemv_f32out": ops.moe_v41_router_gemv_f32out,
    "moe_v41_router_gemv_f32out_products": ops.moe_v41_router_gemv_f32out_products,
}


def router(gpu, form, x, weight, shift=0):
    """f32 `[M, N]` of bf16 `[M, K]` and `[N, K]`."""
    (m, k), n = x.shape, len(weight)
    with Arrays(gpu) as a:
        out = a.output((m, n), np.float32)
        kernel = gpu.kernel("moe_v41", form)
        ROUTERS[form](gpu, kernel, a.input(x, shift), a.input(weight, shift), out, m, n, k, None)
        return out.read()


def route_scores(gpu, logits, gate_temp=1.0):
    """f32 `[n]`."""
    with Arrays(gpu) as a:
        out = a.output(logits.size, np.float32)
        launch = KernelLaunch(gpu, gpu.kernel("kquant_probe", "route_probe_scores")).block(256)
        launch.grid(-(-logits.size // 256)).arg_ptr(a.input(logits)).arg_ptr(out)
        launch.arg_u32(logits.size).arg_f32(gate_temp).launch()
        return out.read()


def route_select(
    gpu,
    logits,
    bias,
    topk,
    *,
    gate_temp=1.0,
    route_scale=1.0,
    norm_topk=True,
    slot_of=None,
    arena_base=1 << 20,
    slot_bytes=4096,
    offsets=(0, 1024, 2048),
):
    """`RouteBuffers`; slot_of defaults to every expert in the slot of its id."""
    n = logits.size
    slot_of = np.arange(n, dtype=np.int32) if slot_of is None else slot_of
    with Arrays(gpu) as a:
        hdr, plan_w = a.output(1 + 3 * topk, np.uint32), a.output(topk, np.float32)
        plan_rows, ptrs = a.output(topk, np.uint32), a.output((3, topk), np.uint64)
        ops.moe_v41_route_select(
            gpu, gpu.kernel("moe_v41", "moe_v41_route_select"), a.input(logits), a.input(bias), n, topk,
            gate_temp, route_scale, norm_topk, a.input(slot_of), arena_base, slot_bytes, *offsets,
            hdr, plan_w, plan_rows, ptrs, None,
        )  # fmt: skip
        return RouteBuffers(hdr.read(), plan_w.read(), plan_rows.read(), ptrs.read())


def slot_table_set(gpu, table, triples):
    """i32 `[layers, n_routed]`."""
    with Arrays(gpu) as a:
        t = a.updated(table)
        kernel = gpu.kernel("moe_v41", "moe_v41_slot_table_set")
        ops.moe_v41_slot_table_set(gpu, kernel, t, table.shape[1], a.input(triples), len(triples), None)
        return t.read()
