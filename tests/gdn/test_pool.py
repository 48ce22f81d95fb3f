# SPDX-License-Identifier: MIT OR Apache-2.0
"""GdnVerifyPool: after accept, the states are those of plain decoding of what was accepted."""

import models
import numpy as np
import pytest
from models import K_MAX, LAYERS, Reference, Step, assert_states, pool_of, states, step, tokens_of

from metrale.errors import ArgumentError, CaptureError, MetraleError
from metrale.gpu import Graph
from metrale.reference.bf16 import bf16_values
from metrale.reference.conv1d import conv1d_update
from metrale.reference.gdn import gated_delta_rule

MODES = pytest.mark.parametrize("mode", ["snapshot", "deferred"])


@pytest.fixture
def pool(device, mode):
    made = pool_of(device, mode)
    yield made
    made.free()


def layers(seed, batch, tokens=K_MAX):
    return [tokens_of([seed, layer], batch, tokens) for layer in range(LAYERS)]


@MODES
@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 2, 3], [4, 1, 2]])
def test_a_step_and_what_is_accepted_of_it(pool, counts):
    reference, ids, tokens = Reference(), [3, 0, 2], layers(0, 3)
    step(pool, ids, tokens)
    pool.accept(ids, counts)
    reference.decode(ids, tokens, counts)
    assert_states(pool, reference)


@MODES
def test_steps_of_changing_batches(pool):
    reference, rng = Reference(), np.random.default_rng(0)
    for i in range(12):
        ids = rng.permutation(models.SEQS)[: 1 + i % models.SEQS].tolist()
        k = int(rng.integers(2, K_MAX + 1))
        tokens = layers(i, len(ids), k)
        counts = rng.integers(1 if pool.cfg.mode == "snapshot" else 0, k + 1, len(ids)).tolist()
        step(pool, ids, tokens, pad=i % 3)
        pool.accept(ids, counts, tokens=k)
        reference.decode(ids, tokens, counts)
    assert_states(pool, reference)


@MODES
def test_outputs(pool):
    first, second = layers(0, 2), layers(1, 2)
    step(pool, [1, 4], first)
    pool.accept([1, 4], [2, 3])
    outs = step(pool, [1, 4], second)
    reference = Reference()
    reference.decode([1, 4], first, [2, 3])
    for layer, tokens in enumerate(second):
        want = gated_delta_rule(reference.h[layer, [1, 4]], *tokens[1:]).out
        np.testing.assert_allclose(bf16_values(outs[layer]), want, rtol=2**-8, atol=1e-5)


@MODES
def test_outputs_of_the_convolution(pool):
    (tokens, *_) = layers(0, 2)
    with Step(pool, [0, 3], tokens) as one:
        one.run(0)
        got = bf16_values(one.conv_out.numpy("uint16")).reshape(tokens.x.shape)
    want = conv1d_update(np.zeros((2, models.CHANNELS, 4), np.float32), tokens.x, models.WEIGHT).out
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-6)


def test_both_modes_give_the_same_bits(device):
    found = []
    for mode in ("snapshot", "deferred"):
        pool = pool_of(device, mode)
        for seed in range(4):
            step(pool, [0, 1], layers(seed, 2))
            pool.accept([0, 1], [1 + seed, 4 - seed])
        found.append([array.tobytes() for layer in range(LAYERS) for array in states(pool, layer, 1)])
        pool.free()
    assert found[0] == found[1]


@MODES
def test_f16_states(device, mode):
    pool, tokens = pool_of(device, mode, dtype="f16"), layers(0, 1)
    step(pool, [2], tokens)
    pool.accept([2], [3])
    want = gated_delta_rule(np.zeros((1, models.V_HEADS, models.K_DIM, models.V_DIM)), *tokens[0][1:], carry_f16=True)
    np.testing.assert_allclose(states(pool, 0, 2)[0], want.states[2, 0], rtol=2**-10, atol=2**-13)
    pool.free()


@pytest.mark.parametrize("mode", ["deferred"])
def test_nothing_accepted_leaves_everything(pool):
    step(pool, [0, 1], layers(0, 2))
    pool.accept([0, 1], [2, 2])
    before = states(pool, 1, 1)
    step(pool, [0, 1], layers(1, 2))
    pool.accept([0, 1], [3, 0])
    assert [a.tobytes() for a in states(pool, 1, 1)] == [a.tobytes() for a in before]


@pytest.mark.parametrize("mode", ["deferred"])
def test_counts_on_the_device(pool):
    reference, tokens = Reference(), layers(0, 3)
    step(pool, [4, 1, 0], tokens)
    with pool.gpu.upload(np.array([0, 2, 4], np.int32)) as counts:
        pool.accept([4, 1, 0], counts)
        reference.decode([4, 1, 0], tokens, [0, 2, 4])
        assert_states(pool, reference)


@MODES
def test_a_batch_of_more_than_32(device, mode):
    seqs, ids = 35, np.random.default_rng(0).permutation(35).tolist()
    pool, reference = pool_of(device, mode, seqs=seqs), Reference(seqs)
    for seed in range(2):
        tokens, counts = layers(seed, seqs), np.resize([1, 2, 3, 4], seqs).tolist()
        step(pool, ids, tokens, pad=1)
        pool.accept(ids, counts)
        reference.decode(ids, tokens, counts)
    assert_states(pool, reference)
    pool.free()


@MODES
def test_a_reset_sequence_begins_anew_and_the_others_go_on(pool):
    reference, tokens = Reference(), layers(0, 2)
    step(pool, [1, 2], tokens)
    pool.accept([1, 2], [2, 3])
    reference.decode([1, 2], tokens, [2, 3])
    pool.reset(1)
    reference.reset(1)
    assert_states(pool, reference)


# the table


@MODES
def test_a_batch_that_stays_the_same_is_uploaded_once(pool):
    for seed in range(3):
        step(pool, [2, 0], layers(seed, 2))
        pool.accept([2, 0], [K_MAX, K_MAX])
    assert pool.uploads == 1


def test_a_rejected_token_changes_the_table_of_snapshots(device):
    pool = pool_of(device, "snapshot")
    step(pool, [2, 0], layers(0, 2))
    pool.accept([2, 0], [K_MAX, 1])
    assert pool.uploads == 2
    pool.free()


@MODES
def test_a_captured_step_stays_valid(pool, mode):
    """It reads the table, which accept keeps up to date. The host has no graphs: there the step is queued again."""
    reference, tokens = Reference(), tokens_of(0, 2)
    all_layers = [tokens] * LAYERS
    pool.stage([3, 1])
    with Step(pool, [3, 1], tokens) as one:

        def run():
            for layer in range(LAYERS):
                one.run(layer)

        graph = None
        for counts in ([1, 4], [3, 2], [4, 4]):
            graph.launch() if graph else run()
            pool.accept([3, 1], counts)
            reference.decode([3, 1], all_layers, counts)
            if graph is None and pool.gpu.kind == "cuda":
                with Graph(pool.gpu) as graph:
                    run()
        if graph:
            graph.free()
    assert_states(pool, reference)
    eager = pool_of(pool.gpu, mode)
    for counts in ([1, 4], [3, 2], [4, 4]):
        step(eager, [3, 1], all_layers)
        eager.accept([3, 1], counts)
    assert [a.tobytes() for a in states(pool, 1, 3)] == [a.tobytes() for a in states(eager, 1, 3)]
    eager.free()


@MODES
def test_a_capture_cannot_change_the_table(device, mode):
    pool = pool_of(device, mode)
    device.begin_capture()
    try:
        with pytest.raises(CaptureError, match=r"stage\(seq_ids\) before it"):
            pool.stage([0])
    finally:
        device.abort_capture_if_active()
    pool.free()


def test_snapshots_are_not_accepted_in_a_capture(device):
    pool = pool_of(device, "snapshot")
    before = pool.h_ptr(0, 0)
    device.begin_capture()
    try:
        with pytest.raises(CaptureError, match="changes the table of a batch, which a capture cannot"):
            pool.accept([0], [1])
    finally:
        device.abort_capture_if_active()
    assert pool.h_ptr(0, 0) == before
    pool.free()


# refusals


@MODES
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": 2}, r"layer: got 2, allowed: an integer, 0 to 1"),
        ({"seq_ids": [5]}, r"seq_ids: got 5, allowed: an integer, 0 to 4"),
        ({"seq_ids": [1, 1]}, r"seq_ids: got \(1, 1\), allowed: one sequence or more, each once"),
        ({"seq_ids": []}, r"seq_ids: got \(\), allowed: one sequence or more, each once"),
        ({"tokens": 5}, r"tokens: got 5, allowed: an integer, 2 to 4"),
        ({"tokens": 1}, r"tokens: got 1, allowed: an integer, 2 to 4"),
        ({"q": None}, r"q: got None, allowed: a device pointer that is not null"),
        ({"qk_stride": 7}, r"qk_stride: got 7, allowed: an integer, 8 to 4294967295"),
        ({"v_stride": 23}, r"v_stride: got 23, allowed: an integer, 24 to 4294967295"),
        ({"gb_stride": 1}, r"gb_stride: got 1, allowed: an integer, 2 to 4294967295"),
    ],
)
def test_what_verify_refuses(pool, changed, message):
    with pool.gpu.buffer(4096) as b:
        pointers = dict.fromkeys(("q", "k", "v", "gate", "beta", "out"), b)
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            pool.verify(**({"layer": 0, "seq_ids": [0], **pointers} | changed))


@pytest.mark.parametrize(
    ("mode", "counts", "message"),
    [
        ("snapshot", [1, 0], r"counts: got 0, allowed: an integer, 1 to 4"),
        ("snapshot", [5, 1], r"counts: got 5, allowed: an integer, 1 to 4"),
        ("snapshot", [1], r"counts: got \[1\], allowed: 2 integers, one for each sequence"),
        ("snapshot", 4096, r"counts: got 4096, allowed: 2 integers, one for each sequence"),
        ("deferred", [-1, 1], r"counts: got -1, allowed: an integer, 0 to 4"),
        ("deferred", [5, 1], r"counts: got 5, allowed: an integer, 0 to 4"),
        ("deferred", [1, 2, 3], r"counts: got \[1, 2, 3\], allowed: 2 integers, one for each sequence"),
        ("deferred", None, r"counts: got None, allowed: a device pointer that is not null"),
    ],
)
def test_what_accept_refuses(pool, counts, message):
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        pool.accept([0, 1], counts)


@pytest.mark.parametrize("mode", ["snapshot"])
def test_a_refused_accept_changes_nothing(pool):
    before = pool.h_ptr(0, 0)
    with pytest.raises(ArgumentError):
        pool.accept([0, 1], [1, 0])
    assert pool.h_ptr(0, 0) == before


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[("k_max", k, "an integer, 2 to 17") for k in (1, 18)],
        *[(name, 0, "an integer, 1 to 16777216") for name in ("layers", "seqs", "num_k_heads", "num_v_heads")],
        *[("k_dim", dim, "a multiple of 4, 4 to 128") for dim in (2, 126)],
        *[(name, dim, "an integer, 1 to 128") for name in ("k_dim", "v_dim") for dim in (0, 129)],
        ("num_v_heads", 3, "a positive multiple of 2"),
        ("conv_width", 3, "4"),
        ("dtype", "bf16", "f32 or f16"),
        ("mode", "lazy", "snapshot or deferred"),
    ],
)
def test_what_the_pool_refuses(host, name, value, allowed):
    good = {"layers": 1, "seqs": 1, "k_max": 2, "num_k_heads": 2, "num_v_heads": 4, "k_dim": 8, "v_dim": 8}
    with pytest.raises(ArgumentError, match=f"^{name}: got {value!r}, allowed: {allowed}$"):
        models.GdnVerifyPool(host, **(good | {name: value}))


@MODES
def test_a_freed_pool_is_refused(device, mode):
    pool = pool_of(device, mode)
    pool.free()
    pool.free()
    for call in (lambda: pool.accept([0], [1]), lambda: pool.stage([0]), lambda: pool.reset(0)):
        with pytest.raises(MetraleError, match="the GdnVerifyPool has been freed"):
            call()


@MODES
def test_the_ledger_holds_the_buffers_of_the_table(device, mode):
    with device.audit("pool") as scope:
        pool = pool_of(device, mode)
        held = {record.tag: record.nbytes for record in scope.leaked}
        table = {f"GdnVerifyPool.{spec.name}": max(spec.nbytes, 16) for spec in pool.cfg.buffer_table()}
        pool.free()
    assert held == table
