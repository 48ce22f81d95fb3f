# SPDX-License-Identifier: MIT OR Apache-2.0
from pathlib import Path

import pytest
from library import ORDERS, Library, load_build

FOLDER = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def build():
    """cuda/host/build.py as a module."""
    return load_build()


@pytest.fixture(scope="session")
def library(build, tmp_path_factory):
    """The kernels of this folder."""
    path = tmp_path_factory.mktemp("host") / "libtest.so"
    build.build([FOLDER / "collectives.cu", FOLDER / "faults.cu"], path)
    return Library(path)


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param
