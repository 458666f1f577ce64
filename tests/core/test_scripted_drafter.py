"""A scripted drafter is accepted as often as it is told, and decoding stays lossless."""

from __future__ import annotations

import pytest
from tiny_models import noisy_copy, tiny_llama, uncached_greedy

from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import ModelDrafter
from pipeline.core.metrics import acceptance_by_position
from pipeline.core.sampling import Sampling
from pipeline.core.scripted_drafter import ScriptedDrafter, right_positions

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [4, 4]]
TOKENS, K = 25, 3


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def continuations(target):
    return {tuple(prompt): uncached_greedy(target, prompt, TOKENS) for prompt in PROMPTS}


def decoded(decoder: Decoder) -> list:
    for prompt in PROMPTS:
        decoder.submit(prompt, 0)
    finished = {}
    while decoder.busy:
        finished.update({event.request: event.finished for event in decoder.step() if event.finished})
    return [finished[request] for request in sorted(finished)]


@pytest.mark.parametrize("slots", [1, 3])
def test_acceptance_follows_the_script_and_the_tokens_are_the_targets(target, continuations, slots):
    drafter = ScriptedDrafter(ModelDrafter(noisy_copy(target, 2.0)), continuations)
    decoder = Decoder(target, drafter, DecodeConfig(draft_length=K, max_new_tokens=TOKENS), slots=slots)
    lengths = []
    for share in (0.0, 0.6, 1.0):
        drafter.token_acceptance = share
        sequences = decoded(decoder)
        assert [sequence.token_ids for sequence in sequences] == list(continuations.values())
        rounds = [[(block.accepted, block.drafted) for block in sequence.rounds] for sequence in sequences]
        by_position = acceptance_by_position(rounds, K)
        assert share < 1 or by_position == [1.0] * K
        assert share > 0 or by_position == [0.0] * K
        lengths.append(sum(len(sequence.rounds) for sequence in sequences))
    assert lengths[0] == len(PROMPTS) * (TOKENS - 1) > lengths[1] > lengths[2]


def test_the_share_is_right_and_shares_are_nested():
    half, most = right_positions(41, 0.5, seed=3), right_positions(41, 0.8, seed=3)
    assert sum(half) == 20 and sum(most) == 33
    assert all(more for less, more in zip(half, most, strict=True) if less)
    assert right_positions(41, 0.5, seed=4) != half


def test_sampling_is_refused(target, continuations):
    drafter = ScriptedDrafter(ModelDrafter(target), continuations)
    with pytest.raises(ValueError, match="temperature"):
        drafter.open(1, Sampling(temperature=1.0), range(100))
