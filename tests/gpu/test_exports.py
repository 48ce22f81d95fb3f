# SPDX-License-Identifier: MIT OR Apache-2.0
"""Buffers as arrays of other libraries: DeviceBuffer through DLPack, PinnedBuffer as memory to Python; who frees."""

import gc
import re
import threading

import numpy as np
import pytest
from processes import python

from metrale.errors import ArgumentError, MetraleError


def refused(message):
    return pytest.raises(ArgumentError, match=message)


# Buffers as arrays


def test_numpy_looks_at_a_buffer_without_a_copy(host):
    with host.upload(np.arange(16, dtype=np.uint8)) as buffer:
        view = np.from_dlpack(buffer)
        view[3] = 99
        assert (view.dtype, view.shape, view.ctypes.data) == (np.uint8, (16,), buffer.ptr)
        assert buffer.numpy()[3] == 99
        del view


def test_a_buffer_is_not_freed_under_a_tensor(host):
    buffer = host.buffer(16)
    views = [np.from_dlpack(buffer) for _ in range(3)]
    with pytest.raises(MetraleError, match="<DeviceBuffer 16 bytes at .*> is exported 3 times"):
        buffer.free()
    assert host.live_bytes == 16
    views.clear()
    buffer.free()
    assert host.live_bytes == 0


def test_a_tensor_keeps_its_buffer(host):
    view = np.from_dlpack(host.upload(b"metrale"))
    gc.collect()
    assert bytes(view) == b"metrale"
    del view
    assert host.live_bytes == 0


@pytest.mark.parametrize(
    ("max_version", "name"), [(None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned")]
)
def test_a_capsule_has_the_version_that_its_consumer_knows(host, max_version, name):
    with host.buffer(16) as buffer:
        capsule = buffer.__dlpack__(max_version=max_version)
        assert f'capsule object "{name}"' in repr(capsule)
        del capsule


def test_a_capsule_that_nobody_takes_lets_go_of_the_buffer(host):
    buffer = host.buffer(16)
    for max_version in (None, (1, 0)):
        buffer.__dlpack__(max_version=max_version)
    buffer.free()
    assert host.live_bytes == 0


def test_a_tensor_may_end_in_another_thread(host):
    buffer = host.buffer(16)
    views = [np.from_dlpack(buffer)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    buffer.free()
    assert host.live_bytes == 0


def test_a_tensor_may_end_after_close(fresh):
    if fresh.kind != "host":
        pytest.skip("NumPy looks at CPU memory")
    view = np.from_dlpack(fresh.buffer(16))
    with pytest.warns(ResourceWarning, match="1 allocations"):
        fresh.close()
    del view
    gc.collect()
    assert fresh.live_alloc_count == 0


def test_a_buffer_says_where_it_is(device):
    with device.buffer(16) as buffer:
        expected = (2, device.ordinal) if device.kind == "cuda" else (1, 0)
        assert buffer.__dlpack_device__() == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dl_device": (10, 0)}, r"dl_device: got \(10, 0\), allowed: \(\d, 0\), where the memory is"),
        ({"copy": True}, "copy: got True, allowed: False or None"),
    ],
)
def test_an_export_that_would_need_a_copy_is_refused(device, asked, message):
    with device.buffer(16) as buffer, pytest.raises(BufferError, match=message):
        buffer.__dlpack__(**asked)


def test_an_export_to_where_the_buffer_is_is_none(device):
    with device.buffer(16) as buffer:
        buffer.__dlpack__(dl_device=buffer.__dlpack_device__(), copy=False, stream=-1)


def test_a_stream_for_cpu_memory_is_refused(host):
    with host.buffer(16) as buffer, refused("stream: got 7, allowed: None or -1 for CPU memory"):
        buffer.__dlpack__(stream=7)


def test_a_freed_buffer_is_not_exported(device):
    buffer = device.buffer(16)
    buffer.free()
    with pytest.raises(MetraleError, match="the DeviceBuffer has been freed"):
        buffer.__dlpack__()


def test_exports_that_outlive_the_program_end_with_it():
    code = """
        import numpy, metrale
        gpu = metrale.open("host")
        view = numpy.from_dlpack(gpu.buffer(16))
        capsule = gpu.buffer(16).__dlpack__()
        pinned = memoryview(gpu.pinned_buffer(16))
    """
    done = python(code)
    assert done.returncode == 0
    assert re.fullmatch(r"metrale: host .*: never freed: 3 allocations, 48 bytes: .*\n", done.stderr)


# Page-locked buffers


def test_a_pinned_buffer_is_memory_to_python(device):
    with device.pinned_buffer(16, "staging") as pinned:
        view = np.frombuffer(pinned, np.uint32)
        view[:] = [1, 2, 3, 4]
        assert view.ctypes.data == pinned.ptr
        assert bytes(memoryview(pinned)) == view.tobytes()
        del view


def test_a_pinned_buffer_is_a_vector_of_bytes(device):
    with device.pinned_buffer(16) as pinned, memoryview(pinned) as view:
        assert (view.format, view.shape, view.strides, view.itemsize) == ("B", (16,), (1,), 1)
        assert (view.readonly, view.c_contiguous) == (False, True)


def test_copies_go_through_pinned_buffers(device):
    with device.pinned_buffer(16) as there, device.pinned_buffer(16) as back, device.buffer(16) as buffer:
        np.frombuffer(there, np.uint8)[:] = np.arange(16)
        device.copy_h2d_async(there, buffer, None)
        device.copy_d2h_async(buffer, back, None)
        device.synchronize()
        assert bytes(back) == bytes(range(16))


def test_a_pinned_buffer_is_on_the_ledger(device):
    with device.pinned_buffer(48, "staging"):
        assert [(a.kind, a.tag, a.nbytes, a.owner) for a in device.ledger.live()] == [
            ("pinned", "staging", 48, "PinnedBuffer")
        ]
        assert (device.live_bytes, device.snapshot()["pinned_bytes"]) == (0, 48)
    assert device.live_alloc_count == 0


def test_a_pinned_buffer_is_freed_by_itself_alone(device):
    with (
        device.pinned_buffer(16) as pinned,
        refused("allowed: memory without an owner; this belongs to a PinnedBuffer"),
    ):
        device.free_host_pinned(pinned.ptr)


def test_a_pinned_buffer_is_not_freed_under_a_view(device):
    pinned = device.pinned_buffer(16)
    view = memoryview(pinned)
    with pytest.raises(MetraleError, match="<PinnedBuffer 16 bytes at .*> is exported 1 times"):
        pinned.free()
    view.release()
    pinned.free()
    assert device.live_alloc_count == 0


def test_an_error_is_not_hidden_by_the_views_of_the_memory_that_it_leaves(device):
    with pytest.raises(KeyError), device.pinned_buffer(16) as pinned:
        view = memoryview(pinned)
        raise KeyError
    assert device.live_alloc_count == 1
    view.release()
    del pinned, view
    gc.collect()
    assert device.live_alloc_count == 0


def test_without_an_error_a_view_that_is_left_is_refused(device):
    with pytest.raises(MetraleError, match="is exported 1 times"), device.pinned_buffer(16) as pinned:
        view = memoryview(pinned)
    view.release()


def test_a_view_keeps_its_pinned_buffer(device):
    view = np.frombuffer(device.pinned_buffer(16), np.uint8)
    gc.collect()
    view[:] = 3
    assert view.tolist() == [3] * 16
    del view
    assert device.live_alloc_count == 0


def test_a_freed_pinned_buffer_has_no_memory(device):
    pinned = device.pinned_buffer(16)
    pinned.free()
    pinned.free()
    assert repr(pinned) == "<PinnedBuffer, freed>"
    for use in (lambda: pinned.ptr, lambda: memoryview(pinned), pinned.__enter__):
        with pytest.raises(MetraleError, match="the PinnedBuffer has been freed"):
            use()


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True])
def test_what_is_no_size_of_a_pinned_buffer_is_refused(device, nbytes):
    with refused(re.escape(f"nbytes: got {nbytes!r}, allowed: ")):
        device.pinned_buffer(nbytes)
