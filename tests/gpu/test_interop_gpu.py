# SPDX-License-Identifier: MIT OR Apache-2.0
"""torch, CuPy and buffers in one launch on a GPU: without a copy, and in the order of their streams.

The order is seen with a kernel that spins on the producer's stream before what the consumer must see.
"""

import numpy as np
import pytest

import metrale
from metrale import KernelLaunch, ops
from metrale.errors import ArgumentError, CaptureError, LaunchError

pytestmark = pytest.mark.gpu

SPIN = 400_000_000  # cycles: 0.2 s at 2 GHz, many times what it takes to queue a launch
ROWS, COLUMNS = 16, 64
ONE, TWO = 0x3F80, 0x4000  # as bf16
SUM, FOUR_SUMS = 0x4280, 0x4380  # COLUMNS and 4 * COLUMNS as bf16


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def gemv(cuda):
    """`gemv(x, weight, out, stream)`: bf16 [ROWS] of [COLUMNS] and [ROWS, COLUMNS], through the launcher."""
    kernel = cuda.kernel("gemv", "dense_gemv_bf16")
    return lambda x, weight, out, stream=None: ops.dense_gemv(cuda, kernel, x, weight, out, ROWS, COLUMNS, stream)


@pytest.fixture
def out(cuda):
    with cuda.buffer(2 * ROWS) as buffer:
        cuda.memset(buffer, 0, buffer.nbytes)
        yield buffer


@pytest.fixture
def x(torch):
    """The vector, zeros; a second one has been filled, so that nothing is compiled or loaded while a test measures."""
    torch.ones(COLUMNS, dtype=torch.bfloat16, device="cuda").fill_(1)
    vector = torch.zeros(COLUMNS, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    return vector


@pytest.fixture
def weight(cuda):
    with cuda.upload(np.full((ROWS, COLUMNS), ONE, np.uint16)) as buffer:
        yield buffer


def spin(torch, stream):
    """Keep a stream, a handle, busy for SPIN cycles."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        torch.cuda._sleep(SPIN)


def bits(out):
    return out.numpy("uint16").tolist()


class CudaArrayOnly:
    """An array that offers `__cuda_array_interface__` and nothing else."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


# Into a launch


@pytest.mark.parametrize("late", ["torch", "cupy"])
def test_torch_cupy_and_a_buffer_in_one_launch_without_a_copy_and_in_order(torch, cupy, gemv, x, out, late):
    weight = cupy.zeros((ROWS, COLUMNS), cupy.uint16)
    torch_stream, cupy_stream = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    handle = torch_stream.cuda_stream if late == "torch" else cupy_stream.ptr
    # The first time around everything is compiled and loaded, which may take longer than the spin. No value is 0:
    # CuPy would not use its kernel for that.
    for of_x, of_weight, expected in ((2, TWO, FOUR_SUMS), (1, ONE, SUM)):
        with torch.cuda.stream(torch_stream), cupy_stream:
            spin(torch, handle)
            x.fill_(of_x)
            weight[...] = of_weight
            gemv(x, weight, out)
        still_spinning = not (torch_stream.query() if late == "torch" else cupy_stream.done)
        assert bits(out) == [expected] * ROWS
    assert still_spinning


def test_the_launch_writes_into_cupys_memory(cupy, gemv, x, weight):
    x.fill_(1)
    out = cupy.zeros(ROWS, cupy.uint16)
    stream = cupy.cuda.Stream(non_blocking=True)
    gemv(x, weight, out, stream)
    stream.synchronize()
    assert out.tolist() == [SUM] * ROWS


def test_the_launch_writes_into_the_tensors_memory(torch, gemv, x, weight):
    x.fill_(1)
    out = torch.zeros(ROWS, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        gemv(x, weight, out, side)
        assert out.tolist() == [COLUMNS] * ROWS


@pytest.mark.parametrize("form", ["tensor", "address"])
def test_a_tensor_carries_its_streams_order_and_an_address_does_not(torch, gemv, x, weight, out, form):
    gemv(x, weight, out)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        spin(torch, side.cuda_stream)
        x.fill_(1)
        gemv(x if form == "tensor" else x.data_ptr(), weight, out)
        assert bits(out) == [SUM if form == "tensor" else 0] * ROWS
    torch.cuda.synchronize()


def test_an_array_interface_carries_its_streams_order(torch, cupy, gemv, x, weight, out):
    array = cupy.zeros(COLUMNS, cupy.uint16)
    array[...] = 0
    gemv(CudaArrayOnly(array), weight, out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(torch, stream.ptr)
        array[...] = ONE
        gemv(CudaArrayOnly(array), weight, out)
    assert not stream.done
    assert bits(out) == [SUM] * ROWS


def test_the_legacy_stream_of_a_producer_is_waited_for(torch, gemv, x, weight, out):
    gemv(x, weight, out)
    torch.cuda._sleep(SPIN)
    x.fill_(1)
    gemv(x, weight, out)
    assert not torch.cuda.default_stream().query()
    assert bits(out) == [SUM] * ROWS


def builder(cuda, x, weight, out):
    launch = KernelLaunch(cuda, cuda.kernel("gemv", "dense_gemv_bf16")).grid(1).block(256).shared_mem(3 * 32768)
    return launch.arg_ptr(x).arg_ptr(weight).arg_ptr(out).arg_u32(ROWS).arg_u32(COLUMNS)


@pytest.mark.parametrize("form", ["builder", "prepared"])
def test_a_launch_made_in_steps_waits_when_it_is_launched(torch, cuda, x, weight, out, form):
    launch = builder(cuda, x, weight, out)
    launch = launch.prepare() if form == "prepared" else launch
    launch.launch()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        spin(torch, side.cuda_stream)
        x.fill_(1)
        launch.launch()
    assert not side.query()
    assert bits(out) == [SUM] * ROWS


def test_copies_wait_for_their_source(torch, cuda, x):
    target = np.ones(COLUMNS, np.uint16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        spin(torch, side.cuda_stream)
        x.fill_(1)
        cuda.copy_d2h(x, target)
    assert target.tolist() == [ONE] * COLUMNS


def test_a_captured_launch_takes_tensors_and_adds_no_order(torch, cuda, gemv, x, weight, out):
    x.fill_(1)
    torch.cuda.synchronize()
    stream = cuda.create_stream()
    cuda.begin_capture(stream)
    gemv(x, weight, out, stream)
    graph = cuda.end_capture(stream)
    cuda.launch_graph(graph, stream)
    cuda.synchronize(stream)
    assert bits(out) == [SUM] * ROWS
    cuda.destroy_graph(graph)
    cuda.destroy_stream(stream)


def test_torchs_graph_captures_a_launch(torch, gemv, x, weight):
    out = torch.zeros(ROWS, dtype=torch.bfloat16, device="cuda")
    gemv(x, weight, out, torch.cuda.current_stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemv(x, weight, out, torch.cuda.current_stream())
    x.fill_(1)
    graph.replay()
    assert out.tolist() == [COLUMNS] * ROWS


def test_torchs_graph_takes_a_buffer(torch, cuda):
    copied = torch.zeros(16, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with cuda.upload(np.arange(16, dtype=np.uint8)) as buffer:
        with torch.cuda.graph(graph):
            copied.copy_(torch.from_dlpack(buffer))
        graph.replay()
        assert copied.tolist() == [*range(16)]


def test_no_event_of_an_order_is_on_the_ledger(cuda, out):
    out.__dlpack__(stream=1)
    assert cuda.snapshot()["events"] == {}


# What kinds of tensors


def test_a_parameter_is_taken(torch, gemv, x, weight, out):
    gemv(torch.nn.Parameter(torch.ones_like(x)), weight, out)
    assert bits(out) == [SUM] * ROWS


def test_page_locked_memory_of_torch_is_taken(torch, gemv, weight, out):
    gemv(torch.ones(COLUMNS, dtype=torch.bfloat16).pin_memory(), weight, out)
    assert bits(out) == [SUM] * ROWS


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "int64", "bool", "uint8", "complex64", "float8_e4m3fn"]
)
def test_every_type_has_an_address(torch, cuda, dtype):
    tensor = torch.zeros(16, dtype=getattr(torch, dtype), device="cuda")
    cuda.memset(tensor, 0xFF, tensor.nbytes)
    target = bytearray(tensor.nbytes)
    cuda.copy_d2h(tensor, target)
    assert target == b"\xff" * tensor.nbytes


def test_a_tensor_that_begins_inside_its_storage_is_taken_from_there(torch, gemv, x, weight, out):
    gemv(torch.cat([x, torch.ones_like(x)])[COLUMNS:], weight, out)
    assert bits(out) == [SUM] * ROWS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda torch: torch.zeros(4), "a torch.Tensor in CPU memory, allowed: CUDA memory of device 0"),
        (lambda torch: np.zeros(4), "a numpy.ndarray in CPU memory, allowed: CUDA memory of device 0"),
        (
            lambda torch: torch.zeros(4, 4, device="cuda").t(),
            r"a torch.Tensor of shape \(4, 4\) with strides \(1, 4\), allowed: C-contiguous arrays",
        ),
        (
            lambda torch: torch.zeros(4, dtype=torch.complex64, device="cuda").conj(),
            "a torch.Tensor whose DLPack export fails: .*conjugate bit",
        ),
        (lambda torch: torch.zeros(0, device="cuda"), "None, allowed: a device pointer that is not null"),
    ],
)
def test_tensors_that_a_kernel_cannot_use_are_refused(torch, gemv, weight, out, make, message):
    with pytest.raises(ArgumentError, match=f"^input: got {message}"):
        gemv(make(torch), weight, out)


def test_memory_of_another_gpu_is_refused(torch, cuda, gemv, weight, out):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    with pytest.raises(ArgumentError, match="input: got .* device 1, allowed: .* device 0"):
        with torch.cuda.device(1):
            gemv(torch.zeros(COLUMNS, dtype=torch.bfloat16, device="cuda:1"), weight, out)


def test_the_host_refuses_cuda_memory(torch, host, x):
    launch = KernelLaunch(host, host.kernel("moe_v41", "moe_v41_finish"))
    with pytest.raises(LaunchError, match="acc: got a torch.Tensor in CUDA memory of device 0, allowed: CPU memory"):
        launch.arg_ptr(x)


def test_the_host_refuses_a_cuda_buffer(host, weight):
    with pytest.raises(ArgumentError, match="ptr: got .*DeviceBuffer in CUDA memory of device 0, allowed: CPU memory"):
        host.memset(weight, 0, 4)


def test_cuda_refuses_a_host_buffer(cuda, host):
    with host.buffer(16) as buffer:
        with pytest.raises(ArgumentError, match="ptr: got .*DeviceBuffer in CPU memory, allowed: CUDA memory"):
            cuda.memset(buffer, 0, 4)


# Out of a buffer


def test_torch_looks_at_a_buffer_without_a_copy(torch, cuda):
    with cuda.upload(np.arange(64, dtype=np.uint8)) as buffer:
        tensor = torch.from_dlpack(buffer)
        assert (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) == (buffer.ptr, torch.uint8, (64,))
        assert tensor.view(torch.int32).tolist() == np.arange(64, dtype=np.uint8).view(np.int32).tolist()
        del tensor


def test_a_buffer_is_not_freed_under_a_tensor(torch, cuda):
    buffer = cuda.buffer(64)
    tensor = torch.from_dlpack(buffer)
    with pytest.raises(metrale.errors.MetraleError, match="is exported 1 times"):
        buffer.free()
    del tensor
    buffer.free()
    assert cuda.live_bytes == 0


def test_torch_waits_for_the_default_stream(torch, cuda):
    side = torch.cuda.Stream()
    with cuda.buffer(64) as buffer:
        cuda.memset(buffer, 0, 64)
        with torch.cuda.stream(side):
            torch.from_dlpack(buffer).clone()
            spin(torch, cuda.default_stream())
            cuda.memset_async(buffer, 7, 64, None)
            copy = torch.from_dlpack(buffer).clone()
            assert not side.query()
            assert copy.tolist() == [7] * 64
        cuda.synchronize()


@pytest.mark.parametrize("through", ["from_dlpack", "asarray"])
def test_cupy_waits_for_the_default_stream(torch, cupy, cuda, through):
    stream = cupy.cuda.Stream(non_blocking=True)
    with cuda.buffer(64) as buffer, stream:
        cuda.memset(buffer, 0, 64)
        spin(torch, cuda.default_stream())
        cuda.memset_async(buffer, 7, 64, None)
        view = getattr(cupy, through)(buffer)
        assert view.data.ptr == buffer.ptr
        assert view.get().tolist() == [7] * 64
        del view
        cuda.synchronize()


def test_a_stream_of_zero_is_refused(cuda):
    with (
        cuda.buffer(16) as buffer,
        pytest.raises(ArgumentError, match=r"stream: got 0, allowed: None, -1, 1 \(legacy\)"),
    ):
        buffer.__dlpack__(stream=0)


def test_no_stream_waits_for_one_that_is_captured(cuda):
    with cuda.buffer(16) as buffer:
        cuda.begin_capture()
        with pytest.raises(CaptureError, match="is being captured, and what is captured runs when its graph is"):
            buffer.__dlpack__(stream=1)
        assert cuda.abort_capture_if_active()


def test_a_tensor_may_end_after_close(torch):
    gpu = metrale.open("cuda")
    tensor = torch.from_dlpack(gpu.buffer(64))
    with pytest.warns(ResourceWarning, match="1 allocations"):
        gpu.close()
    del tensor
    assert gpu.live_alloc_count == 0


# Streams and page-locked buffers


def streams(torch, cupy):
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    return {
        "torch": torch.cuda.Stream(),
        "torch, the default one": torch.cuda.default_stream(),
        "CuPy": cupy.cuda.Stream(non_blocking=True),
        "cuda.core": device.create_stream(),
    }


@pytest.mark.parametrize("whose", ["torch", "torch, the default one", "CuPy", "cuda.core"])
def test_streams_of_other_libraries_are_streams(torch, cupy, cuda, whose):
    stream = streams(torch, cupy)[whose]
    with cuda.buffer(64) as buffer:
        cuda.memset_async(buffer, 9, 64, stream)
        cuda.synchronize(stream)
        assert buffer.numpy().tolist() == [9] * 64


def test_a_pinned_buffer_is_not_freed_under_a_copy(torch, cuda):
    stream = cuda.create_stream()
    pinned = cuda.pinned_buffer(64)
    with cuda.buffer(64) as buffer:
        spin(torch, stream)
        cuda.copy_h2d_async(pinned, buffer, stream)
        with pytest.raises(metrale.errors.MetraleError, match="is exported 1 times"):
            pinned.free()
        cuda.synchronize(stream)
        pinned.free()
    cuda.destroy_stream(stream)
    assert cuda.live_alloc_count == 0
