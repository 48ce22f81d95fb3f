# SPDX-License-Identifier: MIT OR Apache-2.0
from pathlib import Path

import pytest

PROBES = Path(__file__).with_name("probes.cu")


@pytest.fixture
def probe(device):
    """`probe(name)`: a kernel of probes.cu on the device."""
    if not device.has_module("probes"):
        device.add_module(PROBES)
    return lambda name: device.kernel("probes", name)
