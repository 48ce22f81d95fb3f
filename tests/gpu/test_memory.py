# SPDX-License-Identifier: MIT OR Apache-2.0
"""Allocations, copies and what is refused of them."""

import ctypes
import re

import numpy as np
import pytest

import metrale
from metrale.errors import ArgumentError, CudaError, MetraleError, OutOfMemoryError

NOT_A_SIZE = [-1, 1 << 62, 1.5, "16", None]


@pytest.fixture
def block(device):
    """64 bytes holding 0 .. 63."""
    with device.upload(np.arange(64, dtype=np.uint8), "block") as buffer:
        yield buffer


def refused(message):
    return pytest.raises(ArgumentError, match=message)


# Allocation


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 1 << 22])
def test_allocations_are_aligned_and_counted(device, nbytes):
    ptr = device.alloc(nbytes)
    assert ptr % 256 == 0
    assert (device.live_bytes, device.live_alloc_count) == (nbytes, 1)
    device.free(ptr)
    assert (device.live_bytes, device.live_alloc_count) == (0, 0)


def test_a_device_pointer_is_an_int_with_offsets(device):
    ptr = device.alloc(64)
    assert isinstance(ptr, metrale.DevicePtr)
    assert isinstance(ptr, int)
    assert ptr.offset(16) == ptr + 16
    assert not ptr.is_null
    assert metrale.DevicePtr(0).is_null
    assert repr(ptr) == f"DevicePtr({int(ptr):#x})"
    device.free(ptr)


@pytest.mark.parametrize("alloc", ["alloc", "alloc_managed", "alloc_host_pinned", "buffer"])
def test_zero_bytes_are_refused(device, alloc):
    with refused("nbytes: got 0, allowed: 1 or more"):
        getattr(device, alloc)(0)


@pytest.mark.parametrize("alloc", ["alloc", "alloc_managed", "alloc_host_pinned", "buffer"])
@pytest.mark.parametrize("nbytes", NOT_A_SIZE)
def test_what_is_no_size_is_refused(device, alloc, nbytes):
    with refused(re.escape(f"nbytes: got {nbytes!r}, allowed: an integer number of bytes")):
        getattr(device, alloc)(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 62) - 1])
def test_out_of_memory_says_what_was_asked_and_who_holds_what(device, nbytes):
    held = [device.alloc(1000 * i, f"buffer {i}") for i in range(1, 8)]
    with pytest.raises(OutOfMemoryError) as caught:
        device.alloc(nbytes, "too much")
    error = caught.value
    assert isinstance(error, CudaError)
    assert error.asked == nbytes
    assert 0 < error.free <= error.total < nbytes
    assert [holder.tag for holder in error.holders] == [f"buffer {i}" for i in (7, 6, 5, 4, 3)]
    for part in (f"{nbytes:,} bytes", f"{error.free:,} free", f"{error.total:,}", "buffer 7", "test_memory.py"):
        assert part in str(error)
    assert device.live_alloc_count == 7
    for ptr in held:
        device.free(ptr)


@pytest.mark.gpu
def test_a_device_that_was_full_goes_on_working(cuda):
    step, held = cuda.free_memory // 9, []
    with pytest.raises(OutOfMemoryError) as caught:
        while True:
            held.append(cuda.buffer(step + len(held), f"holder {len(held)}"))
    error, count = caught.value, len(held)
    assert error.asked == step + count > error.free
    assert [holder.tag for holder in error.holders] == [f"holder {i}" for i in range(count - 1, count - 6, -1)]
    for holder in error.holders:
        assert f"{holder.tag} {holder.nbytes} bytes" in str(error)
    held.pop().free()
    with cuda.upload(b"\0\0\x80\x3f" * 8) as acc, cuda.buffer(16, "out") as out:
        launch = metrale.KernelLaunch(cuda, cuda.kernel("moe_v41", "moe_v41_finish"))
        launch.block(256).arg_ptr(acc).arg_ptr(out).arg_u32(8).launch()
        assert out.numpy("uint16").tolist() == [0x3F80] * 8
    for buffer in held:
        buffer.free()


def test_managed_memory_is_seen_from_both_sides(device):
    ptr = device.alloc_managed(256, "shared")
    device.memset(ptr, 7, 256)
    assert ctypes.string_at(ptr, 256) == b"\x07" * 256
    device.free(ptr)


def test_pinned_memory_is_host_memory(device):
    ptr = device.alloc_host_pinned(64)
    assert not isinstance(ptr, metrale.DevicePtr)
    ctypes.memset(ptr, 5, 64)
    with device.upload((ctypes.c_ubyte * 64).from_address(ptr)) as copy:
        assert copy.numpy().tolist() == [5] * 64
    assert device.live_bytes == 0
    assert device.snapshot()["pinned_bytes"] == 64
    device.free_host_pinned(ptr)
    assert device.snapshot()["pinned_bytes"] == 0


# Freeing


def test_null_is_freed_without_effect(device):
    for null in (None, 0, metrale.DevicePtr(0)):
        device.free(null)
        device.free_host_pinned(null)


def test_a_second_free_tells_the_allocations_history(device):
    ptr = device.alloc(48, "twice")
    device.free(ptr)
    with refused(
        rf"ptr: got {ptr:#x}, inside <Allocation twice 48 bytes .*test_memory.py:\d+> freed at .*test_memory.py:\d+"
    ):
        device.free(ptr)


def test_an_interior_pointer_is_not_freed(device, block):
    with refused(
        f"ptr: got {block.ptr + 8:#x}, 8 bytes into <Allocation block 64 bytes .*allowed: the base of a live device"
    ):
        device.free(block.ptr + 8)


@pytest.mark.parametrize("free", ["free", "free_host_pinned"])
def test_memory_of_someone_else_is_not_freed(device, free):
    mine = np.zeros(64, np.uint8)
    with refused(f"ptr: got {mine.ctypes.data:#x}, .*allowed: the base of a live"):
        getattr(device, free)(mine.ctypes.data)


def test_device_and_pinned_memory_have_a_free_of_their_own(device, block):
    pinned = device.alloc_host_pinned(32)
    with refused("allowed: the base of a live device allocation"):
        device.free(pinned)
    with refused("allowed: the base of a live pinned allocation"):
        device.free_host_pinned(block)
    device.free_host_pinned(pinned)


def test_memory_of_another_backend_is_not_freed(device, fresh, block):
    with refused("the ledger does not know"):
        fresh.free(block.ptr)


# Buffers


def test_a_buffer_is_freed_at_the_end_of_its_block(device):
    with device.buffer(32, "temporary") as buffer:
        assert buffer.nbytes == device.live_bytes == 32
    assert device.live_bytes == 0


def test_a_buffer_is_freed_with_its_last_reference(device):
    buffer = device.buffer(32)
    del buffer
    assert device.live_alloc_count == 0


def test_a_freed_buffer_has_no_address(device):
    buffer = device.buffer(32)
    buffer.free()
    buffer.free()
    assert repr(buffer) == "<DeviceBuffer, freed>"
    for use in (lambda: buffer.ptr, buffer.numpy, buffer.__enter__, lambda: device.memset(buffer, 0, 1)):
        with pytest.raises(MetraleError, match="the DeviceBuffer has been freed"):
            use()


def test_a_buffer_comes_back_as_numpy(device):
    values = np.arange(12, dtype=np.float32)
    with device.upload(values) as buffer:
        assert (buffer.numpy("float32", (3, 4)) == values.reshape(3, 4)).all()
        assert (buffer.numpy(np.float32) == values).all()


def test_an_upload_that_fails_gives_its_memory_back(device):
    with pytest.raises((BufferError, ValueError)):
        device.upload(np.zeros((8, 8), np.uint8)[:, ::2])
    assert device.live_alloc_count == 0


@pytest.mark.gpu
def test_buffers_on_a_gpu_have_the_array_interface(cuda):
    with cuda.buffer(96) as buffer:
        interface = buffer.__cuda_array_interface__
        assert interface["data"] == (buffer.ptr, False)
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((96,), "|u1", 3)
        assert interface["stream"] == cuda.default_stream()


def test_buffers_on_the_host_are_no_cuda_arrays(host):
    with host.buffer(96) as buffer:
        assert not hasattr(buffer, "__cuda_array_interface__")


# Copies


@pytest.mark.parametrize("how", ["copy_h2d", "copy_h2d_async"])
def test_host_to_device(device, block, how):
    stream = () if how == "copy_h2d" else (device.default_stream(),)
    getattr(device, how)(np.full(8, 99, np.uint8), block.ptr.offset(4), *stream)
    expected = np.arange(64, dtype=np.uint8)
    expected[4:12] = 99
    assert (block.numpy() == expected).all()


@pytest.mark.parametrize("how", ["copy_d2h", "copy_d2h_async", "copy_d2h_on_stream"])
def test_device_to_host(device, block, how):
    out = np.zeros(8, np.uint8)
    stream = () if how == "copy_d2h" else (device.default_stream(),)
    getattr(device, how)(block.ptr.offset(10), out, *stream)
    device.synchronize()
    assert out.tolist() == list(range(10, 18))


@pytest.mark.parametrize("how", ["copy_d2d", "copy_d2d_async"])
def test_device_to_device(device, block, how):
    stream = () if how == "copy_d2d" else (None,)
    getattr(device, how)(block, block.ptr.offset(32), 32, *stream)
    assert block.numpy().tolist() == [*range(32), *range(32)]


@pytest.mark.parametrize("how", ["memset", "memset_async"])
def test_memset(device, block, how):
    stream = () if how == "memset" else (None,)
    getattr(device, how)(block.ptr.offset(60), 255, 4, *stream)
    assert block.numpy().tolist() == [*range(60), 255, 255, 255, 255]


@pytest.mark.parametrize("value", [-1, 256])
def test_memset_takes_bytes(device, block, value):
    with refused(f"value: got {value}, allowed: 0 to 255"):
        device.memset(block, value, 4)


def test_bytes_and_bytearrays_are_buffers(device):
    with device.upload(b"metrale") as buffer:
        out = bytearray(7)
        device.copy_d2h(buffer, out)
    assert out == b"metrale"


def test_a_read_only_destination_is_refused(device, block):
    with pytest.raises(ArgumentError, match="dst: got <class 'bytes'>, allowed: a contiguous and writable buffer"):
        device.copy_d2h(block, bytes(64))


def test_a_source_that_is_not_contiguous_is_refused(device, block):
    with pytest.raises(ArgumentError, match=r"src: got <class 'numpy.ndarray'>, allowed: a contiguous buffer"):
        device.copy_h2d(np.zeros((8, 8), np.uint8)[:, ::2], block)


def test_sizes_may_be_any_integers_but_bools(device):
    device.free(device.alloc(np.int64(64)))
    with pytest.raises(ArgumentError, match="nbytes: got True, allowed: an integer number of bytes"):
        device.alloc(True)


def test_copies_of_nothing_do_nothing(device, block):
    device.copy_h2d(b"", block)
    device.copy_d2d(block, block, 0)
    assert block.numpy().tolist() == list(range(64))


OUT_OF_BOUNDS = {
    "copy_h2d": ("dst", lambda gpu, p, n: gpu.copy_h2d(bytes(n), p)),
    "copy_d2h": ("src", lambda gpu, p, n: gpu.copy_d2h(p, bytearray(n))),
    "memset": ("ptr", lambda gpu, p, n: gpu.memset(p, 0, n)),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
@pytest.mark.parametrize(("offset", "nbytes"), [(0, 65), (63, 2), (32, 33)])
def test_ranges_end_with_their_allocation(device, block, name, offset, nbytes):
    argument, call = OUT_OF_BOUNDS[name]
    with refused(f"^{argument}: got {nbytes} bytes at offset {offset}, allowed: inside <Allocation block 64 bytes"):
        call(device, block.ptr.offset(offset), nbytes)
    assert block.numpy().tolist() == list(range(64))


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_ranges_have_an_allocation(device, name):
    argument, call = OUT_OF_BOUNDS[name]
    with refused(f"^{argument}: got a null pointer, allowed: memory of this backend"):
        call(device, None, 4)
    freed = device.alloc(64, "gone")
    device.free(freed)
    with refused(
        f"^{argument}: got {freed:#x}, inside <Allocation gone .* freed at .*, allowed: memory of this backend"
    ):
        call(device, freed, 4)


def test_host_memory_is_no_device_memory(device, block):
    mine = np.zeros(64, np.uint8)
    with pytest.raises(MetraleError, match=f"^dst: got {mine.ctypes.data:#x}"):
        device.copy_d2d(block, mine.ctypes.data, 16)


def test_both_ends_of_a_device_copy_are_checked(device, block):
    with device.buffer(16) as small:
        with refused("^dst: got 32 bytes at offset 0"):
            device.copy_d2d(block, small, 32)
        with refused("^src: got 32 bytes at offset 0"):
            device.copy_d2d(small, block, 32)


@pytest.mark.parametrize("offset", [0, 1, 15])
def test_overlapping_device_copies_are_refused(device, block, offset):
    for src, dst in ((block.ptr, block.ptr + offset), (block.ptr + offset, block.ptr)):
        with refused(f"dst: got {dst:#x}, allowed: 16 bytes that do not overlap the source at {src:#x}"):
            device.copy_d2d(src, dst, 16)
    device.copy_d2d(block.ptr, block.ptr + 16, 16)


@pytest.mark.gpu
def test_memory_that_the_driver_knows_is_copied_and_checked(cuda):
    """Another backend of the device, standing in for another library in the process."""
    with metrale.open("cuda") as other, other.upload(np.full(1 << 21, 3, np.uint8)) as foreign:
        out = np.zeros(16, np.uint8)
        cuda.copy_d2h(foreign.ptr, out)
        assert out.tolist() == [3] * 16
        with refused("src: got 65 bytes at .* allowed: inside a foreign allocation of"):
            cuda.copy_d2h(foreign.ptr + foreign.nbytes - 64, bytearray(65))


def test_memory_of_another_host_backend_is_refused(host):
    with metrale.open("host") as other, other.buffer(64) as foreign:
        with refused(f"src: got {foreign.ptr:#x}, .*allowed: memory of this backend or device memory that the"):
            host.copy_d2h(foreign.ptr, bytearray(16))


# What stands for a pointer


class Tensor:
    """What has an address and says no more of itself."""

    def __init__(self, ptr):
        self.data_ptr = lambda: int(ptr)


@pytest.mark.parametrize("wrap", [int, metrale.DevicePtr, Tensor])
def test_pointers_come_in_many_forms(device, block, wrap):
    device.memset(wrap(block.ptr), 1, 64)
    assert block.numpy().tolist() == [1] * 64


@pytest.mark.parametrize("what", [1.0, "0x10", [1], -1, 1 << 64])
def test_what_is_no_pointer_is_refused(device, what):
    with refused(f"ptr: got {re.escape(repr(what))}, allowed:"):
        device.memset(what, 0, 1)
