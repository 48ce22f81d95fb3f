# SPDX-License-Identifier: MIT OR Apache-2.0
"""What sequences keep, by architecture, against the sizes that the models' papers and runtimes give."""

import pytest

ATTENTION = ("attn_q", "attn_k", "attn_v")
LATENT = ("attn_q_a", "attn_kv_a_mqa", "attn_k_b", "attn_v_b")
DELTA = ("attn_qkv", "attn_gate", "ssm_ba", "ssm_conv1d", "ssm_out")
MAMBA = ("ssm_in", "ssm_conv1d", "ssm_x", "ssm_out")

LLAMA3_8B = {
    "block_count": 32,
    "embedding_length": 4096,
    "context_length": 8192,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
}
QWEN3_NEXT = {
    "block_count": 48,
    "attention.head_count": 16,
    "attention.head_count_kv": 2,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
}
MLA = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}


def layers(names_of, count):
    return {f"blk.{n}.{name}.weight": ("F32", (2,)) for n in range(count) for name in names_of(n)}


def one(made):
    assert len(made.states) == 1
    return made.states[0]


def test_llama_3_8b_keeps_128_kib_a_token(planned):
    made = planned("llama", LLAMA3_8B, layers(lambda n: ATTENTION, 32), context=1000)
    assert made.state_bytes == 1000 * (128 << 10)
    assert one(made).form == "keys and values"
    assert one(made).keys == ("llama.attention.head_count_kv", "llama.embedding_length", "llama.attention.head_count")


def test_all_sequences_keep_a_state_and_a_token_reads_one(planned):
    made = planned("llama", LLAMA3_8B, layers(lambda n: ATTENTION, 32), context=1000, seqs=7)
    assert (made.state_bytes, one(made).read_bytes) == (7 * 1000 * (128 << 10), 1000 * (128 << 10))


def test_deepseek_v2_keeps_576_values_a_token_and_layer(planned):
    made = planned("deepseek2", MLA, layers(lambda n: LATENT, 60), context=4096)
    assert (one(made).form, made.state_bytes) == ("latent", 60 * 4096 * 576 * 2)
    assert one(made).keys == ("deepseek2.attention.kv_lora_rank", "deepseek2.rope.dimension_count")


def test_an_indexer_keeps_its_own_keys_and_bounds_the_latents_that_are_read(planned):
    keys = MLA | {"attention.indexer.key_length": 128, "attention.indexer.top_k": 2048}
    made = planned("deepseek2", keys, layers(lambda n: (*LATENT, "indexer.attn_k"), 1), context=10_000)
    assert made.state_bytes == 2 * 10_000 * (576 + 128)
    assert sum(state.read_bytes for state in made.states) == 2 * (2048 * 576 + 10_000 * 128)


def test_qwen3_next_keeps_delta_rule_states_in_three_layers_of_four(planned):
    made = planned("qwen3next", QWEN3_NEXT, layers(lambda n: ATTENTION if n % 4 == 3 else DELTA, 48), context=1)
    states = {state.form: state for state in made.states}
    h, windows = 32 * 128 * 128, 8192 * 4
    assert (len(states["gated delta rule"].layers), len(states["keys and values"].layers)) == (36, 12)
    assert states["gated delta rule"].nbytes == 36 * 4 * (h + windows)
    assert states["keys and values"].nbytes == 12 * 2 * 2 * 512


def test_a_delta_rule_state_does_not_grow_with_the_context(planned):
    tensors = layers(lambda n: DELTA, 48)
    short, long = (planned("qwen3next", QWEN3_NEXT, tensors, context=n).state_bytes for n in (1, 100_000))
    assert short == long


def test_mamba_keeps_its_state_and_convolution_window(planned):
    keys = {"ssm.inner_size": 1024, "ssm.state_size": 16, "ssm.conv_kernel": 4}
    made = planned("mamba", keys, layers(lambda n: MAMBA, 2))
    assert (one(made).form, made.state_bytes) == ("state space", 2 * 4 * (1024 * 16 + 1024 * 4))


def test_heads_can_differ_by_layer_and_be_none(planned):
    keys = LLAMA3_8B | {"attention.head_count_kv": [8, 0, 4], "attention.head_count": [32, 32, 32], "block_count": 3}
    made = planned("llama", keys, layers(lambda n: ATTENTION, 3), context=1)
    assert {state.layers: state.nbytes for state in made.states} == {(0,): 2 * 8 * 256, (2,): 2 * 4 * 256}


def test_layers_with_a_window_keep_no_more_than_it(planned):
    keys = LLAMA3_8B | {"attention.sliding_window": 100, "attention.sliding_window_pattern": [True, False]}
    made = planned("llama", keys, layers(lambda n: ATTENTION, 2), context=1000)
    assert {state.layers: state.tokens for state in made.states} == {(0,): 100, (1,): 1000}


def test_layers_with_a_window_can_have_heads_of_another_length(planned):
    keys = LLAMA3_8B | {"attention.sliding_window": 100, "attention.sliding_window_pattern": [True, False]}
    keys |= {"attention.key_length": 128, "attention.value_length": 128}
    keys |= {"attention.key_length_swa": 64, "attention.value_length_swa": 32}
    made = planned("llama", keys, layers(lambda n: ATTENTION, 2), context=1000)
    assert {state.layers: state.values_a_token for state in made.states} == {(0,): 8 * 96, (1,): 8 * 256}


def test_a_window_whose_layers_are_not_told_is_noted_and_counted_in_full(planned):
    made = planned("llama", LLAMA3_8B | {"attention.sliding_window": 100}, layers(lambda n: ATTENTION, 1), context=1000)
    assert one(made).tokens == 1000
    assert any("'llama.attention.sliding_window' is 100" in note for note in made.notes)


def test_layers_that_share_the_cache_of_others_keep_none(planned):
    keys = LLAMA3_8B | {"block_count": 4, "attention.shared_kv_layers": 3}
    assert one(planned("llama", keys, layers(lambda n: ATTENTION, 4))).layers == (0,)


@pytest.mark.parametrize(
    ("keys", "names", "note"),
    [
        ({}, ATTENTION, "layers 0-1: their state is not counted: the file has no key 'x.block_count'"),
        ({"rope.dimension_count": 64}, LATENT, "the file has no key 'x.attention.kv_lora_rank'"),
        ({"ssm.inner_size": 8}, DELTA, "the file has no key 'x.ssm.state_size'"),
        ({}, ("time_mix_key",), "layers 0-1: the state of time_mix_* is not counted: its form is not known"),
        ({}, ("attn_strange",), "the state of attn_strange is not counted"),
        ({}, ("ffn_up",), "no layer has attention or a recurrent state"),
    ],
)
def test_what_the_file_does_not_say_is_noted_and_not_guessed(planned, keys, names, note):
    made = planned("x", keys, layers(lambda n: names, 2))
    assert made.states == ()
    assert any(note in line for line in made.notes)


def test_a_context_beyond_the_models_is_noted(planned):
    made = planned("llama", LLAMA3_8B, layers(lambda n: ATTENTION, 1), context=8193)
    assert "a context of 8193 is more than key 'llama.context_length' allows: 8192" in made.notes


def test_the_longest_context_of_the_model_is_not(planned):
    made = planned("llama", LLAMA3_8B, layers(lambda n: ATTENTION, 1), context=8192)
    assert not any("context_length" in note for note in made.notes)
