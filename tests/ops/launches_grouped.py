# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernels for many rows, of modules kquant_moe, moe_v41 and moe_grouped, as functions of NumPy arrays."""

from typing import NamedTuple

import numpy as np
from launches import BF16, Arrays

from metrale import ops
from metrale.formats.kquant import kquant_mmq_act_bytes

LAYOUTS = {"Q2_K": "d2s6", "Q3_K": "d4"}


def quantise_mmq(gpu, layout, x):
    """uint8 of all blocks, of bf16 `[M, K]`."""
    m, k = x.shape
    with Arrays(gpu) as a:
        y = a.output(kquant_mmq_act_bytes(m, k), np.uint8)
        kernel = gpu.kernel("kquant_moe", f"metrale_q8_1_quantize_{layout}_bf16")
        ops.metrale_q8_1_quantize_bf16(gpu, kernel, a.input(x), y, k, m, None)
        return y.read()


def mmq128(gpu, kind, weight, y, m, form="wc", y_rows=None, out_stride=None, k=None):
    """bf16 `[M, out_stride]` of raw rows `[N, row bytes]` and the stored blocks of y_rows rows."""
    n, blocks = len(weight), weight.shape[1] // kind.block_bytes
    out_stride = n if out_stride is None else out_stride
    kernel = gpu.kernel("kquant_moe", f"metrale_{kind.name.lower()}_mmq128_{form}")
    with Arrays(gpu) as a:
        out = a.updated(np.zeros((m, out_stride), BF16)) if out_stride > n else a.output((m, n), BF16)
        k = 256 * blocks if k is None else k
        y_rows = m if y_rows is None else y_rows
        ops.kquant_mmq128(gpu, kernel, a.input(weight), a.input(y), out, n, m, k, blocks, y_rows, out_stride, None)
        return out.read()


class Schedule(NamedTuple):
    offsets: np.ndarray
    tiles: np.ndarray
    """`[., 3]`: expert, first row, rows"""


def tiles(gpu, hdr, topk, n_routed, tile_rows, first=0, last=None):
    """`Schedule` of headers u32 `[tokens, 1 + 3 * topk]`."""
    tokens, last = len(hdr), n_routed if last is None else last
    most = min(n_routed, tokens * topk) + tokens * topk // tile_rows
    with Arrays(gpu) as a:
        offsets = a.output(n_routed + 1, np.uint32)
        out, count = a.updated(np.zeros((most, 4), np.uint32)), a.output(1, np.uint32)
        ops.moe_grouped_tiles(
            gpu, gpu.kernel("moe_grouped", "moe_grouped_tiles"), a.input(hdr), tokens, topk, n_routed, first, last,
            tile_rows, offsets, out, count, None,
        )  # fmt: skip
        return Schedule(offsets.read(), out.read()[: count.read()[0], :3])


class Rows(NamedTuple):
    token: np.ndarray
    weight: np.ndarray
    of_token: np.ndarray
    ptrs: np.ndarray


def rows(gpu, hdr, topk, offsets, slot_of, arena_base=1 << 20, slot_bytes=4096, places=(0, 1024, 2048)):
    """`Rows` of headers and the offsets of `Schedule`."""
    tokens, n = len(hdr), len(slot_of)
    with Arrays(gpu) as a:
        token = a.updated(np.zeros(tokens * topk, np.uint32))
        weight = a.updated(np.zeros(tokens * topk, np.float32))
        of_token, ptrs = a.output((tokens, topk), np.uint32), a.output((3, n), np.uint64)
        ops.moe_grouped_rows(
            gpu, gpu.kernel("moe_grouped", "moe_grouped_rows"), a.input(hdr), tokens, topk, n, a.input(offsets),
            a.input(slot_of), arena_base, slot_bytes, *places, token, weight, of_token, ptrs, None,
        )  # fmt: skip
        return Rows(token.read(), weight.read(), of_token.read(), ptrs.read())


def combine(gpu, src, token_rows, shared):
    """`(acc, out)`."""
    (tokens, dim), topk = shared.shape, len(src) if token_rows is None else token_rows.shape[1]
    with Arrays(gpu) as a:
        acc, out = a.output(shared.shape, np.float32), a.output(shared.shape, BF16)
        kernel = gpu.kernel("moe_grouped", "moe_grouped_combine")
        listed = None if token_rows is None else a.input(token_rows)
        ops.moe_grouped_combine(
            gpu, kernel, a.input(src), listed, a.input(shared), acc, out, tokens, topk, dim, None
        )  # fmt: skip
        return acc.read(), out.read()


def grouped(gpu, way, kind, weights, y, y_rows, tiles, out_rows, listed=None):
    """bf16 `[projections, out_rows, N]`: weights `[projections, experts, N, row bytes]`, tiles `[., 3]`.

    way: "mmvq", or the most rows of a tile of the int8 tensor cores, 16 or 128.
    """
    projections, experts, n, row_bytes = weights.shape
    k = row_bytes // kind.block_bytes * 256
    padded = np.zeros((len(tiles) + 1, 4), np.uint32)  # one more than there are, that must not be taken
    padded[:-1, :3] = tiles
    family, tile_rows = ("mmvq", "") if way == "mmvq" else ("mmq", way)
    with Arrays(gpu) as a:
        blocks = [a.input(weight) for weight in weights.reshape(-1, n, row_bytes)]
        tables = a.input(np.array([block.data_ptr() for block in blocks], np.uint64))
        out = a.updated(np.zeros((projections, out_rows, n), BF16))
        common = (tables, a.input(y), None if listed is None else a.input(listed), out, a.input(padded))
        count = a.input(np.array([len(tiles)], np.uint32))
        kernel = gpu.kernel("moe_grouped", f"kquant_{family}_{kind.name.lower()}_grouped{tile_rows}")
        if way == "mmvq":
            ops.kquant_mmvq_grouped(
                gpu, kernel, *common, count, k, n, experts, out_rows, len(padded), projections, None
            )  # fmt: skip
        else:
            ops.kquant_mmq_grouped(
                gpu, kernel, *common, count, k, n, experts, out_rows, y_rows, len(padded), projections, None
            )  # fmt: skip
        return out.read()


def gather_rows(gpu, x, rows):
    """bf16 `[n_rows, dim]`."""
    with Arrays(gpu) as a:
        out = a.output((len(rows), x.shape[1]), BF16)
        kernel = gpu.kernel("moe_v41", "moe_v41_gather_rows")
        ops.moe_v41_gather_rows(gpu, kernel, a.input(x), a.input(rows), out, len(rows), x.shape[1], None)
        return out.read()


def scatter_add(gpu, acc, src, rows):
    """f32 `[., dim]`."""
    with Arrays(gpu) as a:
        total = a.updated(acc)
        kernel = gpu.kernel("moe_v41", "moe_v41_scatter_add")
        ops.moe_v41_scatter_add(gpu, kernel, total, a.input(src), a.input(rows), len(rows), src.shape[1], None)
        return total.read()


def route_select_tokens(gpu, logits, bias, topk, slot_of, gate_temp=1.0, route_scale=1.0, norm_topk=True):
    """u32 `[tokens, 1 + 3 * topk]`."""
    tokens, n = logits.shape
    with Arrays(gpu) as a:
        hdr = a.output((tokens, 1 + 3 * topk), np.uint32)
        kernel = gpu.kernel("moe_v41", "moe_v41_route_select_tokens")
        ops.moe_v41_route_select_tokens(
            gpu, kernel, a.input(logits), a.input(bias), n, topk, gate_temp, route_scale, norm_topk, a.input(slot_of),
            hdr, tokens, None,
        )  # fmt: skip
        return hdr.read()
