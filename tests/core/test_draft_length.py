"""The draft length follows what a token costs and how likely it is to be kept."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import chain, noisy_copy, tiny_llama, uncached_greedy

from pipeline.core.cost_model import Costs
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.draft_length import AdaptiveDraftLength
from pipeline.core.drafters import ModelDrafter

CHEAP = Costs(0.05, {k: 1 + 0.01 * k for k in range(9)})
DEAR = Costs(0.9, {k: 1 + 0.3 * k for k in range(9)})


def lengths(costs: Costs, confidence: float, kept_of: float, rounds: int) -> list[int]:
    """The draft lengths of successive rounds when the draft is always so sure and the target keeps that share."""
    policy = AdaptiveDraftLength(costs)
    policy.begin(0)
    found = []
    for _ in range(rounds):
        drafted = 0
        while policy.wants_more(0):
            policy.drafted(0, confidence)
            drafted += 1
        policy.verified(0, int(drafted * kept_of))
        found.append(drafted)
    return found


def test_a_sure_and_cheap_draft_runs_to_the_longest_block_and_a_dear_one_does_not_start():
    assert lengths(CHEAP, 0.99, 1.0, 10)[-1] == 8
    assert lengths(DEAR, 0.3, 0.0, 10) == [0] * 10


def test_unsure_tokens_end_the_draft_early():
    sure, unsure = lengths(CHEAP, 0.95, 1.0, 20), lengths(CHEAP, 0.3, 0.3, 20)
    assert sum(unsure) < sum(sure) / 2 and max(unsure) <= 4


def test_a_row_whose_drafts_fail_stops_drafting_and_tries_again_later():
    costs = Costs(0.3, {k: 1 + 0.1 * k for k in range(9)})
    found = lengths(costs, 0.5, 0.0, 120)
    assert 0 in found[:40], "drafts that are never kept are given up"
    start = found.index(0)
    assert any(found[start:]), "and tried again, since text changes"


def test_no_block_is_longer_than_what_was_measured():
    short = Costs(0.01, {k: 1.0 for k in range(4)})
    assert max(lengths(short, 1.0, 1.0, 10)) == 3


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adaptive_blocks_vary_and_a_row_does_not_depend_on_its_batch(slots, temperature):
    target = tiny_llama(std=0.35 if temperature == 0 else 0.1)
    prompts = [[5], [3, 4], list(range(7)), [9, 8, 7]]
    config = DecodeConfig(draft_length=8, max_new_tokens=60, temperature=temperature)

    def run(some, seeds, slots):
        drafter = ModelDrafter(noisy_copy(target, 0.02), adaptive=AdaptiveDraftLength(CHEAP))
        return decode(target, drafter, some, config, seed=seeds, slots=slots).sequences

    together = run(prompts, [1, 2, 3, 4], slots)
    alone = [run([prompt], [seed], 1)[0] for seed, prompt in enumerate(prompts, start=1)]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert [row.rounds for row in together] == [row.rounds for row in alone]
    assert len({block.drafted for row in together for block in row.rounds}) > 2
    if temperature == 0:
        assert [row.token_ids for row in together] == [uncached_greedy(target, prompt, 60) for prompt in prompts]


def test_an_exact_copy_is_drafted_at_full_length_and_always_kept():
    target = tiny_llama(std=0.35)
    drafter = ModelDrafter(copy.deepcopy(target), adaptive=AdaptiveDraftLength(CHEAP))
    stats = decode(target, drafter, [[5, 6]], DecodeConfig(draft_length=4, max_new_tokens=80)).stats
    assert stats.accepted == stats.drafted
    assert stats.drafted / stats.rounds > 3


@pytest.mark.parametrize("slots", [1, 2])
def test_rounds_without_a_draft_are_learnt_from_too(slots):
    """A row that stopped drafting forgets by and by why; that needs every round to be told."""

    class EverySecond(AdaptiveDraftLength):
        told = rounds = 0

        def wants_more(self, row):
            drafted = len(self._rows[row].confidences)
            if drafted == 0:
                self.rounds += 1
            return self.rounds % 2 == 0 and drafted < 3

        def verified(self, row, kept):
            self.told += 1
            assert 0 <= kept <= len(self._rows[row].confidences)
            super().verified(row, kept)

    target = tiny_llama(std=0.35)
    policy = EverySecond(CHEAP)
    drafter = ModelDrafter(copy.deepcopy(target), adaptive=policy)
    result = decode(target, drafter, [[5, 6]], DecodeConfig(draft_length=4, max_new_tokens=40), slots=slots)
    rounds = result.sequences[0].rounds
    assert {block.drafted for block in rounds[:-1]} == {0, 3}
    assert result.stats.accepted == result.stats.drafted, "an exact copy catches up after rounds without a draft"
    assert policy.told == len(rounds) - 1, "all but the last, whose row has ended"


def markov(rows: dict[int, dict[int, float]]):
    """A model whose next token depends on the last one alone, with these probabilities."""
    model = chain({})
    probabilities = torch.full((16, 16), 1 / 16)
    for last, following in rows.items():
        probabilities[last] = 1e-9
        for token, probability in following.items():
            probabilities[last, token] = probability
    with torch.no_grad():
        model.lm_head.weight[:, :16] = (probabilities.log() / 8).T
    return model


def test_what_was_drafted_and_rejected_does_not_colour_what_comes_next():
    """D03 for adaptive lengths: how far a rejected draft went depends on its tokens, and decides whether the next round
    drafts; the tokens that it then drafts must not be the same again."""
    a, b, left, right, end = 1, 2, 3, 4, 5
    half = {left: 0.5, right: 0.5}
    common = {a: half, b: half, left: {end: 1}, end: {end: 1}}
    target = markov({0: {a: 0.02, b: 0.98}, 9: {0: 1}, **common})
    draft = markov({0: {a: 0.97, b: 0.03}, **common})
    passes = {0: 1.0, 1: 1.41, 2: 1.42, 3: 1.43} | {k: 1.43 + 0.19 * (k - 3) for k in range(4, 17)}
    drafter = ModelDrafter(draft, adaptive=AdaptiveDraftLength(Costs(0.01, passes)))
    config = DecodeConfig(draft_length=16, max_new_tokens=3, temperature=1.0)
    rows = decode(target, drafter, [[9]] * 4000, config, seed=3, slots=500).sequences
    third = [row.token_ids[2] for row in rows if row.token_ids[:2] == [0, b]]
    assert abs(third.count(left) - third.count(right)) < 4 * len(third) ** 0.5


@pytest.mark.parametrize("measured", [{0: 1.0}, {0: 1.0, 2: 1.1}, {1: 1.0, 2: 1.1}])
def test_costs_with_gaps_are_refused(measured):
    with pytest.raises(ValueError, match="every k"):
        AdaptiveDraftLength(Costs(0.1, measured))
