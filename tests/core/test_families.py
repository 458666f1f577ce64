"""Mixture-of-experts, chunked and sliding-window models decode as they do without a cache (D01)."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import noisy_copy, uncached_greedy
from transformers import AutoModelForCausalLM, Llama4TextConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from pipeline.core.decoding import DecodeConfig, decode

SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA4 = {
    "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
    "moe_layers": [0, 1], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.5,
}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(num_hidden_layers=2, num_local_experts=6, num_experts_per_tok=2, **SHAPE),
    "mixtral with a window": MixtralConfig(
        num_hidden_layers=2, num_local_experts=6, num_experts_per_tok=2, sliding_window=6, **SHAPE
    ),
    "qwen3_moe": Qwen3MoeConfig(
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        **SHAPE,
    ),
    "llama4": Llama4TextConfig(**SHAPE, **LLAMA4),
    "llama4, two experts per token, all layers chunked": Llama4TextConfig(
        **SHAPE, **{**LLAMA4, "num_experts_per_tok": 2, "no_rope_layers": [1, 1, 1]}
    ),
}
PROMPTS = [[5], [3, 4], list(range(7)), [index * 7 % 100 for index in range(30)]]
TOKENS = 24


def build(config: PreTrainedConfig, attention: str = "sdpa"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval()


def tokens_of(target, draft, k: int) -> tuple[list[list[int]], object]:
    result = decode(target, draft, PROMPTS, DecodeConfig(draft_length=k, max_new_tokens=TOKENS))
    return [sequence.token_ids for sequence in result.sequences], result.stats


@pytest.fixture(scope="module", params=CONFIGS)
def target(request):
    """A tiny target with the oracle's answers to PROMPTS, shorter and longer than its window or chunk."""
    model = build(CONFIGS[request.param])
    return model, [uncached_greedy(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_equals_the_uncached_target_for_every_draft(target, k):
    """D01 for mixtures of experts: four ragged rows at once, drafts that are kept always and sometimes."""
    model, expected = target
    assert tokens_of(model, None, k)[0] == expected
    tokens, stats = tokens_of(model, copy.deepcopy(model), k)
    assert tokens == expected and stats.accepted == stats.drafted
    tokens, stats = tokens_of(model, noisy_copy(model, 0.01), k)
    assert tokens == expected and 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("change", [{"attention_chunk_size": 10_000}, {"attn_scale": 0.0}], ids=str)
def test_chunks_and_temperatures_decide_these_answers(change):
    """Without them the oracle says something else: the equality above is theirs too."""
    model, other = build(CONFIGS["llama4"]), build(Llama4TextConfig(**SHAPE, **{**LLAMA4, **change}))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert uncached_greedy(model, PROMPTS[-1], TOKENS) != uncached_greedy(other, PROMPTS[-1], TOKENS)


def test_eager_attention_takes_chunks_too():
    model = build(CONFIGS["llama4"], "eager")
    expected = [uncached_greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    assert tokens_of(model, noisy_copy(model, 0.01), 3)[0] == expected


def test_a_tuned_model_is_left_as_it_was():
    model = build(CONFIGS["llama4"])
    tokens_of(model, copy.deepcopy(model), 3)
    assert not any(module._forward_hooks for module in model.modules())
