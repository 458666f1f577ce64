"""The path that CUDA graphs replay: padded rows and lengths, static inputs and outputs; here with plain calls as captures.

What a replay returns is overwritten by the next one, as with a graph, so that a tensor kept too long shows.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import noisy_copy, tiny_llama, uncached_greedy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pipeline.core import replay
from pipeline.core.cost_model import Costs
from pipeline.core.decoding import DecodeConfig, Decoder, decode
from pipeline.core.draft_length import AdaptiveDraftLength
from pipeline.core.drafters import LookupThenModelDrafter, ModelDrafter, PromptLookupDrafter

COSTS = Costs(0.1, {k: 1 + 0.02 * k for k in range(9)})
PROMPTS = [[5], [3, 4], list(range(7)), [9, 8, 7], [index * 7 % 100 for index in range(30)], [2, 2]]


@pytest.fixture
def captures(monkeypatch) -> list[tuple]:
    """Make this machine replay; returns the static values of every capture made."""
    made = []

    def capture(function, static, tensors):
        made.append(static)
        inputs = [tensor if tensor is None else tensor.clone() for tensor in tensors]
        outputs = tuple(tensor if tensor is None else tensor.clone() for tensor in function(*static, *inputs))

        def run(*tensors):
            for mine, theirs in zip(inputs, tensors, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    mine.copy_(theirs)
            for kept, new in zip(outputs, function(*static, *inputs), strict=True):
                if kept is not None:
                    kept.copy_(new)
            return outputs

        return run

    monkeypatch.setattr(replay, "replays", lambda device: True)
    monkeypatch.setattr(replay, "capture", capture)
    return made


def drafters(target):
    noisy = noisy_copy(target, 0.02)
    return {
        "plain": None,
        "copy": copy.deepcopy(target),
        "noisy": noisy,
        "adaptive": ModelDrafter(noisy, adaptive=AdaptiveDraftLength(COSTS)),
        "lookup": PromptLookupDrafter(3),
        "lookup then model": LookupThenModelDrafter(PromptLookupDrafter(3, 1), ModelDrafter(noisy)),
    }


@pytest.mark.parametrize("name", ["plain", "copy", "noisy", "adaptive", "lookup", "lookup then model"])
def test_replayed_passes_give_the_same_tokens(captures, name):
    target = tiny_llama()
    config = DecodeConfig(draft_length=4, max_new_tokens=40)
    expected = [uncached_greedy(target, prompt, 40) for prompt in PROMPTS]
    for slots in (1, 3, 5):
        result = decode(target, drafters(target)[name], PROMPTS, config, slots=slots)
        assert [sequence.token_ids for sequence in result.sequences] == expected
    assert captures


def test_replayed_sampling_equals_the_exact_shapes(captures, monkeypatch):
    target = tiny_llama(std=0.1)
    config = DecodeConfig(
        draft_length=3, max_new_tokens=30, temperature=1.0, top_p=0.9, repetition_penalty=1.1, return_logprobs=2
    )

    def run():
        result = decode(target, noisy_copy(target, 0.1), PROMPTS, config, seed=5, slots=5)
        return [(s.token_ids, s.rounds, s.logprobs.top_ids) for s in result.sequences]

    replayed = run()
    assert captures
    monkeypatch.setattr(replay, "replays", lambda device: False)
    assert run() == replayed


def test_few_captures_serve_a_long_answer(captures):
    target = tiny_llama()
    decoder = Decoder(target, noisy_copy(target, 0.02), DecodeConfig(draft_length=4, max_new_tokens=200), slots=1)
    for prompt in PROMPTS[:3]:
        decoder.submit(prompt)
        while decoder.busy:
            decoder.step()
    assert len(captures) == 2, "one for the draft loop and one for the verification"


def test_what_cannot_be_captured_runs_as_it_is_after_one_warning(captures, monkeypatch, caplog):
    def refuse(function, static, tensors):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "capture", refuse)
    target = tiny_llama()
    result = decode(target, None, [[5, 6]], DecodeConfig(draft_length=1, max_new_tokens=10))
    assert result.sequences[0].token_ids == uncached_greedy(target, [5, 6], 10)
    assert [record.message.count("not permitted") for record in caplog.records] == [1]


def test_captures_end_when_the_cache_moves(captures):
    """A longer prompt makes the cache grow; graphs of the old memory must not be replayed."""
    target = tiny_llama()
    decoder = Decoder(target, copy.deepcopy(target), DecodeConfig(draft_length=2, max_new_tokens=20))
    for length in (3, 300):
        prompt = [index * 7 % 100 for index in range(length)]
        decoder.submit(prompt)
        events = []
        while decoder.busy:
            events += decoder.step()
        assert events[-1].finished.token_ids == uncached_greedy(target, prompt, 20)
    assert decoder.stats.accepted == decoder.stats.drafted


def test_lengths_and_rows_that_replays_share(captures):
    device = torch.device("cpu")
    assert [replay.padded_length(length, device) for length in (1, 256, 257, 1500)] == [256, 256, 512, 2048]
    assert [replay.padded_rows(rows, 6, device) for rows in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]


class NoHost(TorchDispatchMode):
    """Fails where a function would wait for the device or bring values from the host, which no graph can record."""

    FORBIDDEN = ("item", "_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, func
        if name in ("index", "index_put", "index_put_"):  # a mask as an index is counted first
            assert all(index is None or index.dtype != torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nothing_that_is_captured_talks_to_the_host(captures, monkeypatch, family, temperature):
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    target = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape, **FAMILIES[family])).eval()
    plain_capture = replay.capture

    def watched(function, static, tensors):
        function(*static, *tensors)  # a capture is preceded by such calls, which may initialise what they like
        with NoHost():
            return plain_capture(function, static, tensors)

    monkeypatch.setattr(replay, "capture", watched)
    config = DecodeConfig(
        draft_length=3, max_new_tokens=12, temperature=temperature, top_k=8 if temperature else 0,
        repetition_penalty=1.2, frequency_penalty=0.1, min_new_tokens=2, eos_token_ids=(1,), bad_words=((5,), (3, 4)),
    )  # fmt: skip
    decode(target, ModelDrafter(copy.deepcopy(target), range(0, 64, 2)), [[5, 6], [7]], config, seed=1)
    assert len({len(static) for static in captures}) == 2, "the draft loop and the verification were captured"


@pytest.mark.parametrize("talks", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0])])
def test_the_watch_notices_what_talks_to_the_host(talks):
    with torch.inference_mode(), NoHost(), pytest.raises(AssertionError):
        talks(torch.ones(3))
