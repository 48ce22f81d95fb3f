# SPDX-License-Identifier: MIT OR Apache-2.0
"""Cython code of another package that cimports metrale, compiled against the installation."""

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import metrale

SOURCE = Path(__file__).with_name("embedded.pyx")
ONE = 0x3F80  # bf16


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedded")
    unit, library = folder / "embedded.cpp", folder / f"embedded{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    subprocess.run([sys.executable, "-m", "cython", "--cplus", SOURCE, "-o", unit], check=True, cwd=folder)
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([*compiler, "-std=c++17", "-shared", "-fPIC", include, unit, "-o", library], check=True)
    spec = importlib.util.spec_from_file_location("embedded", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_launcher_of_its_own(embedded):
    with metrale.open("host") as gpu:
        kernel = gpu.kernel("moe_v41", "moe_v41_accumulate")
        with gpu.upload(np.arange(8, dtype=np.float32)) as acc, gpu.upload(np.full(8, ONE, np.uint16)) as src:
            embedded.accumulate(gpu, kernel, acc, src, 8)
            assert acc.numpy("float32").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_wrong_call_is_refused_before_the_launch(embedded):
    with metrale.open("host") as gpu, gpu.buffer(16) as buffer:
        kernel = gpu.kernel("gemv", "dense_gemv_bf16")
        with pytest.raises(metrale.errors.LaunchError, match="got 3 arguments, takes 5"):
            embedded.accumulate(gpu, kernel, buffer, buffer, 1)


def test_a_launcher_of_the_package(embedded):
    with metrale.open("host") as gpu:
        kernel = gpu.kernel("moe_v41", "moe_v41_accumulate")
        with gpu.upload(np.zeros(8, np.float32)) as acc, gpu.upload(np.full(8, ONE, np.uint16)) as src:
            embedded.accumulate_with_ops(gpu, kernel, acc.ptr, src.ptr, 8)
            assert acc.numpy("float32").tolist() == [1] * 8
