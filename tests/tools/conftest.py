# SPDX-License-Identifier: MIT OR Apache-2.0
"""The modules of tools/, which are not installed."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="session")
def tool():
    """`tool(name)`: the module of that name."""
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module
    sys.path.remove(str(TOOLS))
