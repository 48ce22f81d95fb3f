# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the host runtime says of a wrong kernel or launch, and that it goes on afterwards."""

import os
import re
import signal
import subprocess
import sys
import threading
from ctypes import byref, c_int, c_size_t, c_uint32, create_string_buffer

import pytest
from library import FOLDER, ORDERS, Config, LaunchFailed


def failure(library, kernel, *args, **launch):
    with pytest.raises(LaunchFailed) as failed:
        library.launch(kernel, *args, **launch)
    return str(failed.value)


def words(count=64):
    return (c_uint32 * count)()


def line_of(kernel, call, nth=1):
    """faults.cu:N of the nth `call` in a kernel."""
    lines = (FOLDER / "faults.cu").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if f" {kernel}(" in line)
    found = [i for i in range(begin, len(lines)) if f"{call}(" in lines[i]]
    return f"{call} (faults.cu:{found[nth - 1] + 1})"


# --- a missing barrier ---


def test_a_missing_barrier_gives_three_different_wrong_answers(library):
    values, answers = (c_int * 64)(*range(1, 65)), set()
    for order in ORDERS:
        out = (c_int * 64)()
        library.launch("reverse_without_barrier", values, out, block=64, order=order, seed=3)
        answers.add(tuple(out))
    assert len(answers) == 3
    assert tuple(range(64, 0, -1)) not in answers


def test_a_missing_barrier_shows_in_every_block(library, order):
    values, out = (c_int * 640)(*range(1, 641)), (c_int * 640)()
    library.launch("reverse_without_barrier", values, out, grid=10, block=64, order=order)
    for block in range(0, 640, 64):
        assert out[block : block + 64] != values[block : block + 64][::-1]


def test_a_seed_gives_one_order(library):
    values = (c_int * 64)(*range(64))

    def answer(seed):
        out = (c_int * 64)()
        library.launch("reverse_without_barrier", values, out, block=64, order="shuffled", seed=seed)
        return tuple(out)

    assert answer(1) == answer(1) != answer(2)


# --- meetings that cannot happen ---


def test_strict_misses_exited_threads_at_a_barrier(library, order):
    message = failure(library, "exit_before_barrier", words(), block=64, order=order, strict=True)
    call = line_of("exit_before_barrier", "__syncthreads")
    assert message.startswith("kernel exit_before_barrier, block (0, 0, 0), thread (")
    assert message.endswith(f"waits at {call}, not reached by thread (40, 0, 0) (exited)")


def test_exited_threads_are_not_missed_unless_strict(library, order):
    out = words()
    library.launch("exit_before_barrier", out, block=64, order=order)
    assert list(out) == [i != 40 for i in range(64)]


def test_two_barriers_in_one_block(library, order):
    message = failure(library, "two_barriers", words(), order=order)
    calls = {line_of("two_barriers", "__syncthreads", nth) for nth in (1, 2)}
    found = re.fullmatch(
        r"kernel two_barriers, block \(0, 0, 0\), thread \(\d+, 0, 0\) is at (.*) "
        r"while thread \(\d+, 0, 0\) waits at (.*)",
        message,
    )
    assert set(found.groups()) == calls


def test_a_barrier_mixed_with_a_vote(library, order):
    message = failure(library, "barrier_and_vote", words(), order=order)
    assert line_of("barrier_and_vote", "__syncthreads") in message
    assert line_of("barrier_and_vote", "__syncthreads_or") in message


def test_a_barrier_that_some_threads_miss_for_a_shuffle(library):
    message = failure(library, "barrier_and_shuffle", words())
    elsewhere = f"(waits at {line_of('barrier_and_shuffle', '__shfl_sync')})"
    assert message == (
        "kernel barrier_and_shuffle, block (0, 0, 0), thread (0, 0, 0) waits at "
        f"{line_of('barrier_and_shuffle', '__syncthreads')}, not reached by thread (16, 0, 0) {elsewhere}, "
        f"thread (17, 0, 0) {elsewhere}, thread (18, 0, 0) {elsewhere} and 13 more"
    )


def test_a_shuffle_without_exited_lanes(library, order):
    message = failure(library, "shuffle_after_exit", words(), order=order)
    assert message.endswith("not reached by thread (5, 0, 0) (exited), thread (6, 0, 0) (exited)")
    assert line_of("shuffle_after_exit", "__shfl_xor_sync") in message


def test_a_ballot_of_lanes_that_the_block_lacks(library, order):
    message = failure(library, "ballot_full_mask", words(), block=30, order=order)
    assert message.endswith("not reached by lane 30 (not in the block), lane 31 (not in the block)")


def test_a_shuffle_from_outside_its_mask(library):
    message = failure(library, "shuffle_outside_mask", words())
    call = line_of("shuffle_outside_mask", "__shfl_down_sync")
    assert message.endswith(f"thread (4, 0, 0) is at {call}: it reads lane 8, outside the mask 0x000000ff")


def test_a_lane_outside_its_own_mask(library):
    message = failure(library, "lane_outside_mask", words())
    assert message.endswith(
        "thread (8, 0, 0) is at "
        + line_of("lane_outside_mask", "__ballot_sync")
        + ": its lane 8 is outside the mask 0x000000ff"
    )


def test_two_collectives_of_the_same_lanes(library, order):
    message = failure(library, "two_collectives", words(), order=order)
    assert line_of("two_collectives", "__ballot_sync") in message
    assert line_of("two_collectives", "__shfl_sync") in message


def test_one_collective_with_two_masks(library, order):
    message = failure(library, "two_masks", words(), order=order)
    assert "mask 0xffffffff" in message
    assert "mask 0xffffff00" in message


def test_a_width_that_is_no_power_of_two(library):
    message = failure(library, "odd_width", words())
    call = line_of("odd_width", "__shfl_sync")
    assert message.endswith(f"{call}: its width is not a power of two from 1 to 32")


# --- kernels that give up ---


def test_a_kernel_that_throws(library, order):
    message = failure(library, "throws", words(1), c_uint32(3), grid=(2, 2), block=(4, 8), order=order)
    assert re.fullmatch(r"kernel throws, block \(., ., 0\), thread \(3, \d, 0\) threw: on purpose", message)


def test_a_kernel_that_traps(library):
    assert failure(library, "traps") == "kernel traps, block (0, 0, 0), thread (0, 0, 0) called __trap"


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_of_many_failing_blocks_the_first_is_told(library, workers):
    message = failure(library, "fails_in_one_block", c_uint32(37), grid=1000, block=64, workers=workers)
    assert message == "kernel fails_in_one_block, block (37, 0, 0), thread (0, 0, 0) threw: block 37"


def test_a_thread_has_the_local_memory_of_cuda(library, order):
    out = words()
    library.launch("large_local", out, c_uint32(512 << 10), block=64, order=order)
    assert list(out) == [2 * i for i in range(64)]


@pytest.mark.skipif("METRALE_HOST_SANITIZE" in os.environ, reason="the sanitizer tells instead")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("kernel", "argument"), [("endless_recursion", 0), ("large_local", 1 << 21)])
def test_a_thread_that_runs_out_of_stack_is_told(library, order, workers, kernel, argument):
    for _ in range(3):
        message = failure(library, kernel, words(), c_uint32(argument), grid=80, block=64, order=order, workers=workers)
        assert re.fullmatch(
            rf"kernel {kernel}, block \(\d+, 0, 0\), thread \(\d+, 0, 0\) ran out of stack: "
            "its local arrays or its recursion need more than 1024 KiB",
            message,
        )
    test_a_thread_has_the_local_memory_of_cuda(library, order)


@pytest.mark.skipif("METRALE_HOST_SANITIZE" in os.environ, reason="the sanitizer's handler is its own")
@pytest.mark.parametrize("launched", [False, True])
def test_other_faults_end_the_process_as_ever(library, launched):
    program = f"""
import ctypes
from library import Library
library = Library({str(library.path)!r})
if {launched}:
    library.launch("no_parameters")
ctypes.string_at(0)
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(FOLDER)})
    assert done.returncode == -signal.SIGSEGV


# --- launches that are refused ---


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ({"grid": (0, 1, 1)}, "the grid (0, 1, 1) is outside 1 to (2147483647, 65535, 65535)"),
        ({"grid": (1, 65536, 1)}, "the grid (1, 65536, 1) is outside 1 to (2147483647, 65535, 65535)"),
        ({"block": (32, 0, 1)}, "the block (32, 0, 1) is outside 1 to (1024, 1024, 64)"),
        ({"block": (1, 1, 65)}, "the block (1, 1, 65) is outside 1 to (1024, 1024, 64)"),
        ({"block": (32, 33, 1)}, "the block (32, 33, 1) has 1056 threads, over the limit of 1024"),
        ({"shared": 232449}, "232449 bytes of shared memory are over the limit of 232448"),
        ({"order": 3}, "there is no thread order 3"),
    ],
)
def test_a_refused_launch(library, launch, why):
    assert failure(library, "no_parameters", **launch) == f"kernel no_parameters: {why}"


def test_the_largest_block_and_shared_memory_are_taken(library):
    library.launch("no_parameters", block=1024, shared=232448)


def test_a_message_is_cut_to_its_buffer(library):
    config, message = Config(), create_string_buffer(b"?" * 31)
    status = library._library.metrale_host_launch(
        byref(library.kernels["no_parameters"]), byref(config), None, message, c_size_t(8)
    )
    assert status != 0
    assert message.raw[:10] == b"kernel \0??"


# --- afterwards, and at once ---


def test_the_library_goes_on_after_every_fault(library, order):
    for _ in range(20):
        failure(library, "two_barriers", words(), order=order)
        failure(library, "throws", words(1), c_uint32(9), grid=100, block=256, order=order, workers=2)
        failure(library, "shuffle_after_exit", words(), order=order)
        out = words(256)
        library.launch("leave_before_barrier", out, c_uint32(200), block=256, order=order)
        assert list(out) == [sum(range(200))] * 200 + [0] * 56


def test_launches_from_several_threads(library):
    wrong = []

    def work(seed):
        values, out = (c_int * (256 * 40))(*range(seed, seed + 256 * 40)), (c_int * (256 * 40))()
        for i in range(10):
            order = list(ORDERS)[i % 3]
            library.launch("reverse_256", values, out, grid=40, block=256, order=order, seed=i)
            if list(out) != [x for b in range(40) for x in reversed(values[b * 256 : b * 256 + 256])]:
                wrong.append((seed, order))
            try:
                library.launch("throws", words(1), c_uint32(seed), grid=40, block=256)
                wrong.append((seed, "no error"))
            except LaunchFailed as error:
                if f"block (0, 0, 0), thread ({seed}, 0, 0) threw" not in str(error):
                    wrong.append((seed, str(error)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
