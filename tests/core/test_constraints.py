"""D09: penalties, minimum length and bad words mean in a verified block what they mean token by token."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import next_logits, noisy_copy, tiny_llama

from pipeline.core.decoding import DecodeConfig, decode

PROMPTS = [[5, 6, 7, 5], [3], [9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 3]]


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def reference(target, prompt: list[int], tokens: int, **options) -> list[int]:
    """transformers' own greedy decoding with the same options."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **options}
    return target.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def everyone(target, config: DecodeConfig, **options) -> list[list[list[int]]]:
    """The answers to PROMPTS, plain, with an exact copy and with a noisy one."""
    drafts = (None, copy.deepcopy(target), noisy_copy(target, 0.02))
    results = [decode(target, draft, PROMPTS, config, **options) for draft in drafts]
    return [[sequence.token_ids for sequence in result.sequences] for result in results]


@pytest.mark.parametrize("k", [1, 4, 8])
def test_repetition_penalty_equals_transformers_own(target, k):
    expected = [reference(target, prompt, 30, repetition_penalty=1.5) for prompt in PROMPTS]
    assert expected != [reference(target, prompt, 30) for prompt in PROMPTS]
    config = DecodeConfig(draft_length=k, max_new_tokens=30, repetition_penalty=1.5)
    assert everyone(target, config) == [expected] * 3


@pytest.mark.parametrize("k", [1, 3, 8])
def test_penalty_and_minimum_length_together(target, k):
    """The case as users met it: repetition_penalty 1.5, min_new_tokens 12, EOS a token that comes at step 4."""
    eos = reference(target, PROMPTS[0], 4, repetition_penalty=1.5)[-1]
    options = {"repetition_penalty": 1.5, "min_new_tokens": 12}
    expected = [reference(target, prompt, 30, eos_token_id=eos, **options) for prompt in PROMPTS]
    assert all(len(tokens) >= 12 for tokens in expected)
    config = DecodeConfig(draft_length=k, max_new_tokens=30, eos_token_ids=(eos,), **options)
    assert everyone(target, config) == [expected] * 3


@pytest.mark.parametrize("k", [1, 4])
def test_bad_words_of_one_and_more_tokens_equal_transformers_own(target, k):
    free = reference(target, PROMPTS[0], 30)
    words = [free[2:3], free[5:7], free[8:11], [free[12], free[13]]]
    expected = [reference(target, prompt, 30, bad_words_ids=words) for prompt in PROMPTS]
    assert expected[0] != free
    config = DecodeConfig(draft_length=k, max_new_tokens=30, bad_words=tuple(map(tuple, words)))
    assert everyone(target, config) == [expected] * 3


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("penalty", [0.4, -0.3])
def test_frequency_penalty_counts_the_answer_alone(target, k, penalty):
    def oracle(prompt: list[int]) -> list[int]:
        answer: list[int] = []
        for _ in range(30):
            logits = next_logits(target, prompt + answer)
            logits = logits - penalty * torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=len(logits))
            answer.append(logits.argmax().item())
        return answer

    config = DecodeConfig(draft_length=k, max_new_tokens=30, frequency_penalty=penalty)
    assert everyone(target, config) == [[oracle(prompt) for prompt in PROMPTS]] * 3


def test_ids_without_a_logit_do_not_matter_to_the_penalties(target):
    """A prompt may hold ids that must not be emitted; those are cut off the logits."""
    config = DecodeConfig(
        draft_length=3,
        max_new_tokens=20,
        allowed_token_ids=range(50),
        repetition_penalty=1.3,
        frequency_penalty=0.1,
        min_new_tokens=3,
        eos_token_ids=(70, 4),
        bad_words=((60,), (70, 3)),
    )
    plain, copied, noisy = everyone(target, config)
    assert plain == copied == noisy
    assert max(max(tokens) for tokens in plain) < 50


def test_log_probabilities_stay_those_of_the_raw_logits(target):
    config = DecodeConfig(draft_length=3, max_new_tokens=12, repetition_penalty=2.0, return_logprobs=1)
    sequence = decode(target, noisy_copy(target, 0.02), PROMPTS[:1], config).sequences[0]
    for index, token in enumerate(sequence.token_ids):
        expected = next_logits(target, PROMPTS[0] + sequence.token_ids[:index]).log_softmax(-1)
        assert sequence.logprobs.token[index] == pytest.approx(expected[token].item(), abs=1e-5)


def test_sampled_tokens_obey_the_constraints(target):
    config = DecodeConfig(
        draft_length=3,
        max_new_tokens=12,
        temperature=1.0,
        min_new_tokens=6,
        eos_token_ids=tuple(range(60)),
        bad_words=((61,),),
    )
    for sequence in decode(target, noisy_copy(target, 0.3), [[5]] * 60, config, seed=3).sequences:
        assert min(sequence.token_ids[:5]) >= 60 and 61 not in sequence.token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"min_new_tokens": 5},
        {"min_new_tokens": -1},
        {"bad_words": ((),)},
    ],
)
def test_constraints_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DecodeConfig(draft_length=1, max_new_tokens=4, **options)


def test_what_is_not_supported_is_refused_by_name():
    with pytest.raises(TypeError, match="no_repeat_ngram_size"):
        DecodeConfig(draft_length=1, max_new_tokens=4, no_repeat_ngram_size=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [7, 9], "bad_words": ((7,), (9,))},
        {"allowed_token_ids": [7], "eos_token_ids": (7,), "min_new_tokens": 3},
        {"allowed_token_ids": [7, 9], "bad_words": ((7, 7), (7, 9), (9, 7), (9, 9))},
    ],
    ids=str,
)
def test_constraints_that_leave_no_token_say_so(target, options, temperature):
    config = DecodeConfig(draft_length=2, max_new_tokens=5, temperature=temperature, **options)
    for draft in (None, noisy_copy(target, 0.02)):
        with pytest.raises(ValueError, match="leave no token"):
            decode(target, draft, [[5]], config, seed=1)
