"""The sampled output follows the target's distribution: D03, D05, by chi-square on tiny vocabularies."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import next_logits, noisy_copy, tiny_llama

from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.drafters import LookupThenModelDrafter, ModelDrafter, PromptLookupDrafter
from pipeline.core.sampling import Proposal, Sampling, draw, leading_run, probabilities, row_seed, uniforms, verify

VOCABULARY, DRAWS = 8, 5000
CRITICAL = {
    0: 1e-3,
    1: 10.8,
    2: 13.8,
    3: 16.3,
    4: 18.5,
    5: 20.5,
    6: 22.5,
    7: 24.3,
}  # chi-square at 0.001 by degrees of freedom


def chi_square(tokens: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Statistic and critical value; a token of probability 0 must not occur at all."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token outside the target's support was emitted"
    mean = expected[possible].double() * len(tokens)
    return ((counts[possible] - mean) ** 2 / mean).sum().item(), CRITICAL[int(possible.sum()) - 1]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(std=0.25, vocabulary=VOCABULARY)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["noisy", "bfloat16", "greedy", "trimmed", "lookup then model"])
def test_first_and_second_drafted_token_follow_the_target(target, settings, kind):
    """Tokens 2 and 3 of an answer are the first two of a block; each is judged given the tokens before it."""
    noisy = noisy_copy(target, 0.3)
    drafter = {
        "noisy": noisy,
        "bfloat16": copy.deepcopy(noisy).bfloat16(),
        "greedy": GreedyDrafter(noisy),
        "trimmed": ModelDrafter(noisy, [1, 2, 4, 5, 7]),
        "lookup then model": LookupThenModelDrafter(PromptLookupDrafter(2), ModelDrafter(noisy, [1, 2, 4, 5, 7])),
    }[kind]
    config = DecodeConfig(draft_length=2, max_new_tokens=3, **settings)
    rows = decode(target, drafter, [[3, 5]] * DRAWS, config, seed=11, slots=DRAWS).sequences
    tokens = torch.tensor([row.token_ids for row in rows])
    sampling = Sampling(**settings)
    first = tokens[:, 0].mode().values.item()
    second = tokens[tokens[:, 0] == first][:, 1].mode().values.item()
    prefixes = {(): tokens[:, 0], (first,): tokens[tokens[:, 0] == first][:, 1]}
    prefixes[first, second] = tokens[(tokens[:, 0] == first) & (tokens[:, 1] == second)][:, 2]
    for prefix, found in prefixes.items():
        expected = probabilities(next_logits(target, [3, 5, *prefix]), sampling)
        statistic, critical = chi_square(found, expected)
        assert statistic < critical, prefix


class GreedyDrafter(ModelDrafter):
    """Drafts greedily whatever the sampling: its tokens are certain, and say so."""

    def open(self, rows, sampling, vocabulary):
        super().open(rows, Sampling(), vocabulary)


def test_acceptance_is_the_overlap_of_the_distributions():
    """E[accept] = sum(min(p, q)) = 1 - TV(p, q)."""
    torch.manual_seed(3)
    p_logits, q = torch.randn(VOCABULARY) * 1.5, torch.randn(VOCABULARY).softmax(-1)
    p = p_logits.softmax(-1)
    draws = 20_000
    seeds = torch.tensor([row_seed(5, row) for row in range(draws)])
    positions = torch.arange(2).expand(draws, 2)
    drafted = draw(q.expand(draws, -1), uniforms(seeds, positions[:, :1], 1)[:, 0])
    proposal = Proposal(drafted[:, None], torch.ones(draws, dtype=torch.long), q.expand(draws, 1, -1))
    accepted, following = verify(p_logits.expand(draws, 2, -1), proposal, Sampling(temperature=1.0), seeds, positions)
    assert accepted.double().mean().item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.015)
    first = torch.where(accepted == 1, drafted, following)
    assert chi_square(first, p)[0] < CRITICAL[7]
    assert chi_square(following[accepted == 1], p)[0] < CRITICAL[7]


def test_temperature_zero_is_an_exact_argmax():
    """A token that the draft favours is kept only if it is the target's best: no softmax enters (litgpt's fault)."""
    logits = torch.tensor([[[0.55, 0.45, 0.0], [0.0, 0.0, 1.0]]]).log()
    proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]))
    accepted, following = verify(logits, proposal, Sampling(), torch.tensor([0]), torch.tensor([[0, 1]]))
    assert (accepted.item(), following.item()) == (0, 0)


def test_filters():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert probabilities(logits, Sampling(1.0, top_k=2)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(logits, Sampling(1.0, top_p=0.7)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(logits, Sampling(1.0, min_p=0.45)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(logits, Sampling(1.0, top_p=0.01)).tolist() == pytest.approx([1, 0, 0, 0])
    assert probabilities(logits, Sampling(0.5)).tolist() == pytest.approx((logits * 2).softmax(-1).tolist())


def test_draw_never_returns_an_impossible_token():
    distribution = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    chances = torch.tensor([0.0, 0.29999, 0.30001, 0.999999999])
    assert draw(distribution.expand(4, -1), chances).tolist() == [1, 1, 3, 3]


def test_uniforms_depend_on_seed_position_and_purpose_alone():
    seeds = torch.tensor([row_seed(0, row) for row in range(400)])
    positions = torch.arange(100).expand(400, 100)
    values = uniforms(seeds, positions, 1)
    assert torch.equal(values[7:8, 3:5], uniforms(seeds[7:8], positions[7:8, 3:5], 1))
    assert not torch.equal(values, uniforms(seeds, positions, 2))
    assert 0 <= values.min() and values.max() < 1
    deciles = torch.histc(values.float(), 10, 0, 1)
    assert ((deciles - 4000) ** 2 / 4000).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.001
    assert torch.corrcoef(values[:, :2].T)[0, 1].abs() < 0.2
    assert len({row_seed(seed, row) for seed in (-1, 0, 1, 2**64 - 2) for row in range(1000)}) == 4000


def test_leading_run():
    kept = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    assert leading_run(kept).tolist() == [1, 3, 0]
    assert leading_run(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]
