# SPDX-License-Identifier: MIT OR Apache-2.0
from pathlib import Path

import numpy as np
import pytest

from metrale.formats.deepseek41 import moe_layer_spec
from metrale.formats.gguf import GgufFile
from metrale.reference.moe import MoeLayer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def kquant_blocks():
    with np.load(DATA / "kquant_blocks.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="session")
def tiny_expected():
    with np.load(DATA / "tiny_v41_expected.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="session", params=[0, 1])
def tiny_layer(request):
    """A layer of the small model, and the prefix of its expected values."""
    with GgufFile(DATA / "tiny-v41.gguf") as opened:
        return MoeLayer.of(moe_layer_spec(opened, request.param)), f"moe{request.param}"
