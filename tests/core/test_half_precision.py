"""D12: what half precision changes is listed and judged in float32; a real fault is not excused by it."""

from __future__ import annotations

import copy
import dataclasses

import torch
from test_comparison import CONFIG, answers, contestants
from tiny_models import noisy_copy, tiny_llama

from pipeline.core.cache import CachedModel
from pipeline.core.comparison import evaluate
from pipeline.core.evaluation_settings import DecodeSettings

SETTINGS = DecodeSettings(draft_length=3)


def lossless(near_tie_gap: float) -> dict:
    """What an evaluation in bfloat16 says about losslessness."""
    target = tiny_llama(std=0.3)
    pair = [copy.deepcopy(model).to(torch.bfloat16) for model in (target, noisy_copy(target, 0.02))]
    golden = answers(target, 4, "legal")
    config = dataclasses.replace(
        CONFIG, max_new_tokens=24, timed_prompts=4, baseline_prompts=0, near_tie_gap=near_tie_gap
    )
    return evaluate(contestants(*pair), golden, golden, SETTINGS, config, seed=0).metrics["lossless"]


def is_block(token_ids: torch.Tensor) -> bool:
    return token_ids.shape[1] == SETTINGS.draft_length + 1


def test_the_first_departure_of_each_prompt_is_listed_with_its_gap(monkeypatch):
    """Near ties fall the other way in blocks of k + 1 tokens, in bfloat16 alone, as other shapes make them do."""
    forward = CachedModel.forward

    def rounded(self, first_row, token_ids, *rest, **options):
        logits = forward(self, first_row, token_ids, *rest, **options)
        if self.dtype == torch.bfloat16 and is_block(token_ids):
            top = logits.topk(2)
            tie = (top.values[..., :1] - top.values[..., 1:]) < 0.2
            logits = logits.scatter(-1, top.indices, torch.where(tie, top.values.flip(-1), top.values))
        return logits

    monkeypatch.setattr(CachedModel, "forward", rounded)
    result = lossless(near_tie_gap=0.5)
    found = result["half_precision_departures"]
    assert found, "ties must have fallen the other way"
    assert len({(departure["prompt_id"], departure["candidate"]) for departure in found}) == len(found)
    assert all(departure["legal"] and 0 <= departure["float32_gap"] <= 0.5 for departure in found)
    assert (result["value"], result["near_tie_gap"], result["departures"]) == (1.0, 0.5, [])


def test_positions_shifted_by_one_in_verification_are_still_flagged(monkeypatch):
    """The fault is seeded in blocks of k + 1 tokens alone: plain decoding, and all that it is compared with, is right."""
    forward = CachedModel.forward

    def shifted(self, first_row, token_ids, positions, visible, *rest, **options):
        shift = int(is_block(token_ids))
        return forward(self, first_row, token_ids, positions + shift, visible, *rest, **options)

    monkeypatch.setattr(CachedModel, "forward", shifted)
    result = lossless(near_tie_gap=0.05)
    assert result["value"] == 0.0
    assert any(not departure["legal"] for departure in result["half_precision_departures"])
    assert result["departures"], "the float32 run shows it too"
