# SPDX-License-Identifier: MIT OR Apache-2.0
"""The layers that the tests of this folder run."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np

from metrale.formats.load import load_moe_layer
from metrale.moe_v41 import MoeV41

DATA = Path(__file__).resolve().parent.parent / "data"
TINY = DATA / "tiny-v41.gguf"


@contextmanager
def running(gpu, layer, path=TINY):
    """`(moe, loaded)` of a layer of a file, given back at the end."""
    loaded = load_moe_layer(gpu, path, layer)
    try:
        moe = MoeV41(gpu, loaded.cfg)
        try:
            moe.add_layer(layer, loaded.weights, loaded.experts)
            yield moe, loaded
        finally:
            moe.free()
    finally:
        loaded.free()


def forward(gpu, moe, layer, x, **options):
    """The output's bf16 bits for one token's bf16 bits."""
    with gpu.upload(x, "x") as staged:
        out = np.full(len(x), 0xFFFF, np.uint16)
        gpu.memset(moe.out_ptr(), 0xFF, out.nbytes)
        gpu.copy_d2h(moe.forward(layer, staged, **options), out)
    return out
