# SPDX-License-Identifier: MIT OR Apache-2.0
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    return Path(__file__).parents[1] / "data" / "tiny-v41.gguf"
