# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every way in which the package takes memory, streams, events and graphs, by name: what makes a thing on a backend,
and what gives it back."""

from pathlib import Path

import numpy as np

from metrale import KernelLaunch
from metrale.engram_v41 import EngramV41, EngramV41LayerWeights
from metrale.engram_v41.weights import upload_qk
from metrale.formats.kquant import BF16, Q2_K
from metrale.formats.load import load_engram_layer, load_moe_layer, upload_engram_layer, upload_moe_layer
from metrale.formats.synthetic import random_engram_layer, random_moe_layer
from metrale.gdn import GdnVerifyPool
from metrale.gpu import Graph
from metrale.gpu.buffer import OwnedHandle
from metrale.gpu.owner import Owner
from metrale.moe_v41 import (
    ArrayExperts,
    ExpertArena,
    MoeV41,
    MoeV41Cfg,
    MoeV41LayerWeights,
    ResidentMat,
    RouterWeights,
    SlotLayout,
)

TINY = Path(__file__).parents[1] / "data" / "tiny-v41.gguf"
CFG = MoeV41Cfg(dim=512, inter=256, n_routed=8, topk=3)
SPEC = random_moe_layer(0, dim=256, inter=256, n_routed=2, topk=1)
EXPERTS = ArrayExperts({0: [np.zeros((3, nbytes), np.uint8) for nbytes in (21504, 21504, 28160)]})
ENGRAM = random_engram_layer(0, dim=32, hc=1, heads=1, max_ngram=2, table_rows=3)
N = 16  # floats of a launch

CONSTRUCTORS = {}
"""name -> (make, give_back): ``make(gpu)`` returns a thing, and ``give_back(gpu, thing)`` frees all that it holds"""


class Several:
    """What is freed together, the last first; where one step fails, the next call begins with it. A ``with`` block
    that raises frees all."""

    def __init__(self):
        self.parts = []

    def add(self, part):
        self.parts.append(part)
        return part

    def free(self):
        while self.parts:
            self.parts[-1].free()
            self.parts.pop()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        while kind is not None and self.parts:
            part = self.parts.pop()
            part.__exit__(kind, *error) if hasattr(part, "__exit__") else part.free()


def free(gpu, thing):
    thing.free()


def nothing(gpu, thing):
    pass


def constructor(give_back=free):
    def add(make):
        CONSTRUCTORS[make.__name__] = (make, give_back)
        return make

    return add


@constructor(lambda gpu, ptr: gpu.free(ptr))
def alloc(gpu):
    return gpu.alloc(64, "alloc")


@constructor(lambda gpu, ptr: gpu.free(ptr))
def alloc_managed(gpu):
    return gpu.alloc_managed(64, "managed")


@constructor(lambda gpu, ptr: gpu.free_host_pinned(ptr))
def alloc_host_pinned(gpu):
    return gpu.alloc_host_pinned(64, "pinned")


@constructor()
def buffer(gpu):
    return gpu.buffer(64, "buffer")


@constructor()
def pinned_buffer(gpu):
    return gpu.pinned_buffer(64, "pinned")


@constructor()
def upload(gpu):
    return gpu.upload(bytes(64), "upload")


@constructor()
def upload_of_pinned_memory(gpu):
    with gpu.pinned_buffer(64) as pinned:
        return gpu.upload(pinned, "upload")


@constructor(lambda gpu, stream: gpu.destroy_stream(stream))
def create_stream(gpu):
    return gpu.create_stream()


@constructor(lambda gpu, event: gpu.destroy_event(event))
def create_event(gpu):
    return gpu.create_event(timing=True)


@constructor()
def owned_handle(gpu):
    return OwnedHandle(gpu, gpu.create_event, gpu.destroy_event)


@constructor()
def owner(gpu):
    with Owner(gpu, "Thing") as own:
        own.alloc("first", 64)
        own.stream()
        own.event()
        own.alloc("second", 64)
    return own


@constructor(nothing)
def kernel(gpu):
    return gpu.kernel("moe_v41", "moe_v41_finish")


def finish(gpu, acc, out):
    return KernelLaunch(gpu, kernel(gpu)).grid(1).block(256).arg_ptr(acc).arg_ptr(out).arg_u32(N)


@constructor()
def prepared_launch(gpu):
    with Several() as made:
        acc, out = made.add(gpu.buffer(4 * N)), made.add(gpu.buffer(2 * N))
        prepared = finish(gpu, acc, out).prepare()
        prepared.set("acc", acc)
        prepared.launch()
    return made


@constructor()
def dlpack_capsule(gpu):
    made = gpu.buffer(64)
    made.__dlpack__()
    return made


@constructor(lambda gpu, stream: gpu.abort_capture_if_active(stream))
def begin_capture(gpu):
    gpu.begin_capture()


@constructor(lambda gpu, graph: gpu.destroy_graph(graph))
def end_capture(gpu):
    gpu.begin_capture()
    try:
        return gpu.end_capture()
    except BaseException:
        gpu.abort_capture_if_active()
        raise


@constructor()
def graph(gpu):
    """Of a launch, a copy and work on a second stream, with an argument changed and launched."""
    with Several() as made:
        acc, out = made.add(gpu.buffer(4 * N)), made.add(gpu.buffer(2 * N))
        pinned = made.add(gpu.pinned_buffer(4 * N))
        own = made.add(Owner(gpu, "Graph"))
        side, fork, join = own.stream(), own.event(), own.event()
        prepared = finish(gpu, acc, out).prepare()
        with made.add(Graph(gpu)) as captured:
            gpu.copy_h2d_async(pinned, acc, None)
            gpu.record_event(fork)
            gpu.stream_wait_event(side, fork)
            gpu.memset_async(out, 0, 2 * N, side)
            gpu.record_event(join, side)
            gpu.stream_wait_event(None, join)
            prepared.launch()
        prepared.update(captured.handle)
        captured.launch()
        gpu.synchronize()
    return made


@constructor()
def expert_arena(gpu):
    return ExpertArena(gpu, SlotLayout(256, 256), 2)


@constructor()
def expert_arena_with_a_source(gpu):
    """Two slots for three experts, of which each has been fetched, one after a prefetch."""
    with Several() as made:
        arena = made.add(ExpertArena(gpu, SlotLayout(256, 256), 2, EXPERTS, readers=2, staging=2))
        arena.fetch([(0, 0), (0, 1)])
        arena.release()
        arena.take_changes()
        arena.prefetch([(0, 2)])
        arena.fetch([(0, 2), (0, 0)])
        arena.release()
        arena.take_changes()
    return made


@constructor()
def layer_weights(gpu):
    """From NumPy arrays."""
    dim, inter = 256, 512
    bits = np.zeros((inter, dim), np.uint16)
    with Owner(gpu, "Weights") as own:
        return MoeV41LayerWeights(
            router=RouterWeights.upload(own, np.zeros((4, dim), np.uint16), np.zeros(4, np.float32), dim),
            shared_gate=ResidentMat.upload(own, "gate", BF16, (inter, dim), bits),
            shared_up=ResidentMat.upload(own, "up", Q2_K, (inter, dim), bytes(inter * Q2_K.row_bytes(dim))),
            shared_down=ResidentMat.upload(own, "down", BF16, (dim, inter), bits.T.copy()),
            own=own,
        )


@constructor()
def layer_in_memory(gpu):
    return upload_moe_layer(gpu, SPEC)


@constructor()
def layer_of_a_file(gpu):
    return load_moe_layer(gpu, TINY, 0)


@constructor()
def moe(gpu):
    return MoeV41(gpu, CFG)


@constructor()
def moe_with_a_layer(gpu):
    with Several() as made:
        loaded = made.add(upload_moe_layer(gpu, SPEC))
        moe = made.add(MoeV41(gpu, loaded.cfg))
        moe.add_layer(0, loaded.weights, loaded.experts)
    return made


@constructor()
def engram_weights(gpu):
    """From NumPy arrays."""
    with Owner(gpu, "Weights") as own:
        qk = upload_qk(own, np.ones((1, 32)), np.ones((1, 32)))
        wkv = ResidentMat.upload(own, "wkv", BF16, (64, 256), np.zeros((64, 256), np.uint16))
        return EngramV41LayerWeights(0, qk, wkv, None, None, own)


@constructor()
def engram_layer_in_memory(gpu):
    return upload_engram_layer(gpu, ENGRAM)


@constructor()
def engram_layer_of_a_file(gpu):
    return load_engram_layer(gpu, TINY, 1, resident=False)


@constructor()
def engram(gpu):
    made = EngramV41(gpu, 32, 1, 256, 1, 1e-6, 2)
    try:
        made.upload_qk(np.ones((1, 32)), np.ones((1, 32)))
    except BaseException:
        made.free()
        raise
    return made


@constructor()
def engram_with_a_layer(gpu):
    with Several() as made:
        loaded = made.add(upload_engram_layer(gpu, ENGRAM))
        engram = made.add(EngramV41(gpu, **loaded.shape, max_tokens=2))
        engram.add_layer(loaded.weights)
    return made


@constructor()
def verify_pool_of_snapshots(gpu):
    return verify_pool(gpu, "snapshot")


@constructor()
def verify_pool_deferred(gpu):
    return verify_pool(gpu, "deferred")


def verify_pool(gpu, mode):
    """With a step, and one token of its two accepted."""
    with Several() as made:
        arrays = made.add(gpu.upload(bytes(4096), "arrays"))
        pool = made.add(GdnVerifyPool(gpu, 1, 2, 2, 1, 1, 4, 4, mode=mode))
        pool.conv(0, [1], arrays, arrays, None, arrays)
        pool.verify(0, [1], arrays, arrays, arrays, arrays, arrays, arrays)
        pool.accept([1], [1])
        pool.reset(1)
        gpu.synchronize()
    return made
