"""The storage table: every form is the same distribution, written and read by the pipeline's files, and trains a draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from script import load
from tiny_settings import distill_config
from tqdm import tqdm

from pipeline.adapters.targets import Target
from pipeline.core.decoding import DecodeConfig
from pipeline.core.generation import EncodedPrompt, generate_answers
from pipeline.core.models import ModelConfig
from pipeline.core.pruning import keep_layers

storage = load("distill_storage")

DISTILL = distill_config(
    epochs=2, learning_rate=1e-3, warmup_share=0.0, tokens_per_step=256, tokens_per_forward=256, evaluations=1,
    head_tokens=128, train_on_prompts=True, freeze_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return Target(ModelConfig(name="tiny", id="builtin:tiny", dtype="float32"), tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def answers(target):
    rng = np.random.default_rng(0)
    settings = DecodeConfig(1, 8, allowed_token_ids=range(target.vocabulary_size), return_logprobs=4, prompt_logprobs=4)
    prompts = [
        EncodedPrompt(f"p{i}", "legal", "continuation", "c", rng.integers(3, 259, 5 + i % 3).tolist())
        for i in range(24)
    ]
    return sorted(
        generate_answers(target.model, prompts, settings, 8, 0, tqdm(disable=True)), key=lambda a: int(a.prompt_id[1:])
    )


def test_full_log_probabilities_are_those_that_were_stored(target, answers):
    answer = storage.reform(target.model, answers[0], target.vocabulary_size, storage.top_form(4))
    for name in ("top_ids", "prompt_top_ids"):
        assert np.array_equal(getattr(answer, name), getattr(answers[0], name))
    for name in ("top_logprobs", "prompt_top_logprobs"):
        assert np.allclose(getattr(answer, name), getattr(answers[0], name), atol=1e-4)


def test_sampled_entries_are_unbiased_distinct_and_of_one_width():
    """Their mean over many tokens of one distribution is that distribution."""
    logprobs = torch.randn(12, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(-1)
    tokens, draws = 20_000, 5
    form = storage.sampled_form(draws, torch.Generator().manual_seed(0))
    ids, stored = form(logprobs.expand(tokens, -1))
    assert ids.shape == stored.shape == (tokens, draws)
    assert all(len(set(row)) == draws for row in ids[:200].tolist())
    assert torch.allclose(stored.exp().sum(-1), torch.ones(tokens)) and bool(torch.isfinite(stored).all())
    mean = torch.zeros(12).index_add_(0, ids.reshape(-1), stored.exp().reshape(-1)) / tokens
    deviation = (logprobs.exp() * (1 - logprobs.exp()) / (tokens * draws)).sqrt()
    assert ((mean - logprobs.exp()).abs() < 4 * deviation).all()


def test_a_subset_has_the_tokens_asked_for(answers):
    chosen = storage.subset(answers, 100, seed=3)
    longest = max(storage.scored_tokens([answer]) for answer in answers)
    assert 100 <= storage.scored_tokens(chosen) < 100 + longest
    assert [a.prompt_id for a in chosen] == [a.prompt_id for a in storage.subset(answers, 100, seed=3)]
    assert storage.subset(answers, 10**9, seed=0) != answers and len(storage.subset(answers, 10**9, 0)) == len(answers)


def test_the_table_has_every_form_and_what_it_costs(target, answers):
    settings = storage.StorageSettings(tokens=200, top=[2, 8], draws=[6], distill=DISTILL, seed=0)
    rows = storage.storage_table(
        target, answers[:20], answers[20:], lambda: keep_layers(target.model, [0, 3]), settings
    )
    assert [row["form"] for row in rows] == ["full, in the loop", "top 2", "top 8", "sampled 6"]
    assert [row["entries"] for row in rows] == [target.vocabulary_size, 2, 8, 6]
    full, two, eight, sampled = rows
    assert full["bytes_per_token"] is None and eight["bytes_per_token"] > two["bytes_per_token"] > 0
    assert sampled["stored_mass"] == pytest.approx(1, abs=1e-3)
    assert two["stored_mass"] < eight["stored_mass"] < full["stored_mass"] == 1
    assert len({row["trained_tokens"] for row in rows}) == 1
    for row in rows:
        assert 0 <= row["dev_token_acceptance"] <= 1
        assert row["points_below_full"] == pytest.approx(
            100 * (full["dev_token_acceptance"] - row["dev_token_acceptance"])
        )
