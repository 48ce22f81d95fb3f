# SPDX-License-Identifier: MIT OR Apache-2.0
"""A launch takes nothing from the heap: neither from malloc, nor from Python's allocator.

heap/launches.py measures it in a process of its own: allocations are counted by the library that asks for them, with
PYTHONMALLOC=malloc, so that Python's own come from malloc too. The CUDA backend is measured on a GPU, and anywhere with
heap/fake_driver.c for a driver. What the device's side takes is not counted: the driver's own allocations, and on the
host those of the library that runs the kernels.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("heap")
LAUNCHES = 1000
DRIVERS = [("host", "real"), ("cuda", "fake"), pytest.param("cuda", "real", marks=pytest.mark.gpu)]
WAYS = (
    "builder",
    "builder_with_buffers",
    "builder_with_shared_mem",
    "prepared_launch",
    "prepared_launch_with_arguments_set",
    "op",
    "op_with_buffers",
)
WAYS_ON_A_STREAM = ("builder_on_a_stream", "prepared_launch_on_a_stream", "op_on_a_stream")
# The libraries of the device's side, and of the system, which a driver calls.
DEVICE_SIDE = {
    ("host", "real"): r"libmetrale_host\.so",
    ("cuda", "fake"): r"libcuda\.so.*",
    ("cuda", "real"): r"(libcuda|libnvidia-.*|libc|ld-linux-.*)\.so.*",
}


def compiled(source, library):
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, FOLDER / source, "-ldl"], check=True)


@functools.cache
def measured(kind, driver):
    """What launches.py prints, and nothing on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder, "count_mallocs.so")
        compiled("count_mallocs.c", shim)
        env = os.environ | {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}
        if driver == "fake":
            compiled("fake_driver.c", Path(folder, "libcuda.so.1"))
            env["LD_LIBRARY_PATH"] = folder
        done = subprocess.run(
            [sys.executable, FOLDER / "launches.py", kind, driver], env=env, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def mallocs(way, kind, driver):
    """The counts of all libraries but those of the device's side."""
    counts = measured(kind, driver)[way]["mallocs"]
    return {name: n for name, n in counts.items() if not re.fullmatch(DEVICE_SIDE[kind, driver], name)}


@pytest.mark.parametrize(("kind", "driver"), DRIVERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_launch_allocates_nothing(way, kind, driver, cache_folder):
    assert mallocs(way, kind, driver) == {}


# The host looks a stream up among Python integers.
@pytest.mark.parametrize(("kind", "driver"), DRIVERS[1:])
@pytest.mark.parametrize("way", WAYS_ON_A_STREAM)
def test_a_launch_on_a_stream_allocates_nothing(way, kind, driver, cache_folder):
    assert mallocs(way, kind, driver) == {}


@pytest.mark.parametrize(("kind", "driver"), DRIVERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_launch_takes_no_memory_of_python(way, kind, driver, cache_folder):
    assert measured(kind, driver)[way]["traced"] == [0, 0]


@pytest.mark.parametrize(("kind", "driver"), DRIVERS)
def test_one_allocation_a_launch_would_be_seen(kind, driver, cache_folder):
    assert sum(mallocs("one_allocation_more", kind, driver).values()) == LAUNCHES
    assert measured(kind, driver)["one_allocation_more"]["traced"][1] > 0
