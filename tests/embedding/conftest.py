# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package saxpy_demo, built as its author would build it: by pip, against the metrale that is installed."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("saxpy_demo")


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory):
    """The folder into which pip installed the package. Nothing is built in the source tree."""
    folder = tmp_path_factory.mktemp("embedding")
    shutil.copytree(SOURCE, folder / "source")
    # An environment's tools lie beside its interpreter, and need not be on the path.
    tools = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--target", folder / "installed"]
    command = [sys.executable, "-m", "pip", "install", *options, folder / "source"]
    done = subprocess.run(command, cwd=folder, env=tools, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "installed"


@pytest.fixture(scope="session")
def saxpy_demo(demo_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(demo_folder)
        yield importlib.import_module("saxpy_demo")
