# SPDX-License-Identifier: MIT OR Apache-2.0
import os

import pytest
from library import FOLDER, ORDERS, Library, load_build


@pytest.fixture(scope="session")
def build():
    """cuda/host/build.py as a module."""
    return load_build()


@pytest.fixture(scope="session")
def library(build, tmp_path_factory):
    """The kernels of this folder. METRALE_HOST_SANITIZE says with which sanitizers."""
    path = tmp_path_factory.mktemp("host") / "libtest.so"
    build.build(
        [FOLDER / "collectives.cu", FOLDER / "faults.cu"],
        path,
        sanitize=os.environ.get("METRALE_HOST_SANITIZE", ""),
    )
    return Library(path)


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param
