"""The lossless theorems and the loop's bookkeeping: D01, D08, D10, D14, S01, S10, T01."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tiny_models import next_logits, noisy_copy, tiny_llama, uncached_greedy
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.core.decoding import DecodeConfig, Decoder, decode
from pipeline.core.drafters import ModelDrafter, PromptLookupDrafter
from pipeline.core.sampling import Proposal
from pipeline.core.tiny import build_tiny_tokenizer

PROMPTS = [[5], [3, 4], list(range(7)), [index * 7 % 100 for index in range(50)]]


@pytest.fixture(scope="module", params=[0.02, 0.35])
def pair(request):
    """Target and drafts (exact copy, noisy copy, independent) with the oracle's answers to PROMPTS."""
    target = tiny_llama(std=request.param)
    scale = 0.1 if request.param == 0.02 else 0.02
    drafts = {"copy": copy.deepcopy(target), "noisy": noisy_copy(target, scale), "independent": tiny_llama(seed=9)}
    return target, drafts, [uncached_greedy(target, prompt, 40) for prompt in PROMPTS]


def greedy(k: int, tokens: int = 40, **options) -> DecodeConfig:
    return DecodeConfig(draft_length=k, max_new_tokens=tokens, **options)


def tokens_of(result) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_greedy_equals_uncached_target_for_every_draft(pair, k):
    target, drafts, expected = pair
    assert tokens_of(decode(target, None, PROMPTS, greedy(k))) == expected
    for draft in [*drafts.values(), PromptLookupDrafter(3)]:
        assert tokens_of(decode(target, draft, PROMPTS, greedy(k))) == expected
    noisy = decode(target, drafts["noisy"], PROMPTS, greedy(k)).stats
    assert 0 < noisy.accepted < noisy.drafted, "the noisy draft must exercise both acceptance and rejection"


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_exact_copy_is_always_accepted_and_needs_the_fewest_passes(pair, k):
    target, drafts, _ = pair
    for prompt in PROMPTS:
        stats = decode(target, drafts["copy"], [prompt], greedy(k, 41)).stats
        assert stats.accepted == stats.drafted
        assert stats.target_passes == 1 + math.ceil(40 / (k + 1))


def test_a_row_does_not_depend_on_its_batch(pair):
    target, drafts, expected = pair
    for slots in (1, 2, 3):
        result = decode(target, drafts["noisy"], PROMPTS, greedy(3), slots=slots)
        assert tokens_of(result) == expected
    alone = [decode(target, drafts["noisy"], [prompt], greedy(3)).sequences[0] for prompt in PROMPTS]
    together = decode(target, drafts["noisy"], PROMPTS, greedy(3)).sequences
    assert [sequence.rounds for sequence in alone] == [sequence.rounds for sequence in together]


def test_many_prompts_flow_through_few_slots():
    target = tiny_llama()
    prompts = [[index, 3, index % 7] for index in range(23)]
    expected = tokens_of(decode(target, None, prompts, greedy(4, 9)))
    result = decode(target, noisy_copy(target, 0.02), prompts, greedy(4, 9, eos_token_ids=(expected[0][4],)), slots=5)
    for tokens, sequence in zip(expected, result.sequences, strict=True):
        stop = tokens.index(expected[0][4]) + 1 if expected[0][4] in tokens else 9
        assert sequence.token_ids == tokens[:stop]


def test_bookkeeping_identities(pair):
    target, drafts, _ = pair
    result = decode(target, drafts["noisy"], PROMPTS, greedy(4))
    for sequence in result.sequences:
        assert sum(block.emitted for block in sequence.rounds) == len(sequence.token_ids) - 1
        for block in sequence.rounds[:-1]:
            assert block.emitted == block.accepted + 1 and block.drafted == 4
        assert len(sequence.timestamps) == len(sequence.token_ids)
    plain = decode(target, None, PROMPTS[:1], greedy(4)).sequences[0]
    assert {(block.drafted, block.accepted, block.emitted) for block in plain.rounds} == {(0, 0, 1)}
    assert len(plain.rounds) == 39


class ScriptedDrafter:
    """Drafts the target's own greedy tokens, spoilt where the script of the round says False."""

    max_positions = None
    wants_hidden_states = False

    def __init__(self, answer: list[int], script: list[list[bool]]) -> None:
        self.answer, self.script, self.calls = answer, script, 0

    def open(self, rows, sampling, vocabulary):
        pass

    def begin(self, first_row, prompts, room):
        self.prompt_length = len(prompts[0])

    def propose(self, batch, lengths):
        done = len(batch.committed[0]) - self.prompt_length
        tokens = self.answer[done : done + lengths[0]]
        script = self.script[self.calls]
        self.calls += 1
        spoilt = [token if right else (token + 1) % 100 for token, right in zip(tokens, script, strict=False)]
        return Proposal(torch.tensor([spoilt]), torch.tensor([len(spoilt)]))

    def move_row(self, source, destination):
        pass


def test_counts_stop_at_the_first_rejection():
    """S01: patterns [T,F,T,T], [T,T,T,T], [F,T,T,T] give accepted 1 + 4 + 0, drafted 12, emitted 2 + 5 + 1."""
    target = tiny_llama()
    answer = uncached_greedy(target, [5, 6], 30)
    script = [[True, False, True, True], [True] * 4, [False, True, True, True], [True] * 4]
    result = decode(target, ScriptedDrafter(answer, script), [[5, 6]], greedy(4, 10))
    *rounds, last = result.sequences[0].rounds
    assert (last.drafted, last.accepted, last.emitted) == (1, 1, 1), "nothing beyond the end is counted"
    assert [block.accepted for block in rounds] == [1, 4, 0]
    assert sum(block.drafted for block in rounds) == 12
    assert [block.emitted for block in rounds] == [2, 5, 1]
    assert result.sequences[0].token_ids == answer[:10]


def test_draft_cache_follows_the_committed_text():
    """D08: proposals equal those of a draft that is run afresh, without a cache, on the committed text."""
    target = tiny_llama()
    draft = noisy_copy(target, 0.02)
    seen = []

    class Spy(ModelDrafter):
        def propose(self, batch, lengths):
            proposal = super().propose(batch, lengths)
            seen.append((list(batch.committed[0]), proposal.token_ids[0].tolist()))
            return proposal

    stats = decode(target, Spy(draft), [[5, 6, 7]], greedy(4, 80)).stats
    assert 0 < stats.accepted < stats.drafted
    for committed, proposed in seen:
        assert proposed == uncached_greedy(draft, committed, len(proposed))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
def test_copy_stays_exact_over_a_long_answer(k):
    target = tiny_llama()
    stats = decode(target, copy.deepcopy(target), [[5, 6, 7]], greedy(k, 200)).stats
    assert stats.accepted == stats.drafted > 0


def test_acceptance_does_not_decay_along_an_answer():
    """D08: the last 50 tokens are accepted as a draft without a cache would have them."""
    target = tiny_llama()
    draft = noisy_copy(target, 0.02)
    sequence = decode(target, draft, [[5, 6, 7]], greedy(4, 200)).sequences[0]
    tokens, done, accepted, expected = [5, 6, 7, *sequence.token_ids], 4, 0, 0
    for block in sequence.rounds:
        if done > 153:
            proposed = uncached_greedy(draft, tokens[:done], block.drafted)
            kept = [mine == theirs for mine, theirs in zip(proposed, tokens[done:], strict=False)] + [False]
            expected += min(kept.index(False), block.drafted)
            accepted += block.accepted
        done += block.emitted
    assert accepted == expected > 0


@pytest.mark.parametrize("length", range(1, 13))
def test_the_length_cap_is_exact_inside_a_block(length):
    """D10"""
    target = tiny_llama()
    expected = uncached_greedy(target, [5, 6], length)
    sequence = decode(target, copy.deepcopy(target), [[5, 6]], greedy(8, length)).sequences[0]
    assert sequence.token_ids == expected
    assert sequence.finish_reason == "length"
    assert sum(block.drafted for block in sequence.rounds) == sum(block.accepted for block in sequence.rounds)


def test_eos_inside_a_block_ends_the_row_and_the_counts():
    target = tiny_llama()
    answer = uncached_greedy(target, [5, 6], 30)
    eos = answer[4]
    stop = answer.index(eos) + 1
    for draft in (None, copy.deepcopy(target), noisy_copy(target, 0.02)):
        sequence = decode(target, draft, [[5, 6]], greedy(8, 30, eos_token_ids=(eos, 99))).sequences[0]
        assert sequence.token_ids == answer[:stop]
        assert sequence.finish_reason == "eos"
    copied = decode(target, copy.deepcopy(target), [[5, 6]], greedy(8, 30, eos_token_ids=(eos,))).sequences[0]
    last = copied.rounds[-1]
    assert (last.drafted, last.accepted, last.emitted) == (min(8, stop - 1), min(8, stop - 1), stop - 1)


def test_stop_string_spanning_tokens_inside_a_block():
    """D10: text, ids and reason equal plain decoding's; the earliest of stop string and length cap wins."""
    tokenizer = build_tiny_tokenizer()
    target = tiny_llama(vocabulary=264)
    prompt = tokenizer("whereas").input_ids
    plain = decode(target, None, [prompt], greedy(1, 30, allowed_token_ids=range(259)), tokenizer=tokenizer).sequences[
        0
    ]
    stop = tokenizer.decode(plain.token_ids)[5:9]
    assert stop
    results = []
    for draft in (None, copy.deepcopy(target), noisy_copy(target, 0.02)):
        config = greedy(8, 30, stop=(stop,), allowed_token_ids=range(259), return_logprobs=2)
        results.append(decode(target, draft, [prompt], config, tokenizer=tokenizer).sequences[0])
    assert {(tuple(r.token_ids), r.text, r.finish_reason) for r in results} == {
        (tuple(results[0].token_ids), tokenizer.decode(plain.token_ids).split(stop)[0], "stop")
    }
    needed = len(results[0].token_ids)
    for result in results:
        assert len(result.logprobs.token) == len(result.logprobs.top_ids) == len(result.timestamps) == needed
        assert sum(block.emitted for block in result.rounds) == needed - 1
        assert all(block.accepted <= block.drafted for block in result.rounds)
    for cap, reason in ((needed - 1, "length"), (needed, "stop")):
        config = greedy(8, cap, stop=(stop,), allowed_token_ids=range(259))
        assert (
            decode(target, copy.deepcopy(target), [prompt], config, tokenizer=tokenizer).sequences[0].finish_reason
            == reason
        )


class Spelling:
    """A tokenizer that spells each id with its own piece."""

    all_special_tokens = ["<|end|>", "<|turn|>"]

    def __init__(self, pieces: dict[int, str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids, skip_special_tokens):
        pieces = [self.pieces[token] for token in token_ids]
        return "".join(p for p in pieces if not (skip_special_tokens and p in self.all_special_tokens))


@pytest.mark.parametrize(
    ("stop", "reason", "text"),
    [("<|turn|>", "stop", "ab"), ("b", "stop", "a"), ("\ufffd", "length", "ab\ufffd")],
)
def test_special_tokens_stop_a_row_but_are_no_text_and_half_a_character_matches_nothing(stop, reason, text):
    target = tiny_llama()
    answer = uncached_greedy(target, [5], 5)
    pieces = dict(zip(answer, ["a", "<|end|>", "b", "<|turn|>", "\ufffd"], strict=True))
    assert len(pieces) == 5
    for drafter in (None, copy.deepcopy(target)):
        result = decode(target, drafter, [[5]], greedy(3, 5, stop=(stop,)), tokenizer=Spelling(pieces))
        assert (result.sequences[0].finish_reason, result.sequences[0].text) == (reason, text)


def test_stop_strings_need_the_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        decode(tiny_llama(), None, [[5]], greedy(1, 4, stop=("x",)))


def sampled(k: int, tokens: int = 20) -> DecodeConfig:
    return DecodeConfig(draft_length=k, max_new_tokens=tokens, temperature=1.0)


def test_same_seed_same_tokens_whatever_ran_before():
    """D14"""
    target = tiny_llama(std=0.1)
    draft = noisy_copy(target, 0.1)
    decoder = Decoder(target, draft, sampled(3), slots=2)

    def run(prompt, seed):
        decoder.submit(prompt, seed)
        events = []
        while decoder.busy:
            events += decoder.step()
        return events[-1].finished

    first = run([5, 6, 7], 7)
    run([9, 9, 1, 2], 3)
    decode(target, draft, [[4]], sampled(8), seed=1)
    second = run([5, 6, 7], 7)
    assert first.token_ids == second.token_ids and first.rounds == second.rounds
    alone = decode(target, draft, [[5, 6, 7]], sampled(3), seed=[7]).sequences[0]
    crowd = decode(target, draft, [[1], [5, 6, 7], [8, 8]], sampled(3), seed=[1, 7, 2]).sequences[1]
    assert first.token_ids == alone.token_ids == crowd.token_ids
    assert max(block.drafted for block in first.rounds) == 3


def test_unseeded_rows_differ_and_models_keep_their_configs():
    target = tiny_llama(std=0.1)
    before = target.generation_config.to_dict()
    rows = decode(target, noisy_copy(target, 0.1), [[5, 6]] * 50, sampled(2, 8)).sequences
    assert len({tuple(row.token_ids) for row in rows}) > 25
    assert target.generation_config.to_dict() == before
    seeded = [tokens_of(decode(target, None, [[5, 6]] * 3, sampled(2, 8), seed=4)) for _ in range(2)]
    assert seeded[0] == seeded[1] and seeded[0][0] != seeded[0][1]


def test_logprobs_are_the_targets():
    """S10: accepted, corrected and bonus tokens carry the target's teacher-forced log-softmax."""
    target = tiny_llama()
    result = decode(target, noisy_copy(target, 0.02), [[5, 6, 7]], greedy(4, 30, return_logprobs=5))
    assert 0 < result.stats.accepted < result.stats.drafted
    sequence = result.sequences[0]
    for index, token in enumerate(sequence.token_ids):
        expected = next_logits(target, [5, 6, 7, *sequence.token_ids[:index]]).log_softmax(-1)
        assert sequence.logprobs.token[index] == pytest.approx(expected[token].item(), abs=1e-5)
        assert sequence.logprobs.top_ids[index] == expected.topk(5).indices.tolist()
        assert sequence.logprobs.top[index] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
    plain = decode(target, None, [[5]], greedy(1, 3)).sequences[0]
    assert plain.logprobs is None and plain.prompt_logprobs is None


def test_prompt_logprobs_are_the_targets_and_change_nothing():
    target = tiny_llama()
    prompts = [[5, 6, 7], [8], [9, 1, 2, 3, 4]]
    result = decode(target, None, prompts, greedy(1, 6, prompt_logprobs=4))
    assert tokens_of(result) == tokens_of(decode(target, None, prompts, greedy(1, 6)))
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        assert len(sequence.prompt_logprobs.token) == len(prompt) - 1
        for index in range(1, len(prompt)):
            expected = next_logits(target, prompt[:index]).log_softmax(-1)
            assert sequence.prompt_logprobs.token[index - 1] == pytest.approx(expected[prompt[index]].item(), abs=1e-5)
            assert sequence.prompt_logprobs.top_ids[index - 1] == expected.topk(4).indices.tolist()


@pytest.mark.parametrize("allowed", [range(50), range(0, 100, 2)])
def test_a_prompt_may_hold_tokens_that_are_not_allowed(allowed):
    target = tiny_llama()
    config = greedy(1, 4, prompt_logprobs=3, allowed_token_ids=allowed)
    scored = decode(target, None, [[4, 77, 8]], config).sequences[0].prompt_logprobs.token
    expected = next_logits(target, [4, 77])[list(allowed)].log_softmax(-1)[list(allowed).index(8)].item()
    assert scored == [-math.inf, pytest.approx(expected, abs=1e-5)]


def test_the_last_block_may_reach_past_the_last_position():
    """Learned positions end at the model's limit, where the draft still proposes full blocks."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.4}
    target = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).eval()
    prompts = [[5, 6, 7, 8], [9]]
    expected = [uncached_greedy(target, prompt, 20) for prompt in prompts]
    for draft in (None, noisy_copy(target, 0.05), copy.deepcopy(target)):
        assert tokens_of(decode(target, draft, prompts, greedy(8, 20))) == expected


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(112, 104), (104, 112)])
def test_padded_vocabularies_never_emit_padding(target_rows, draft_rows):
    """T01: rows beyond the tokenizer's 100 ids win every argmax, and are never drafted, emitted or listed."""
    target = tiny_llama(vocabulary=target_rows, tie_word_embeddings=False)
    draft = tiny_llama(vocabulary=draft_rows, tie_word_embeddings=False)
    with torch.no_grad():
        draft.model.load_state_dict(
            {**target.model.state_dict(), "embed_tokens.weight": draft.model.embed_tokens.weight}
        )
        draft.model.embed_tokens.weight[:100] = target.model.embed_tokens.weight[:100]
        draft.lm_head.weight[:100] = target.lm_head.weight[:100]
        for model, rows in ((target, target_rows), (draft, draft_rows)):
            model.lm_head.weight[100:rows] = 1e3 * torch.randn(rows - 100, 64)
    expected = uncached_greedy(target, [5, 6], 30, allowed=100)
    assert uncached_greedy(target, [5, 6], 1)[0] >= 100, "without the limit the target would emit padding"
    config = greedy(4, 30, allowed_token_ids=range(100), return_logprobs=8)
    result = decode(target, draft, [[5, 6]], config)
    assert result.sequences[0].token_ids == expected
    assert result.stats.accepted == result.stats.drafted
    assert max(max(row) for row in result.sequences[0].logprobs.top_ids) < 100
    assert all(math.isfinite(value) for value in result.sequences[0].logprobs.token)


def test_a_token_that_the_draft_lacks_is_emitted_and_read_but_never_drafted():
    """T03: the target has one token more than the draft's embedding has rows."""
    target, draft = tiny_llama(vocabulary=101, std=0.1), tiny_llama(vocabulary=100)
    draft.load_state_dict({n: t[:100] if len(t) == 101 else t for n, t in target.state_dict().items()})
    config = DecodeConfig(draft_length=3, max_new_tokens=20, temperature=1.0)
    result = decode(target, draft, [[100, 5], *([[6]] * 40)], config, seed=1)
    assert any(100 in sequence.token_ids[:-1] for sequence in result.sequences)
    assert 0 < result.stats.accepted < result.stats.drafted
    greedily = greedy(4, 30)
    assert tokens_of(decode(target, draft, [[100, 5]], greedily)) == tokens_of(
        decode(target, None, [[100, 5]], greedily)
    )


def test_trimmed_head_drafts_only_its_tokens_and_stays_lossless():
    target = tiny_llama()
    head = list(range(0, 100, 2))
    expected = uncached_greedy(target, [5, 6], 40)
    result = decode(target, ModelDrafter(copy.deepcopy(target), head), [[5, 6]], greedy(3))
    assert result.sequences[0].token_ids == expected
    assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": 0},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": 1e-39},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"stop": ("",)},
        {"stop": "abc"},
        {"max_new_tokens": 2.5},
        {"top_k": True},
        {"eos_token_ids": (-1,)},
    ],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError):
        DecodeConfig(**{"draft_length": 1, "max_new_tokens": 1, **options})


def test_prompts_beyond_the_context_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="512 positions"):
        decode(tiny_llama(), None, [[5] * 500], greedy(1, 20))
    with pytest.raises(ValueError, match="at least one token"):
        decode(tiny_llama(), None, [[]], greedy(1, 2))


@pytest.mark.parametrize("allowed", [[7, 2, 5, 0, 9], [0, 3, 3, 3, 5, 7, 9, 9], list(range(11, -1, -1))])
def test_allowed_ids_in_any_order_stay_lossless_when_sampled(allowed):
    """The draft's support is sorted and distinct whatever the caller's order: the sampled distribution is the target's."""
    target = tiny_llama(std=0.2, vocabulary=12)
    options = {"max_new_tokens": 2, "temperature": 1.0, "allowed_token_ids": allowed}
    config = DecodeConfig(draft_length=2, **options)
    counts = []
    for drafter in (None, noisy_copy(target, 0.5)):
        rows = decode(target, drafter, [[3, 5]] * 3000, config, seed=2, slots=3000).sequences
        counts.append(torch.bincount(torch.tensor([row.token_ids[1] for row in rows]), minlength=12) / 3000)
    assert (counts[0] - counts[1]).abs().sum() / 2 < 0.05


def test_illegal_requests_are_refused_when_they_are_made():
    target = tiny_llama()
    decoder = Decoder(target, None, greedy(1, 2))
    with pytest.raises(ValueError, match="prompt ids"):
        decoder.submit([1, 9999])
    with pytest.raises(TypeError):
        decoder.submit([1, 5.7])
    with pytest.raises(ValueError, match="slots"):
        Decoder(target, None, greedy(1, 2), slots=0)
    with pytest.raises(ValueError, match="alternatives"):
        Decoder(target, None, greedy(1, 2, return_logprobs=5, allowed_token_ids=[1, 2]))
    with pytest.raises(ValueError, match="seeds"):
        decode(target, None, [[1], [2]], greedy(1, 2), seed=(1,))


def test_seeds_of_any_integer_kind_and_size():
    target = tiny_llama(std=0.1)
    rows = decode(target, None, [[5]] * 4, sampled(1, 8), seed=np.int64(0)).sequences
    assert len({tuple(row.token_ids) for row in rows}) == 4
    decode(target, None, [[5]], sampled(1, 2), seed=[2**63])
    decode(target, None, [[5]], sampled(1, 2), seed=-(2**70))
