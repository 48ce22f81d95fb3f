# SPDX-License-Identifier: MIT OR Apache-2.0
"""Opening, closing, and the end of a process."""

import gc
import re
import warnings
import weakref

import pytest
from processes import output_of, python

import metrale
from metrale import KernelLaunch, ops
from metrale.errors import ArgumentError, MetraleError, OutOfMemoryError
from metrale.gpu.owner import Owner

# Opening


def test_open_says_which_device_it_took(device):
    assert device.kind in ("host", "cuda")
    assert device.kind == "cuda" or "host" in device.name
    assert re.fullmatch(rf"<\w+Backend {re.escape(device.name)}, 0 bytes live>", repr(device))


def test_open_takes_the_gpu_if_there_is_one(monkeypatch):
    from metrale.gpu.cuda import device_count

    monkeypatch.delenv("METRALE_BACKEND", raising=False)
    with metrale.open() as gpu:
        assert gpu.kind == ("cuda" if device_count() else "host")


def test_the_environment_names_the_backend(monkeypatch):
    monkeypatch.setenv("METRALE_BACKEND", "host")
    with metrale.open() as gpu:
        assert gpu.kind == "host"


def test_an_unknown_backend_is_refused(monkeypatch):
    with pytest.raises(ArgumentError, match="^kind: got 'tpu', allowed: cuda, host"):
        metrale.open("tpu")
    monkeypatch.setenv("METRALE_BACKEND", "gpu")
    with pytest.raises(ArgumentError, match="^METRALE_BACKEND: got 'gpu', allowed: cuda, host"):
        metrale.open()


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match="^device: got 4096, allowed: "):
        metrale.open("cuda", device=4096)


# Facts


def test_facts(device):
    assert 0 < device.free_memory <= device.total_memory
    assert device.sm_count >= 1
    major, minor = device.compute_capability
    assert (major > 0) == (device.kind == "cuda")
    assert minor >= 0


# Closing


def test_a_closed_backend_has_nothing_left(fresh):
    assert fresh.close() == []
    assert fresh.closed
    assert "closed" in repr(fresh)


def test_close_frees_what_is_left_and_says_what_it_was(fresh):
    fresh.alloc(100, "forgotten")
    fresh.alloc_host_pinned(50, "pinned")
    fresh.create_stream()
    fresh.create_event()
    with pytest.warns(ResourceWarning, match=r"2 allocations, 150 bytes: forgotten \(.*test_lifecycle"):
        left = fresh.close()
    assert [(a.tag, a.nbytes) for a in left] == [("forgotten", 100), ("pinned", 50)]
    assert (fresh.live_bytes, fresh.live_alloc_count) == (0, 0)
    assert (fresh.snapshot()["streams"], fresh.snapshot()["events"]) == ({}, {})


def test_closing_twice_is_fine(fresh):
    fresh.close()
    assert fresh.close() == []


def test_a_with_block_closes_also_on_an_error(fresh):
    with pytest.raises(KeyError), fresh:
        raise KeyError
    assert fresh.closed


def test_a_backend_that_is_dropped_is_closed(fresh):
    kind = fresh.kind
    dropped = metrale.open(kind)
    dropped.alloc(64, "dropped")
    gone = weakref.ref(dropped)
    with pytest.warns(ResourceWarning, match="1 allocations, 64 bytes: dropped"):
        del dropped
        gc.collect()
    assert gone() is None


def test_buffers_and_owners_outlive_their_backend(fresh):
    buffer, own = fresh.buffer(64), Owner(fresh, "Thing")
    own.alloc("a", 64)
    own.stream()
    with pytest.warns(ResourceWarning):
        fresh.close()
    buffer.free()
    own.free()
    assert fresh.live_alloc_count == 0


KERNEL = ("gemv", "dense_gemv_bf16")
USES = {
    "alloc": lambda gpu, s: gpu.alloc(16),
    "alloc_managed": lambda gpu, s: gpu.alloc_managed(16),
    "alloc_host_pinned": lambda gpu, s: gpu.alloc_host_pinned(16),
    "free": lambda gpu, s: gpu.free(s["ptr"]),
    "free_host_pinned": lambda gpu, s: gpu.free_host_pinned(s["ptr"]),
    "memset": lambda gpu, s: gpu.memset(s["ptr"], 0, 16),
    "memset_async": lambda gpu, s: gpu.memset_async(s["ptr"], 0, 16, s["stream"]),
    "copy_h2d": lambda gpu, s: gpu.copy_h2d(bytes(16), s["ptr"]),
    "copy_h2d_async": lambda gpu, s: gpu.copy_h2d_async(bytes(16), s["ptr"], s["stream"]),
    "copy_d2h": lambda gpu, s: gpu.copy_d2h(s["ptr"], bytearray(16)),
    "copy_d2h_async": lambda gpu, s: gpu.copy_d2h_async(s["ptr"], bytearray(16), s["stream"]),
    "copy_d2h_on_stream": lambda gpu, s: gpu.copy_d2h_on_stream(s["ptr"], bytearray(16), s["stream"]),
    "copy_d2d": lambda gpu, s: gpu.copy_d2d(s["ptr"], s["ptr"] + 16, 16),
    "copy_d2d_async": lambda gpu, s: gpu.copy_d2d_async(s["ptr"], s["ptr"] + 16, 16, s["stream"]),
    "copy_d2d_2d_async": lambda gpu, s: gpu.copy_d2d_2d_async(s["ptr"], 8, s["ptr"] + 16, 8, 8, 2, s["stream"]),
    "buffer": lambda gpu, s: gpu.buffer(16),
    "upload": lambda gpu, s: gpu.upload(bytes(16)),
    "pinned_buffer": lambda gpu, s: gpu.pinned_buffer(16),
    "default_stream": lambda gpu, s: gpu.default_stream(),
    "create_stream": lambda gpu, s: gpu.create_stream(),
    "destroy_stream": lambda gpu, s: gpu.destroy_stream(s["stream"]),
    "synchronize": lambda gpu, s: gpu.synchronize(),
    "synchronize, a stream": lambda gpu, s: gpu.synchronize(s["stream"]),
    "create_event": lambda gpu, s: gpu.create_event(),
    "destroy_event": lambda gpu, s: gpu.destroy_event(s["event"]),
    "record_event": lambda gpu, s: gpu.record_event(s["event"]),
    "stream_wait_event": lambda gpu, s: gpu.stream_wait_event(s["stream"], s["event"]),
    "event_synchronize": lambda gpu, s: gpu.event_synchronize(s["event"]),
    "event_query": lambda gpu, s: gpu.event_query(s["event"]),
    "event_elapsed_ms": lambda gpu, s: gpu.event_elapsed_ms(s["event"], s["event"]),
    "scan_redzones": lambda gpu, s: gpu.scan_redzones(),
    "begin_capture": lambda gpu, s: gpu.begin_capture(s["stream"]),
    "end_capture": lambda gpu, s: gpu.end_capture(s["stream"]),
    "abort_capture_if_active": lambda gpu, s: gpu.abort_capture_if_active(s["stream"]),
    "stream_is_capturing": lambda gpu, s: gpu.stream_is_capturing(s["stream"]),
    "launch_graph": lambda gpu, s: gpu.launch_graph(1, s["stream"]),
    "destroy_graph": lambda gpu, s: gpu.destroy_graph(1),
    "kernel": lambda gpu, s: gpu.kernel(*KERNEL),
    "add_module": lambda gpu, s: gpu.add_module("none.cu"),
    "total_memory": lambda gpu, s: gpu.total_memory,
    "free_memory": lambda gpu, s: gpu.free_memory,
    "audit": lambda gpu, s: gpu.audit(),
    "sweep_unreleased": lambda gpu, s: gpu.sweep_unreleased(),
    "with": lambda gpu, s: gpu.__enter__(),
    "launch": lambda gpu, s: s["launch"].launch(),
    "launch on a stream": lambda gpu, s: s["launch"].launch(s["stream"]),
    "a launcher": lambda gpu, s: ops.dense_gemv(gpu, s["kernel"], s["ptr"], s["ptr"], s["ptr"], 1, 1, s["stream"]),
}
# Those that only read what is known without a device.
WITHOUT_A_DEVICE = {
    *("live_bytes", "live_alloc_count", "peak_bytes", "alloc_report", "snapshot", "ledger", "closed", "close"),
    *("kind", "name", "usable", "sm_count", "compute_capability", "has_module"),
    *("order", "seed", "strict", "workers", "ordinal", "driver_version", "arch", "overhead"),
}


def test_every_public_method_is_here(device):
    public = {name for name in dir(device) if name[0] != "_"}
    assert public - WITHOUT_A_DEVICE == {name for name in USES if name in public}


@pytest.mark.parametrize("use", USES)
def test_a_closed_backend_refuses_to_be_used(fresh, use):
    kernel = fresh.kernel(*KERNEL)
    things = {"ptr": fresh.alloc(64), "stream": fresh.create_stream(), "event": fresh.create_event(), "kernel": kernel}
    launch = KernelLaunch(fresh, kernel)
    things["launch"] = launch.arg_ptr(things["ptr"]).arg_ptr(things["ptr"]).arg_ptr(things["ptr"]).arg_u32(1).arg_u32(1)
    with pytest.warns(ResourceWarning):
        fresh.close()
    with pytest.raises(MetraleError, match="closed"):
        USES[use](fresh, things)


# Owner


def test_an_owner_gives_everything_back_once_newest_first(device):
    own = Owner(device, "Thing")
    own.alloc("a", 100)
    own.alloc("tiny", 0)
    own.stream()
    own.event()
    snapshot = device.snapshot()
    assert [(a["tag"], a["nbytes"]) for a in snapshot["allocations"]] == [("Thing.a", 100), ("Thing.tiny", 16)]
    assert (len(snapshot["streams"]), len(snapshot["events"])) == (1, 1)
    own.free()
    own.free()
    assert device.live_alloc_count == 0


@pytest.mark.parametrize("fails_at", range(4))
def test_a_constructor_that_fails_half_way_gives_everything_back(device, fails_at):
    class Model:
        def __init__(self):
            with Owner(device, "Model") as own:
                for step in range(4):
                    own.alloc(f"weights {step}", 1 << 62 if step == fails_at else 64)
                    own.stream()
                    own.event()

    with pytest.raises((OutOfMemoryError, ArgumentError)):
        Model()
    snapshot = device.snapshot()
    assert (snapshot["allocations"], snapshot["streams"], snapshot["events"]) == ([], {}, {})


def test_an_owner_keeps_what_a_constructor_that_ends_well_took(device):
    with Owner(device, "Model") as own:
        own.alloc("weights", 64)
    assert device.live_alloc_count == 1
    own.free()


def test_an_owner_goes_on_when_a_step_fails(device):
    own = Owner(device, "Thing")
    own.alloc("first", 64)
    taken = own.event()
    own.alloc("third", 64)
    device.destroy_event(taken)
    with pytest.raises(ArgumentError, match=f"event: got {taken}, allowed: a live event"):
        own.free()
    assert device.live_alloc_count == 0


# The end of a process


def test_a_clean_exit_says_nothing(device):
    code = """
        import sys, metrale
        gpu = metrale.open(sys.argv[1])
        gpu.free(gpu.alloc(64))
        with gpu.buffer(64):
            pass
        gpu.kernel("gemv", "dense_gemv_bf16")
    """
    assert output_of(code, device.kind) == ""


def test_an_exit_with_live_objects_prints_one_line(device):
    code = """
        import sys, metrale
        gpu = metrale.open(sys.argv[1])
        kept = gpu.buffer(1000, "kept")
        gpu.alloc(24, "lost")
        stream, event = gpu.create_stream(), gpu.create_event()
    """
    done = python(code, device.kind)
    assert (done.returncode, done.stdout) == (0, "")
    memory = r"2 allocations, 1,024 bytes: kept \(<string>:4\), lost \(<string>:5\)"
    rest = r"1 streams \(<string>:6\); 1 events \(<string>:6\)"
    assert re.fullmatch(rf"metrale: .*: never freed: {memory}; {rest}\n", done.stderr)


def test_an_exit_through_an_error_does_not_crash(device):
    code = """
        import sys, metrale
        gpu = metrale.open(sys.argv[1])
        kept = gpu.buffer(1000, "kept")
        sys.exit(7)
    """
    done = python(code, device.kind)
    assert (done.returncode, done.stdout) == (7, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_backend_does_not_follow_into_a_child_process(device):
    code = """
        import os, sys, warnings, metrale
        warnings.simplefilter("error")
        gpu = metrale.open(sys.argv[1])
        buffer, dropped = gpu.buffer(64), gpu.buffer(64)
        kernel = gpu.kernel("gemv", "dense_gemv_bf16")
        child = os.fork()
        if child == 0:
            for use in (gpu.synchronize, lambda: gpu.alloc(16), lambda: gpu.kernel("gemv", "dense_gemv_bf16"),
                        metrale.KernelLaunch(gpu, kernel).launch, buffer.free):
                try:
                    use()
                except metrale.errors.MetraleError as error:
                    print(error)
            del dropped
            assert gpu.close() == []
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        buffer.free()
        dropped.free()
        print("the parent goes on", gpu.close())
    """
    *child, parent = output_of(code, device.kind).splitlines()
    advice = {
        "host": "a child process opens its own",
        "cuda": "CUDA does not survive a fork; start processes with 'spawn'",
    }
    assert len(child) == 4
    assert all(line.endswith(f"was opened before fork(): {advice[device.kind]}") for line in child)
    assert parent == "the parent goes on []"


def test_a_child_process_opens_a_host_backend_of_its_own():
    code = """
        import os, metrale
        gpu = metrale.open("host")
        child = os.fork()
        if child == 0:
            with metrale.open("host") as own:
                own.free(own.alloc(64))
            os._exit(0)
        print(os.waitpid(child, 0)[1])
    """
    assert output_of(code) == "0\n"


def test_warnings_as_errors_do_not_keep_memory(fresh):
    fresh.alloc(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning):
            fresh.close()
    assert fresh.live_alloc_count == 0
