"""The TRL leg stops with the clock and counts what it trained on."""

from __future__ import annotations

import copy

import pytest
import torch
from script import load
from tiny_models import tiny_llama

from pipeline.core.tiny import build_tiny_tokenizer


def test_the_leg_trains_and_counts(monkeypatch):
    leg = load("distill_on_policy")
    monkeypatch.setattr(leg, "NEW_TOKENS", 4)
    target, draft = (tiny_llama(seed, vocabulary=264) for seed in (0, 1))
    before = copy.deepcopy(draft)
    result = leg.trl_leg(draft, target, build_tiny_tokenizer(), [[5] * 70] * 8, 0.2, learning_rate=1e-3, beta=0.0)
    answers = result["answer_tokens"]
    assert result["steps"] >= 1 and result["seconds"] >= 0.2
    assert 8 * result["steps"] <= answers <= 32 * result["steps"]
    assert result["tokens"] == answers + 8 * 64 * result["steps"]
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])
    assert not torch.equal(draft.lm_head.weight, before.lm_head.weight) and not draft.training
