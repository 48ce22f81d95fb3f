# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors made in memory."""

from dataclasses import replace

from metrale.formats.synthetic import random_moe_layer


def test_tensors_compare_by_identity():
    tensor = random_moe_layer(0, dim=256, inter=256, n_routed=1, topk=1).gate
    assert tensor == tensor
    assert tensor != replace(tensor)
