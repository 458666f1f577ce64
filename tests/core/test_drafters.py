from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import noisy_copy, tiny_llama, uncached_greedy

from pipeline.core.decoding import DecodeConfig, Decoder, decode
from pipeline.core.drafters import (
    Batch,
    LookupThenModelDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    certain_proposal,
    with_trimmed_head,
)
from pipeline.core.sampling import Sampling


def batch_of(texts: list[list[int]]) -> Batch:
    sizes = torch.tensor([len(text) for text in texts])
    return Batch(texts, sizes, torch.tensor([text[-2:] for text in texts]), torch.zeros(len(texts), dtype=torch.long))


def propose(tokens: list[int], length: int, ngram: int = 3, vocabulary=range(1000)) -> list[int]:
    drafter = PromptLookupDrafter(ngram)
    drafter.open(1, Sampling(), vocabulary)
    drafter.begin(0, [tokens], 0)
    return drafter.copied(0, tokens, length)


def test_lookup_copies_after_the_last_longest_match():
    assert propose([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert propose([5, 1, 2, 3, 7, 2, 3], 3) == [7, 2, 3]
    assert propose([1, 2, 3, 4], 3) == []
    assert propose([7, 7], 3) == [7]


def test_lookup_stops_at_tokens_that_must_not_be_emitted():
    assert propose([1, 2, 3, 50, 4, 1, 2], 4, vocabulary=range(10)) == [3]


def test_lookup_rows_may_propose_different_lengths():
    drafter = PromptLookupDrafter(2)
    drafter.open(2, Sampling(), range(100))
    texts = [[1, 2, 1], [3, 4]]
    drafter.begin(0, texts, 0)
    proposal = drafter.propose(batch_of(texts), [3, 3])
    assert proposal.lengths.tolist() == [2, 0]
    assert proposal.token_ids.tolist() == [[2, 1], [0, 0]]


def test_trimmed_head_is_a_view_that_leaves_the_model_alone():
    model = tiny_llama(tie_word_embeddings=True)
    ids = torch.tensor([2, 30, 77])
    tokens = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        whole = model(tokens).logits
        assert torch.allclose(with_trimmed_head(model, ids)(tokens).logits, whole[..., ids], atol=1e-6)
        assert torch.equal(model(tokens).logits, whole)


def test_a_head_without_allowed_tokens_is_refused():
    with pytest.raises(ValueError, match="no token in common"):
        ModelDrafter(tiny_llama(), [99]).open(1, Sampling(), range(50))


def greedy(k: int, tokens: int = 40, **options) -> DecodeConfig:
    return DecodeConfig(draft_length=k, max_new_tokens=tokens, **options)


def tokens_of(result) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


def test_lookup_finds_in_a_growing_text_what_a_search_finds():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (200,), generator=generator).tolist()
    drafter = PromptLookupDrafter(3, 2)
    drafter.open(1, Sampling(), range(4))
    drafter.begin(0, [text[:5]], 0)
    for length in range(5, 200):
        tokens = text[:length]
        expected = []
        for size in (3, 2):
            starts = [i for i in range(length - size) if tokens[i : i + size] == tokens[-size:]]
            if starts:
                expected = tokens[starts[-1] + size :][:4]
                break
        assert drafter.copied(0, tokens, 4) == expected


class Script(PromptLookupDrafter):
    """Copies from a given answer in the rounds that the script says."""

    def __init__(self, answers: dict[int, list[int]], copies: list[bool]) -> None:
        super().__init__(1)
        self.answers, self.copies, self.sizes, self.calls = answers, copies, {}, 0

    def begin(self, first_row, prompts, room):
        super().begin(first_row, prompts, room)
        self.sizes.update({first_row + index: len(prompt) for index, prompt in enumerate(prompts)})

    def copied(self, row, tokens, length):
        self.calls += 1
        done = len(tokens) - self.sizes[row]
        return self.answers[row][done : done + length] if self.copies[self.calls % len(self.copies)] else []

    def move_row(self, source, destination):
        super().move_row(source, destination)
        for rows in (self.answers, self.sizes):
            rows[destination] = rows[source]


@pytest.mark.parametrize("copies", [[True, False], [True, True, True, False], [False, False, True, True, True]])
def test_a_model_that_rested_while_rows_copied_catches_up(copies):
    """After rounds of copying the model drafts as if it had read all: an exact copy of the target is always accepted."""
    target = tiny_llama()
    prompts = [[5, 6], [1, 2, 3]]
    answers = {row: uncached_greedy(target, prompt, 70) for row, prompt in enumerate(prompts)}
    drafter = LookupThenModelDrafter(Script(dict(answers), copies), ModelDrafter(copy.deepcopy(target)))
    result = decode(target, drafter, prompts, greedy(4, 60))
    assert tokens_of(result) == [answers[row][:60] for row in range(2)]
    assert result.stats.accepted == result.stats.drafted > 0


def test_a_short_row_is_not_disturbed_by_one_that_catches_up_with_much():
    """The long row copies for 40 tokens, then both are drafted for: more is fed than the short row has."""
    target = tiny_llama()
    prompts = [list(range(10)), [7]]
    answers = {row: uncached_greedy(target, prompt, 70) for row, prompt in enumerate(prompts)}

    class CopiesFirst(Script):
        def copied(self, row, tokens, length):
            done = len(tokens) - self.sizes[row]
            return self.answers[row][done : done + length] if row == 0 and done < 40 else []

    drafter = LookupThenModelDrafter(CopiesFirst(dict(answers), []), ModelDrafter(copy.deepcopy(target)))
    decoder = Decoder(target, drafter, greedy(4, 60), slots=2)
    decoder.submit(prompts[0])
    finished = {}
    for step in range(200):
        if step == 9:
            decoder.submit(prompts[1])
        finished |= {event.request: event.finished.token_ids for event in decoder.step() if event.finished}
    assert finished == {row: answers[row][:60] for row in range(2)}
    assert decoder.stats.accepted == decoder.stats.drafted > 0


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_lookup_then_model_is_lossless_and_rows_stay_apart(slots):
    target = tiny_llama(std=0.02)
    prompts = [[5], [3, 4, 3, 4, 3], list(range(7)), [9, 8, 7, 9, 8]]
    drafter = LookupThenModelDrafter(PromptLookupDrafter(3, 2), ModelDrafter(noisy_copy(target, 0.1)))
    result = decode(target, drafter, prompts, greedy(4), slots=slots)
    assert tokens_of(result) == [uncached_greedy(target, prompt, 40) for prompt in prompts]
    assert 0 < result.stats.accepted < result.stats.drafted


def test_lookup_then_model_copies_where_it_can_and_asks_elsewhere():
    class Counting(ModelDrafter):
        asked = 0

        def propose(self, batch, lengths):
            self.asked += 1
            return super().propose(batch, lengths)

    target = tiny_llama(std=0.02)
    model = Counting(noisy_copy(target, 0.1))
    result = decode(target, LookupThenModelDrafter(PromptLookupDrafter(3, 3), model), [[5, 6, 7]], greedy(4, 60))
    assert 0 < model.asked < len(result.sequences[0].rounds)


@pytest.mark.parametrize("limit", [4, 16, 33])
def test_beyond_the_drafts_context_rows_are_decoded_plainly(limit, caplog):
    target = tiny_llama()
    draft = copy.deepcopy(target)
    draft.config.max_position_embeddings = limit
    prompts = [[5, 6], list(range(20)), [7]]
    result = decode(target, draft, prompts, greedy(4, 40))
    assert tokens_of(result) == [uncached_greedy(target, prompt, 40) for prompt in prompts]
    assert [f"draft's {limit} positions" in record.message for record in caplog.records] == [True]
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        size = len(prompt) + 1
        for block in sequence.rounds:
            assert block.accepted == block.drafted
            assert (block.drafted == 0) == (size > limit)
            size += block.emitted


class HiddenStates:
    """Drafts nothing, and keeps what it is shown."""

    max_positions = None
    wants_hidden_states = True

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def open(self, rows, sampling, vocabulary):
        pass

    def begin(self, first_row, prompts, room):
        pass

    def propose(self, batch, lengths):
        for row, tokens in enumerate(batch.committed):
            self.seen.append((list(tokens), batch.hidden_states[row].clone()))
        return certain_proposal([[1, 2]] * len(batch.sizes), batch.sizes.device)

    def move_row(self, source, destination):
        pass


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 1}], ids=str)
def test_a_drafter_may_ask_for_the_targets_last_hidden_states(options):
    """What the head was given to choose a row's newest token, as a head of Medusa's kind needs it, after refills too."""
    target = tiny_llama()
    drafter = HiddenStates()
    config = greedy(2, 12, eos_token_ids=tuple(range(0, 100, 9)), **options)
    prompts = [[5], [3, 4], list(range(7)), [9, 8, 7], [2, 2]]
    plain = decode(target, None, prompts, config)
    assert tokens_of(decode(target, drafter, prompts, config, slots=3)) == tokens_of(plain)
    with torch.inference_mode():
        for tokens, hidden in drafter.seen:
            expected = target.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0, -1]
            assert torch.allclose(hidden, expected, atol=1e-4)
    assert len(drafter.seen) > 5
