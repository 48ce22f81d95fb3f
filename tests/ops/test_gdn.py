# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated delta rule: every form against float64, and against the others on bits."""

from pathlib import Path

import launches_gdn as launches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launches_gdn import Inputs, Raw
from samples import bf16, same_bits

from metrale.reference.bf16 import bf16_bits, bf16_values
from metrale.reference.gdn import gated_delta_rule, raw_beta, raw_gate, unit_rows

VECTORS = Path(__file__).parents[1] / "data" / "gated_delta_rule.npz"
STATE_BOUND = 1e-6  # relative L2 of a head
F16_FLIPS = 2 * 2.0**-10  # a rounding that went the other way is an ulp; carried on, it may meet another
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
FEW_FORMS = ("wy", "wy table", "wyn", "wyn table")
MANY_FORMS = ("wyn", "wyn table")


def forms(tokens):
    return FEW_FORMS if tokens <= 4 else MANY_FORMS


def published(case):
    """A case of the vectors: inputs, outputs, and states by token."""
    with np.load(VECTORS) as file:
        part = {name.partition("_")[2]: file[name] for name in file.files if name.startswith(f"c{case}_")}
    x = Inputs(*(part[name] for name in ("h0", "q", "k", "v", "gate", "beta")))
    return x, part["out"], dict(zip(part["state_steps"].tolist(), part["states"], strict=True))


def random_inputs(batch=1, tokens=4, k_heads=1, v_heads=2, k_dim=16, v_dim=24, dtype=np.float32, seed=0):
    rng = np.random.default_rng([batch, tokens, k_heads, v_heads, k_dim, v_dim, seed])
    q, k = (bf16_bits(unit_rows(bf16(rng, batch, tokens, k_heads, k_dim))) for _ in "qk")
    h = rng.standard_normal((batch, v_heads, k_dim, v_dim)).astype(dtype)
    return Inputs(
        h, q, k, bf16(rng, batch, tokens, v_heads, v_dim),
        rng.uniform(0.2, 1.0, (batch, tokens, v_heads)).astype(np.float32),
        rng.uniform(0.0, 1.0, (batch, tokens, v_heads)).astype(np.float32),
    )  # fmt: skip


def reference(x, **options):
    return gated_delta_rule(x.h, x.query, x.key, x.value, x.gate, x.beta, carry_f16=x.h.dtype == np.float16, **options)


def assert_states(got, want):
    """Each head's state within 1e-6 in f32. In f16 it is the oracle's but for a few elements where a rounding went the
    other way."""
    if got.dtype == np.float16:
        other = got != want
        assert (other.sum(axis=(-2, -1)) <= 2 + (got.shape[-2] * got.shape[-1]) // 100).all()
        assert (np.abs(got - want) <= F16_FLIPS * np.abs(want).max(axis=(-2, -1), keepdims=True)).all()
        return
    error = np.linalg.norm(got.astype(np.float64) - want, axis=(-2, -1))
    assert (error <= STATE_BOUND * np.linalg.norm(want, axis=(-2, -1))).all()


def assert_outputs(bits, want, dtype=np.float32):
    """Rounded to bf16 from an f32 sum, whose error is relative to the row and not to the element."""
    size = np.linalg.norm(want, axis=-1, keepdims=True) / np.sqrt(want.shape[-1])
    inner = 2e-6 if dtype == np.float32 else F16_FLIPS
    assert (np.abs(bf16_values(bits) - want) <= 2.0**-8 * np.abs(want) + inner * size).all()


# the published cases


@pytest.mark.parametrize("case", range(5))
def test_published_outputs(device, case):
    x, out, _ = published(case)
    for b in range(len(x.h)):
        for form in forms(x.tokens):
            assert_outputs(launches.snapshots(device, form, x.sequence(b)).out, out[b : b + 1])


@pytest.mark.parametrize("case", range(5))
def test_published_states(device, case):
    x, _, states = published(case)
    for form in forms(x.tokens):
        for b in range(len(x.h)):
            kept = launches.snapshots(device, form, x.sequence(b)).states
            for step, state in states.items():
                assert_states(kept[step], state[b : b + 1])


@pytest.mark.parametrize("case", range(5))
def test_published_cases_without_their_states_kept(device, case):
    x, out, states = published(case)
    for is_table in (False, True):
        got, corrections = launches.verify(device, x, is_table)
        assert_outputs(got, out)
        for step, state in states.items():
            accepted = [step + 1] * len(x.h)
            assert_states(launches.commit(device, x, corrections, accepted, is_table), state)


@pytest.mark.parametrize("case", range(5))
def test_published_cases_in_f16(device, case):
    x, _, _ = published(case)
    x = x._replace(h=x.h.astype(np.float16))
    want = reference(x)
    got = launches.snapshots(device, "wyn table", x)
    assert_outputs(got.out, want.out, np.float16)
    assert_states(got.states, want.states)


# every number of tokens


@TYPES
@pytest.mark.parametrize("tokens", range(2, 18))
def test_every_number_of_tokens(gpu, tokens, dtype):
    x = random_inputs(tokens=tokens, dtype=dtype)
    want = reference(x)
    got = launches.snapshots(gpu, "wyn", x)
    assert_outputs(got.out, want.out, dtype)
    assert_states(got.states, want.states)


@TYPES
@pytest.mark.parametrize("tokens", range(2, 18))
def test_all_forms_have_the_same_bits(device, tokens, dtype):
    x = random_inputs(tokens=tokens, dtype=dtype)
    want = launches.snapshots(device, "wyn", x)
    for form in forms(tokens):
        got = launches.snapshots(device, form, x)
        assert same_bits(got.out, want.out)
        assert same_bits(got.states, want.states)


@TYPES
@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("tokens", range(2, 18))
def test_a_commit_has_the_bits_of_the_state_kept(device, tokens, is_table, dtype):
    x = random_inputs(tokens=tokens, dtype=dtype)
    kept = launches.snapshots(device, "wyn", x)
    out, corrections = launches.verify(device, x, is_table)
    assert same_bits(out, kept.out)
    for count in range(1, tokens + 1):
        assert same_bits(launches.commit(device, x, corrections, [count], is_table), kept.states[count - 1])


def test_corrections(gpu):
    x = random_inputs(batch=2, tokens=5)
    _, corrections = launches.verify(gpu, x)
    np.testing.assert_allclose(corrections, reference(x).corrections, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_table", [False, True])
def test_each_sequence_has_a_count_of_its_own(gpu, is_table):
    x = random_inputs(batch=5, tokens=3)
    kept = launches.snapshots(gpu, "wyn table", x).states
    _, corrections = launches.verify(gpu, x, is_table)
    committed = launches.commit(gpu, x, corrections, [3, 0, 1, 2, 0], is_table)
    wanted = [kept[2, 0], x.h[1], kept[0, 2], kept[1, 3], x.h[4]]
    assert same_bits(committed, np.stack(wanted))


@pytest.mark.parametrize(("count", "as_if"), [(-1, 0), (5, 4)])
def test_a_count_out_of_range_is_the_nearest_in_range(device, count, as_if):
    x = random_inputs(tokens=4)
    _, corrections = launches.verify(device, x)
    expected = launches.commit(device, x, corrections, [as_if])
    assert same_bits(launches.commit(device, x, corrections, [count]), expected)


# sequences


@pytest.mark.parametrize("form", ["wy table", "wyn table"])
def test_a_sequences_bits_depend_neither_on_the_batch_nor_on_its_place(gpu, form):
    x = random_inputs(batch=5, tokens=3)
    together = launches.snapshots(gpu, form, x)
    order = [3, 0, 4, 2, 1]
    shuffled = launches.snapshots(gpu, form, x.sequences(order))
    assert same_bits(shuffled.states, together.states[:, order])
    assert same_bits(shuffled.out, together.out[order])
    alone = launches.snapshots(gpu, "wyn", x.sequence(2))
    assert same_bits(alone.states, together.states[:, 2:3])


def test_bits_do_not_depend_on_the_size_of_the_blocks(gpu):
    """From 128 heads on a block has four warps."""
    x = random_inputs(batch=32, tokens=2, v_heads=4, k_dim=8, v_dim=40)
    together = launches.snapshots(gpu, "wyn table", x)
    alone = launches.snapshots(gpu, "wyn", x.sequence(31))
    assert same_bits(alone.states, together.states[:, 31:])
    assert same_bits(alone.out, together.out[31:])


# shapes


@TYPES
@settings(max_examples=25)
@given(
    batch=st.integers(1, 4),
    tokens=st.integers(2, 17),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 8)),
    k_dim=st.integers(1, 32).map(lambda n: 4 * n),
    v_dim=st.integers(1, 128),
    pad=st.integers(0, 3),
    shift=st.integers(0, 3),
)
def test_any_shape(host, dtype, batch, tokens, heads, k_dim, v_dim, pad, shift):
    x = random_inputs(batch, tokens, heads[0], heads[0] * heads[1], k_dim, v_dim, dtype)
    want = reference(x)
    got = launches.snapshots(host, "wyn table", x, pad, shift)
    assert_outputs(got.out, want.out, dtype)
    assert_states(got.states, want.states)
    out, corrections = launches.verify(host, x, True, pad, shift)
    assert same_bits(out, got.out)
    counts = np.arange(batch) % (tokens + 1)
    states = np.concatenate([x.h[None], got.states])[counts, np.arange(batch)]
    assert same_bits(launches.commit(host, x, corrections, counts, True, pad, shift), states)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 128), (64, 100), (4, 1), (36, 17)])
@pytest.mark.parametrize("form", FEW_FORMS)
def test_strides_and_places_of_any_kind(gpu, form, k_dim, v_dim):
    x = random_inputs(tokens=3, v_heads=3, k_dim=k_dim, v_dim=v_dim)
    plain = launches.snapshots(gpu, form, x)
    odd = launches.snapshots(gpu, form, x, pad=3, shift=1)
    assert same_bits(odd.out, plain.out)
    assert same_bits(odd.states, plain.states)


# gates


@pytest.mark.parametrize("gate", [0.0, 1.0, np.nan, -1.0, 2.0, np.inf, -np.inf, 1e-6])
def test_decays_are_clamped(gpu, gate):
    x = random_inputs()
    x.gate[:] = gate
    want = reference(x)
    got = launches.snapshots(gpu, "wyn", x)
    assert_states(got.states, want.states)
    assert same_bits(launches.verify(gpu, x)[0], got.out)


def raw_inputs():
    x = random_inputs(batch=2, tokens=5, v_heads=4)
    rng = np.random.default_rng(7)
    x = x._replace(
        query=bf16(rng, *x.query.shape),
        key=bf16(rng, *x.key.shape),
        gate=rng.normal(0, 4, x.gate.shape).astype(np.float32),
        beta=rng.normal(0, 2, x.beta.shape).astype(np.float32),
    )
    return x, Raw(rng.normal(0, 1, 4).astype(np.float32), rng.normal(0, 1, 4).astype(np.float32), True)


def test_raw_inputs(gpu):
    x, raw = raw_inputs()
    got, corrections = launches.verify(gpu, x, raw=raw)
    want = gated_delta_rule(
        x.h, unit_rows(x.query), unit_rows(x.key), x.value, raw_gate(x.gate, raw.a_log, raw.dt_bias), raw_beta(x.beta)
    )
    assert_outputs(got, want.out)
    assert_states(
        launches.commit(gpu, x, corrections, [5, 2], raw=raw), np.stack([want.states[4, 0], want.states[1, 1]])
    )


def test_raw_gates_far_from_zero(device):
    x, raw = raw_inputs()
    x.gate[:] = np.resize([-200, -30, 25, 1000], x.gate.shape)
    _, corrections = launches.verify(device, x, raw=raw)
    decays = raw_gate(x.gate, raw.a_log, raw.dt_bias)
    want = gated_delta_rule(x.h, unit_rows(x.query), unit_rows(x.key), x.value, decays, raw_beta(x.beta))
    assert_states(launches.commit(device, x, corrections, [5, 5], raw=raw), want.states[4])


# the shapes of models


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize("tokens", [2, 4, 16, 17])
def test_the_heads_of_a_real_layer(cuda, tokens, dtype):
    x = random_inputs(4, tokens, 16, 48, 128, 128, dtype)
    want = reference(x)
    got = launches.snapshots(cuda, "wyn table", x)
    assert_outputs(got.out, want.out, dtype)
    assert_states(got.states, want.states)
    out, corrections = launches.verify(cuda, x)
    assert same_bits(out, got.out)
    assert same_bits(launches.commit(cuda, x, corrections, [tokens] * 4), got.states[-1])
