# SPDX-License-Identifier: MIT OR Apache-2.0
"""Clusters, cooperative launches and overlapping kernels: what a kernel sees of them, and which are refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from metrale import KernelLaunch
from metrale.errors import ArgumentError, CudaError, LaunchError

ATTRIBUTES = Path(__file__).with_name("attributes.cu")
THREADS = 1024
LONG_NS = 1_000_000_000  # more than the start of a kernel ever takes
SHORT_NS = 20_000_000  # the same, where the kernel is not expected to start
LATE_NS = 50_000


def launch_of(gpu, name):
    """A builder for a kernel of attributes.cu."""
    if not gpu.has_module("attributes"):
        gpu.add_module(ATTRIBUTES)
    return KernelLaunch(gpu, gpu.kernel("attributes", name))


@pytest.fixture
def hopper(cuda):
    """The CUDA device, of compute capability 9.0 or more."""
    if cuda.compute_capability < (9, 0):
        pytest.skip("clusters and overlapping kernels begin with compute capability 9.0")
    return cuda


@pytest.fixture
def seen(device):
    """Room for what 32 blocks of `look` see."""
    with device.upload(np.full(32 * 4, 99, np.uint32)) as buffer:
        yield buffer


@pytest.fixture
def look(device, seen):
    """A builder for `look(out)`, complete."""
    return launch_of(device, "look").grid(8).block(32).arg_ptr(seen)


@pytest.fixture
def looking(hopper):
    """The same with room of its own, on the GPU: the builder, and a function that reads and clears what was seen."""
    with hopper.upload(np.full(32 * 4, 99, np.uint32)) as out:

        def read():
            words = out.numpy("uint32").reshape(-1, 4)
            hopper.memset(out, 0, out.nbytes)
            return words.tolist()

        yield launch_of(hopper, "look").grid(8).block(32).arg_ptr(out), read


@pytest.fixture
def stream(cuda):
    handle = cuda.create_stream()
    yield handle
    cuda.abort_capture_if_active(handle)
    cuda.destroy_stream(handle)


def of_blocks(seen):
    return seen.numpy("uint32").reshape(-1, 4).tolist()


def most_shared(gpu, name):
    """The most dynamic shared memory that a block of the kernel may have; no two such blocks fit a multiprocessor."""
    with pytest.raises(LaunchError) as caught:
        launch_of(gpu, name).shared_mem(1 << 30)
    return int(re.search(r"allowed: 0 to (\d+) bytes", str(caught.value))[1])


def captured(gpu, stream, *launches):
    gpu.begin_capture(stream)
    for launch in launches:
        launch.launch(stream)
    return gpu.end_capture(stream)


def run(gpu, graph, stream):
    gpu.launch_graph(graph, stream)
    gpu.synchronize(stream)


# Refusals


@pytest.mark.parametrize("dims", [(0,), (2, 0), (1, 1, 0), ((1, 0, 1),), (0, 0, 0)])
def test_a_cluster_has_blocks(look, seen, dims):
    look.cluster(*dims)
    with pytest.raises(LaunchError, match=r"^attributes.look: cluster: got \(.*0.*\), allowed: 1 or more that divide"):
        look.launch()
    assert of_blocks(seen)[0] == [99] * 4


@pytest.mark.parametrize(("grid", "dims"), [((8,), (3,)), ((8,), (16,)), ((4, 3), (2, 2)), ((4, 4, 5), (1, 1, 2))])
def test_clusters_tile_the_grid(look, seen, grid, dims):
    look.grid(*grid).cluster(*dims)
    full = (*dims, 1, 1)[:3], (*grid, 1, 1)[:3]
    message = f"attributes.look: cluster: got {full[0]}, allowed: 1 or more that divide the grid, {full[1]}"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        look.launch()
    assert of_blocks(seen)[0] == [99] * 4


@pytest.mark.parametrize(
    "dims", [(-1,), (1 << 32,), (1.5,), ("1",), (None,), ((1, 2),), ((1, 2, 3, 4),), ((1, 1, 1), 2)]
)
def test_what_is_no_cluster(look, dims):
    with pytest.raises(ArgumentError, match="^cluster: got "):
        look.cluster(*dims)


def test_an_attribute_that_cannot_be_is_refused_when_prepared(look):
    with pytest.raises(LaunchError, match="^attributes.look: cluster: got "):
        look.cluster(3).prepare()


def test_wrong_arguments_come_before_attributes(look):
    look.cluster(3).arg_u32(1)
    with pytest.raises(LaunchError, match=r"^attributes.look: got 2 arguments, takes 1: \(out\)$"):
        look.launch()


# The host


@pytest.fixture
def on_host(host):
    """A complete builder for `look` on the host, and what its blocks see."""
    with host.upload(np.full(32 * 4, 99, np.uint32)) as out:
        yield launch_of(host, "look").block(32).arg_ptr(out), out


@pytest.mark.parametrize("dims", [(2,), (1, 2), (1, 1, 2), ((2, 1, 1),)])
def test_the_host_has_no_clusters(on_host, dims):
    launch, out = on_host
    full = dims[0] if isinstance(dims[0], tuple) else (*dims, 1, 1)[:3]
    with pytest.raises(
        LaunchError, match=rf"^attributes.look: cluster: got {re.escape(str(full))}, allowed: \(1, 1, 1\)"
    ):
        launch.grid(4, 4, 4).cluster(*dims).launch()
    assert of_blocks(out)[0] == [99] * 4


def test_a_cluster_of_one_block_is_none_to_the_host(on_host):
    launch, out = on_host
    launch.grid(4).cluster(1, 1, 1).launch()
    assert of_blocks(out)[:5] == [[1, 1, 1, 0]] * 4 + [[99] * 4]


@pytest.mark.parametrize("grid", [(2,), (1, 2), (1, 1, 2)])
def test_the_host_runs_one_block_at_a_time(on_host, grid):
    launch, out = on_host
    full = (*grid, 1, 1)[:3]
    message = f"attributes.look: grid: got {full}, allowed: (1, 1, 1) in a cooperative launch on the host"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        launch.grid(*grid).cooperative().launch()
    assert of_blocks(out)[0] == [99] * 4


def test_a_cooperative_launch_of_one_block_runs_on_the_host(host):
    with host.upload(np.zeros(3, np.uint32)) as words:
        launch = launch_of(host, "meet").block(32).cooperative()
        launch.arg_ptr(words).arg_ptr(words.ptr + 4).arg_ptr(words.ptr + 8).launch()
        assert words.numpy("uint32").tolist() == [1, 0, 0]


@pytest.mark.parametrize("method", ["cooperative", "overlap_previous"])
def test_a_flag_is_taken_back(on_host, method):
    launch, out = on_host
    getattr(getattr(launch.grid(2), method)(), method)(False).launch()
    assert of_blocks(out)[:3] == [[1, 1, 1, 0]] * 2 + [[99] * 4]


def test_taking_one_flag_back_leaves_the_other(on_host):
    launch, _ = on_host
    launch.grid(2).cooperative().overlap_previous().overlap_previous(False)
    with pytest.raises(LaunchError, match="in a cooperative launch"):
        launch.launch()


def test_overlapping_has_no_effect_on_the_host(on_host):
    launch, out = on_host
    launch.grid(2).overlap_previous().launch()
    assert of_blocks(out)[:3] == [[1, 1, 1, 0]] * 2 + [[99] * 4]


def test_a_refused_cluster_leaves_the_one_before(on_host):
    launch, out = on_host
    with pytest.raises(ArgumentError):
        launch.cluster(1).cluster(2, "2")
    launch.launch()
    assert of_blocks(out)[:2] == [[1, 1, 1, 0], [99] * 4]


def test_a_builder_keeps_its_attributes(on_host):
    launch, out = on_host
    launch.cooperative().launch()
    with pytest.raises(LaunchError, match="in a cooperative launch"):
        launch.grid(2).arg_ptr(out).launch()


# Clusters on a GPU


def clusters_of(dims, blocks):
    """What `look` sees in a grid along x of clusters along x."""
    return [[*dims, i % dims[0]] for i in range(blocks)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_block_knows_its_cluster(looking, size):
    launch, read = looking
    launch.cluster(size).launch()
    assert read()[:8] == clusters_of((size, 1, 1), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [((2, 2, 2),), (2, 2, 2)])
def test_a_cluster_has_three_dimensions(looking, dims):
    launch, read = looking
    launch.grid(2, 4, 4).cluster(*dims).launch()
    blocks = read()
    assert all(block[:3] == [2, 2, 2] for block in blocks)
    assert sorted(block[3] for block in blocks) == sorted([*range(8)] * 4)


@pytest.mark.gpu
def test_a_launch_without_clusters_has_clusters_of_one_block(looking):
    launch, read = looking
    launch.launch()
    assert read()[:8] == clusters_of((1, 1, 1), 8)


@pytest.mark.gpu
def test_clusters_of_more_than_eight_blocks_run_where_the_device_has_them(hopper, looking):
    if hopper.compute_capability != (9, 0):
        pytest.skip("the largest cluster is known of compute capability 9.0")
    launch, read = looking
    launch.grid(32).cluster(16).launch()
    assert read() == clusters_of((16, 1, 1), 32)


@pytest.mark.gpu
def test_a_cluster_larger_than_the_device_has_is_refused(looking):
    launch, read = looking
    message = (
        r"^attributes.look: cluster: got \(32, 1, 1\), allowed: 1 to (8|16) blocks with this block and shared memory$"
    )
    with pytest.raises(LaunchError, match=message):
        launch.grid(32).cluster(32).launch()
    assert read()[0] == [99] * 4


@pytest.mark.gpu
def test_clusters_have_all_the_shared_memory_of_their_blocks(hopper, looking):
    launch, read = looking
    launch.shared_mem(most_shared(hopper, "look")).cluster(2).launch()
    assert read()[:8] == clusters_of((2, 1, 1), 8)


IN_PAIRS = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) pair(unsigned* out) {
    unsigned size;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    out[blockIdx.x] = size;
}
"""


@pytest.fixture
def pair(hopper, tmp_path):
    """A builder for a kernel whose source says that its clusters are of two blocks, and what its blocks see."""
    if not hopper.has_module("in_pairs"):
        (tmp_path / "in_pairs.cu").write_text(IN_PAIRS)
        hopper.add_module(tmp_path / "in_pairs.cu")
    with hopper.upload(np.zeros(4, np.uint32)) as out:
        yield KernelLaunch(hopper, hopper.kernel("in_pairs", "pair")).grid(4).arg_ptr(out), out


@pytest.mark.gpu
def test_a_compiled_cluster_needs_no_attribute(pair):
    launch, out = pair
    launch.launch()
    assert out.numpy("uint32").tolist() == [2] * 4


@pytest.mark.gpu
def test_a_compiled_cluster_can_be_said_again(pair):
    launch, out = pair
    launch.cluster(2).launch()
    assert out.numpy("uint32").tolist() == [2] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(1, 1, 1), (4, 1, 1)])
def test_a_compiled_cluster_cannot_be_another(pair, dims):
    launch, out = pair
    message = f"in_pairs.pair: cluster: got {dims}, allowed: (2, 1, 1), which the kernel was compiled with"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        launch.cluster(*dims).launch()
    assert out.numpy("uint32").tolist() == [0] * 4


@pytest.mark.gpu
def test_a_compiled_cluster_that_does_not_divide_the_grid_is_the_drivers_to_refuse(pair):
    launch, out = pair
    with pytest.raises(CudaError, match=r"^launching in_pairs.pair with grid \(3, 1, 1\)"):
        launch.grid(3).launch()
    assert out.numpy("uint32").tolist() == [0] * 4


# Cooperative launches on a GPU


@pytest.fixture
def meet(cuda):
    """`meet(blocks)`: a complete cooperative builder for a grid barrier, and what its blocks read."""
    buffers = []

    def build(blocks):
        buffers.extend(cuda.upload(np.zeros(n, np.uint32)) for n in (1, blocks, blocks))
        launch = launch_of(cuda, "meet").grid(blocks).block(THREADS).cooperative()
        for buffer in buffers[-3:]:
            launch.arg_ptr(buffer)
        return launch, buffers[-1]

    yield build
    for buffer in buffers:
        buffer.free()


@pytest.fixture
def most(meet):
    """The blocks of a cooperative launch of `meet` that fit, as the refusal of more says."""
    with pytest.raises(LaunchError) as caught:
        meet(1 << 20)[0].launch()
    message = r"attributes.meet: grid: got \(1048576, 1, 1\), allowed: (\d+) blocks in a cooperative launch with this"
    return int(re.match(message, str(caught.value))[1])


@pytest.mark.gpu
def test_every_multiprocessor_has_blocks_of_a_cooperative_launch(cuda, most):
    assert most >= cuda.sm_count
    assert most % cuda.sm_count == 0


@pytest.mark.gpu
def test_as_many_blocks_as_fit_wait_for_each_other(meet, most):
    launch, out = meet(most)
    launch.launch()
    assert out.numpy("uint32").tolist() == [*range(1, most), 0]


@pytest.mark.gpu
def test_one_block_too_many_is_refused(meet, most):
    launch, out = meet(most + 1)
    with pytest.raises(
        LaunchError, match=rf"^attributes.meet: grid: got \({most + 1}, 1, 1\), allowed: {most} blocks in a"
    ):
        launch.launch()
    assert out.numpy("uint32").tolist() == [0] * (most + 1)


@pytest.mark.gpu
def test_shared_memory_leaves_room_for_fewer_blocks(cuda, meet, most):
    launch, _ = meet(most + 1)
    with pytest.raises(LaunchError, match=rf"allowed: {cuda.sm_count} blocks in a cooperative launch"):
        launch.shared_mem(most_shared(cuda, "meet")).launch()


@pytest.mark.gpu
def test_a_cooperative_launch_has_clusters(looking):
    launch, read = looking
    launch.cluster(2).cooperative().launch()
    assert read()[:8] == [[2, 1, 1, i % 2] for i in range(8)]


@pytest.mark.gpu
def test_too_many_clusters_of_a_cooperative_launch_are_refused(looking):
    launch, _ = looking
    with pytest.raises(
        LaunchError, match=r"^attributes.look: grid: got .*, allowed: \d+ blocks in a cooperative launch"
    ):
        launch.grid(1 << 20).cluster(2).cooperative().launch()


def test_cooperation_is_taken_back(device, probe):
    with device.buffer(4) as out:
        launch = KernelLaunch(device, probe("fill")).grid(1 << 14).arg_ptr(out).arg_u32(1).arg_u32(7).cooperative()
        with pytest.raises(LaunchError, match=r"probes\.fill: grid: got .* in a cooperative launch"):
            launch.launch()
        launch.cooperative(False).launch()
        assert out.numpy("uint32").tolist() == [7]


# Overlapping kernels on a GPU


@pytest.fixture
def led(hopper, stream):
    """`led(ns)`: complete builders for `lead`, which waits for that long, and `follow`; and a function that tells
    whether `follow` has run meanwhile, and forgets it."""
    with hopper.upload(np.zeros(2, np.uint32)) as words:

        def overlapped():
            hopper.synchronize(stream)
            before = words.numpy("uint32")[1]
            hopper.memset(words, 0, words.nbytes)
            return bool(before)

        def build(ns):
            lead = launch_of(hopper, "lead").arg_ptr(words).arg_ptr(words.ptr + 4).arg_u32(ns)
            return lead, launch_of(hopper, "follow").arg_ptr(words), overlapped

        # Both kernels are loaded here: the first launch of one may wait for all that runs.
        lead, follow, _ = build(0)
        follow.launch(stream)
        lead.launch(stream)
        overlapped()
        yield build


@pytest.mark.gpu
def test_a_kernel_starts_while_the_one_before_still_runs(led, stream):
    lead, follow, overlapped = led(LONG_NS)
    lead.launch(stream)
    follow.overlap_previous().launch(stream)
    assert overlapped()


@pytest.mark.gpu
@pytest.mark.parametrize("taken_back", [False, True])
def test_a_kernel_that_was_not_told_to_overlap_waits(led, stream, taken_back):
    lead, follow, overlapped = led(SHORT_NS)
    if taken_back:
        follow.overlap_previous().overlap_previous(False)
    lead.launch(stream)
    follow.launch(stream)
    assert not overlapped()


@pytest.mark.gpu
def test_a_kernel_that_waits_for_the_one_before_sees_what_that_wrote(hopper, stream):
    rounds = 100
    fill, copy = (launch_of(hopper, name).block(32) for name in ("fill_late", "copy_after"))
    copy.overlap_previous()
    with hopper.upload(np.zeros(1 + 32, np.uint32)) as never, hopper.buffer(4 * 32 * rounds) as out:
        filled = never.ptr + 4
        for i in range(rounds):
            fill.arg_ptr(filled).arg_u32(i + 1).arg_ptr(never).arg_u32(LATE_NS).launch(stream)
            copy.arg_ptr(filled).arg_ptr(out.ptr + 4 * 32 * i).launch(stream)
        hopper.synchronize(stream)
        assert (out.numpy("uint32").reshape(rounds, 32) == np.arange(1, rounds + 1)[:, None]).all()


# What keeps attributes


@pytest.mark.gpu
def test_repeated_launches_keep_the_cluster(looking):
    launch, read = looking
    launch.cluster(2)
    for _ in range(3):
        launch.launch()
        assert read()[:8] == clusters_of((2, 1, 1), 8)


@pytest.mark.gpu
def test_repeated_launches_keep_on_overlapping(led, stream):
    lead, follow, overlapped = led(LONG_NS)
    follow.overlap_previous()
    for _ in range(3):
        lead.launch(stream)
        follow.launch(stream)
        assert overlapped()


@pytest.mark.gpu
def test_a_prepared_cooperative_launch_keeps_the_cluster(looking):
    launch, read = looking
    prepared = launch.cluster(2).cooperative().prepare()
    launch.cluster(1).cooperative(False)
    for _ in range(2):
        prepared.launch()
        assert read()[:8] == [[2, 1, 1, i % 2] for i in range(8)]


@pytest.mark.gpu
def test_a_prepared_launch_keeps_on_overlapping(led, stream):
    lead, follow, overlapped = led(LONG_NS)
    prepared = follow.overlap_previous().prepare()
    follow.overlap_previous(False)
    lead.launch(stream)
    prepared.launch(stream)
    assert overlapped()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 16])
def test_a_cooperative_graph_keeps_the_cluster(hopper, looking, stream, size):
    if size > 8 and hopper.compute_capability != (9, 0):
        pytest.skip("the largest cluster is known of compute capability 9.0")
    launch, read = looking
    graph = captured(hopper, stream, launch.grid(16).cluster(size).cooperative())
    run(hopper, graph, stream)
    assert read()[:16] == [[size, 1, 1, i % size] for i in range(16)]
    hopper.destroy_graph(graph)


@pytest.mark.gpu
def test_a_graph_keeps_on_overlapping(hopper, led, stream):
    lead, follow, overlapped = led(LONG_NS)
    graph = captured(hopper, stream, lead, follow.overlap_previous())
    run(hopper, graph, stream)
    assert overlapped()
    hopper.destroy_graph(graph)


@pytest.mark.gpu
@pytest.mark.parametrize("cooperative", [False, True])
def test_an_updated_graph_keeps_the_cluster(hopper, looking, stream, cooperative):
    launch, read = looking
    prepared = launch.cluster(2).cooperative(cooperative).prepare()
    graph = captured(hopper, stream, prepared)
    with hopper.upload(np.zeros(8 * 4, np.uint32)) as other:
        prepared.set("out", other).update(graph)
        run(hopper, graph, stream)
        assert of_blocks(other) == clusters_of((2, 1, 1), 8)
        assert read()[0] == [99] * 4
        hopper.destroy_graph(graph)


@pytest.mark.gpu
def test_an_updated_graph_keeps_on_overlapping(hopper, led, stream):
    lead, follow, overlapped = led(SHORT_NS)
    lead, follow = lead.prepare(), follow.overlap_previous().prepare()
    graph = captured(hopper, stream, lead, follow)
    lead.set("ns", LONG_NS).update(graph)
    follow.update(graph)
    run(hopper, graph, stream)
    assert overlapped()
    hopper.destroy_graph(graph)
