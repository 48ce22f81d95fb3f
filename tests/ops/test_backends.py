# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host and the GPU give the same results, and the GPU gives the same bits every time."""

import launches
import launches_conv1d
import launches_engram
import launches_gdn
import launches_gemm
import numpy as np
import pytest
from samples import KINDS, assert_near, bf16, kquant_rows

from metrale.formats.kquant import Q2_K, Q3_K
from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.gdn import unit_rows
from metrale.reference.kquant import quantize_q8_1_rows

AGREEMENT = 1e-3


def q8_1(rng, *shape):
    return quantize_q8_1_rows(bf16(rng, *shape)).stored


def as_values(array):
    return bf16_values(array) if array.dtype == np.uint16 else np.asarray(array, np.float64)


def delta_rule(rng):
    """Three sequences of four tokens, their keys of length 1."""
    q, k = (bf16_bits(unit_rows(bf16(rng, 3, 4, 1, 128))) for _ in "qk")
    gate, beta = rng.uniform(0.2, 1, (2, 3, 4, 2)).astype(np.float32)
    h = rng.standard_normal((3, 2, 128, 128), np.float32)
    return launches_gdn.Inputs(h, q, k, bf16(rng, 3, 4, 2, 128), gate, beta)


KERNELS = {
    "dense_gemv_bf16": lambda gpu, rng: launches.dense_gemv(gpu, bf16(rng, 2048), bf16(rng, 300, 2048)),
    **{
        form: lambda gpu, rng, form=form: launches_gemm.dense_gemm(gpu, form, bf16(rng, 20, 520), bf16(rng, 150, 520))
        for form in launches_gemm.KERNELS
    },
    "engram_v41_wkv_q2k_gemv": lambda gpu, rng: launches_engram.wkv_gemv(
        gpu, bf16(rng, 2304), kquant_rows(rng, Q2_K, 300, 2304)
    ),
    "engram_v41_gate": lambda gpu, rng: launches_engram.gate(
        gpu,
        rng.standard_normal((3, 4, 5120), np.float32),
        bf16(rng, 3, 5 * 5120),
        rng.standard_normal((4, 5120), np.float32),
        1e-6,
    ),
    "causal_conv1d_update_chunk2": lambda gpu, rng: launches.conv1d_update_chunk2(
        gpu, rng.standard_normal((2, 300, 4), np.float32), bf16(rng, 2, 2, 300), bf16(rng, 300, 4)
    ),
    "causal_conv1d_update_chunk5": lambda gpu, rng: launches_conv1d.chunk(
        gpu, rng.standard_normal((2, 300, 4), np.float32), bf16(rng, 2, 5, 300), bf16(rng, 300, 4)
    ),
    "gated_delta_rule_wyn4": lambda gpu, rng: tuple(launches_gdn.snapshots(gpu, "wyn table", delta_rule(rng))),
    "gated_delta_rule_verify4": lambda gpu, rng: launches_gdn.verify(gpu, delta_rule(rng)),
    "moe_v41_swiglu": lambda gpu, rng: launches.swiglu(gpu, bf16(rng, 6, 2304), bf16(rng, 6, 2304), None, 10.0),
    "moe_v41_sum_rows": lambda gpu, rng: launches.sum_rows(
        gpu, rng.standard_normal(5120, np.float32), bf16(rng, 6, 5120)
    ),
    "kquant_swiglu_q8_1_rows_bf16": lambda gpu, rng: launches.swiglu_quantise(
        gpu, bf16(rng, 6, 2304), bf16(rng, 6, 2304), None, 10.0
    )[0],
    **{
        form: lambda gpu, rng, form=form: launches.router(gpu, form, bf16(rng, 8, 2304), bf16(rng, 40, 2304))
        for form in launches.ROUTERS
    },
    **{
        f"kquant_mmvq_{kind}": lambda gpu, rng, kind=kind: launches.mmvq(
            gpu, kind, kquant_rows(rng, kind, 64, 2304), q8_1(rng, 3, 2304)
        )
        for kind in KINDS
    },
    **{
        f"kquant_mmvq_{kind}_experts": lambda gpu, rng, kind=kind: launches.mmvq_experts(
            gpu, kind, kquant_rows(rng, kind, 3, 64, 1280), q8_1(rng, 1, 1280), 8
        )
        for kind in (Q2_K, Q3_K)
    },
}
EXACT = {
    "kquant_q8_1_rows_bf16": lambda gpu, rng: launches.quantise(gpu, bf16(rng, 8, 5120)),
    "kquant_probe_decode": lambda gpu, rng: launches.decode(gpu, Q3_K, kquant_rows(rng, Q3_K, 100, 256)),
    "dequant_q2_k_to_bf16": lambda gpu, rng: launches_engram.dequant_q2_k(gpu, kquant_rows(rng, Q2_K, 100, 256)),
    "engram_v41_rows_gather": lambda gpu, rng: launches_engram.rows_gather(
        gpu, rng.integers(0, 40, 60), kquant_rows(rng, Q2_K, 40, 256)
    )[0],
    "moe_v41_finish": lambda gpu, rng: launches.finish(gpu, rng.standard_normal(5120, np.float32)),
    "moe_v41_accumulate": lambda gpu, rng: launches.accumulate(
        gpu, rng.standard_normal(999, np.float32), bf16(rng, 999)
    ),
    "moe_v41_route_select": lambda gpu, rng: tuple(
        launches.route_select(gpu, rng.standard_normal(384, np.float32), None, 6, gate_temp=0.8, route_scale=1.5)
    ),
    "route_probe_scores": lambda gpu, rng: launches.route_scores(gpu, np.linspace(-200, 50, 9999, dtype=np.float32)),
}


def result(kernels, name, gpu):
    """The kernel's outputs on the same random inputs each time."""
    outputs = kernels[name](gpu, np.random.default_rng(0))
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_host_and_gpu_agree(host, cuda, name):
    for on_host, on_gpu in zip(result(KERNELS, name, host), result(KERNELS, name, cuda), strict=True):
        assert_near(as_values(on_gpu), as_values(on_host), AGREEMENT)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_host_and_gpu_give_the_same_bits(host, cuda, name):
    on_host, on_gpu = result(EXACT, name, host), result(EXACT, name, cuda)
    assert [a.tobytes() for a in on_host] == [a.tobytes() for a in on_gpu]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*KERNELS, *EXACT])
def test_twenty_runs_give_the_same_bits(cuda, name):
    runs = {tuple(a.tobytes() for a in result(KERNELS | EXACT, name, cuda)) for _ in range(20)}
    assert len(runs) == 1


@pytest.mark.parametrize("name", [*KERNELS, *EXACT])
def test_the_order_of_threads_does_not_show(opened, name):
    orders = [opened(f"host-{order}") for order in ("forward", "reversed", "shuffled")]
    assert len({tuple(a.tobytes() for a in result(KERNELS | EXACT, name, gpu)) for gpu in orders}) == 1
