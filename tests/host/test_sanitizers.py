# SPDX-License-Identifier: MIT OR Apache-2.0
"""A library built with sanitizers finds what a kernel does to memory. Each run is a process that may die."""

import os
import subprocess
import sys

import pytest
from library import FOLDER

PROGRAM = """
import sys
from ctypes import CDLL, c_size_t, c_uint32, c_void_p
from library import Library
library, (kernel, count) = Library(sys.argv[1]), sys.argv[2:]
malloc = CDLL(None).malloc
malloc.restype = c_void_p
memory = c_void_p(malloc(c_size_t(32 * 4)))
library.launch(kernel, memory, c_uint32(int(count)), shared=32 * 4)
print("no fault")
"""


@pytest.fixture(scope="session", params=[False, True], ids=["thread-local", "static"])
def sanitized(request, build, tmp_path_factory):
    """(library, whether its shared memory is static)"""
    path = tmp_path_factory.mktemp("sanitized") / "libtest.so"
    build.build([FOLDER / "faults.cu"], path, sanitize="address,undefined", static_shared=request.param)
    return path, request.param


@pytest.fixture
def run(build, sanitized):
    def run(kernel, argument):
        environment = {**os.environ, **build.sanitizer_environment(), "PYTHONPATH": str(FOLDER)}
        command = [sys.executable, "-c", PROGRAM, sanitized[0], kernel, str(argument)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    return run


OVERRUNS = {
    "overrun_global": "heap-buffer-overflow",
    "overrun_dynamic_shared": "heap-buffer-overflow",
    "overrun_local": "stack-buffer-overflow",
    "overrun_static_shared": "global-buffer-overflow",
}


@pytest.mark.parametrize("kernel", OVERRUNS)
def test_an_overrun_is_found_where_it_happens(run, sanitized, kernel):
    if kernel == "overrun_static_shared" and not sanitized[1]:
        pytest.skip("thread-local arrays have no red zones")
    report = run(kernel, 4 if kernel == "overrun_local" else 1)
    assert f"AddressSanitizer: {OVERRUNS[kernel]}" in report
    assert f"in {kernel} " in report
    assert "no fault" not in report


@pytest.mark.parametrize("kernel", OVERRUNS)
def test_a_kernel_within_bounds_is_not_blamed(run, kernel):
    assert run(kernel, 0) == "no fault\n"


def test_undefined_behaviour_is_found(run):
    assert "runtime error: signed integer overflow" in run("signed_overflow", 2**31 - 1)


def test_a_stack_overflow_is_found(run):
    assert "AddressSanitizer: stack-overflow" in run("endless_recursion", 0)


def test_an_exception_of_a_kernel_is_told_under_the_sanitizer_too(run):
    assert "kernel throws, block (0, 0, 0), thread (3, 0, 0) threw: on purpose" in run("throws", 3)
