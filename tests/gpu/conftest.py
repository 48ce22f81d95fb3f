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


@pytest.fixture
def stream(device):
    """A stream of the test's own, which it may leave captured."""
    handle = device.create_stream()
    yield handle
    device.abort_capture_if_active(handle)
    device.destroy_stream(handle)


@pytest.fixture
def event(device):
    """An event of the test's own."""
    handle = device.create_event()
    yield handle
    device.destroy_event(handle)
