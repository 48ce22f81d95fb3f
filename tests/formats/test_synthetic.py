# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors made in memory."""

from dataclasses import replace

from metrale.formats.synthetic import random_engram_layer, random_moe_layer
from metrale.reference.kquant import dequantize


def test_tensors_compare_by_identity():
    tensor = random_moe_layer(0, dim=256, inter=256, n_routed=1, topk=1).gate
    assert tensor == tensor
    assert tensor != replace(tensor)


def test_an_engram_layer_has_weights_near_a_variance_of_one_over_k_and_a_table_as_large_as_its_hash_says():
    spec = random_engram_layer(0, dim=64, hc=2, heads=2, max_ngram=3, table_rows=100)
    values = dequantize(spec.wkv.type, spec.wkv.numpy())
    assert values.shape == (192, 1024)
    assert 0.5 <= values.var() * 1024 <= 2
    assert spec.table.shape == (spec.hash.table_rows[0], 256)
    assert spec.table.shape[0] >= 100
