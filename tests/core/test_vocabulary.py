"""Pairs with harmless differences are accepted with a warning; others are refused with the sizes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import noisy_copy, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.core.answers import Answer
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling
from pipeline.core.tiny import build_tiny_tokenizer
from pipeline.core.vocabulary import domain_token_ids, match_vocabularies


def byte_tokenizer(special: tuple[str, ...], size: int, **options) -> PreTrainedTokenizerFast:
    """`special` first, then bytes in order, up to `size` ids."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())][:size]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], **options)
    fast.add_special_tokens({"extra_special_tokens": list(special[1:])})
    return fast


def test_equal_tokenizers_match_without_a_warning():
    match = match_vocabularies(build_tiny_tokenizer(), build_tiny_tokenizer(), 259, 259)
    assert (match.shared_ids, match.warnings) == (range(259), [])


@pytest.mark.parametrize("rows", [(112, 104), (104, 112)])
def test_padded_embeddings_are_masked(rows):
    tokenizer = byte_tokenizer(("<eos>", "<s>"), 100)
    match = match_vocabularies(tokenizer, tokenizer, *rows)
    assert match.shared_ids == range(100)
    assert f"target: 100 tokens, {rows[0]} embedding rows; draft: 100 tokens, {rows[1]}" in match.warnings[0]


def test_another_pad_token_is_harmless():
    target, draft = build_tiny_tokenizer(), build_tiny_tokenizer()
    target.pad_token = None
    match = match_vocabularies(target, draft, 259, 259)
    assert match.shared_ids == range(259)
    assert match.warnings == ["pad_token differs: None in the target, '<|endoftext|>' in the draft"]


@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_on_one_side_is_never_drafted(special):
    target = build_tiny_tokenizer()
    target.add_tokens(["<x>"], special_tokens=special)
    for pair in ((target, build_tiny_tokenizer()), (build_tiny_tokenizer(), target)):
        match = match_vocabularies(*pair, 264, 264)
        assert target.convert_tokens_to_ids("<x>") == 259 and match.shared_ids == range(259)
        assert "from 259 on are never drafted" in match.warnings[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_never_emits_the_token_that_only_it_has(temperature):
    """T03: the draft's head prefers its extra token <x> everywhere, and neither drafts nor answers hold it."""
    draft_tokenizer = build_tiny_tokenizer()
    draft_tokenizer.add_tokens(["<x>"])
    match = match_vocabularies(build_tiny_tokenizer(), draft_tokenizer, 264, 264)
    target = tiny_llama(vocabulary=264, tie_word_embeddings=False)
    draft = noisy_copy(target, 0.01)
    with torch.no_grad():
        draft.lm_head.weight[259] = 1e3 * draft.lm_head.weight[0]
    drafted = []

    class Spy(ModelDrafter):
        def propose(self, batch, lengths):
            proposal = super().propose(batch, lengths)
            drafted.extend(proposal.token_ids.flatten().tolist())
            return proposal

    config = DecodeConfig(3, 20, temperature=temperature, allowed_token_ids=match.shared_ids)
    result = decode(target, Spy(draft), [[5, 6]] * 4, config, seed=0)
    assert drafted and max(drafted) < 259
    assert max(max(sequence.token_ids) for sequence in result.sequences) < 259


def test_a_begin_token_flag_and_the_name_of_the_class_are_harmless(tmp_path):
    """T03: what a tokenizer would put before a text, and what its class is called, change no id."""
    build_tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"add_bos_token": True, "bos_token": "<|im_start|>", "tokenizer_class": "LlamaTokenizerFast"}
    path.write_text(json.dumps(settings), encoding="utf-8")
    match = match_vocabularies(build_tiny_tokenizer(), PreTrainedTokenizerFast.from_pretrained(tmp_path), 259, 259)
    assert match.shared_ids == range(259)
    assert match.warnings == ["bos_token differs: None in the target, '<|im_start|>' in the draft"]


def test_a_special_token_may_go_by_another_name():
    target, draft = byte_tokenizer(("<eos>", "<pad>"), 200), byte_tokenizer(("<eos>", "[PAD]"), 200)
    match = match_vocabularies(target, draft, 200, 200)
    assert match.shared_ids == range(200)
    assert match.warnings == [
        "1 special tokens have other names; the first is 1: '<pad>' in the target, '[PAD]' in the draft"
    ]


def test_a_special_token_may_not_be_elsewhere():
    target, draft = byte_tokenizer(("<eos>", "<a>", "<b>"), 200), byte_tokenizer(("<eos>", "<b>", "<a>"), 200)
    with pytest.raises(PipelineError, match="differ at 2 ids; the first is 1: '<a>' in the target, '<b>' in the draft"):
        match_vocabularies(target, draft, 200, 200)


def test_shifted_ids_are_refused_with_the_sizes():
    target, draft = byte_tokenizer(("<eos>", "<s>"), 200), byte_tokenizer(("<eos>",), 200)
    with pytest.raises(PipelineError, match="target: 200 tokens, 208 embedding rows; draft: 200 tokens, 204 embedding"):
        match_vocabularies(target, draft, 208, 204)


def test_a_draft_that_lacks_bytes_splits_text_differently():
    target, draft = byte_tokenizer(("<eos>", "<s>"), 258), byte_tokenizer(("<eos>", "<s>"), 100)
    with pytest.raises(PipelineError, match="split the same text differently"):
        match_vocabularies(target, draft, 258, 100)


def test_a_short_common_beginning_is_not_enough():
    whole, holed = byte_tokenizer(("<eos>", "<s>"), 100), byte_tokenizer(("<eos>", "<s>"), 50)
    holed.add_tokens([f"<{index}>" for index in range(10)])
    for index in range(50, 60):
        assert holed.convert_ids_to_tokens(index).startswith("<")
    with pytest.raises(PipelineError, match="differ at 10 ids; the first is 50"):
        match_vocabularies(whole, holed, 100, 60)
    with pytest.raises(PipelineError, match="share only the first 40 ids"):
        match_vocabularies(whole, whole, 100, 40)


def answer(top_ids: list[list[int]], probabilities: list[list[float]]) -> Answer:
    top, scores = np.array(top_ids, np.int32), np.log(np.array(probabilities, np.float32))
    prompt, own = np.array([1], np.int32), top[:, 0]
    none = (np.zeros((0, top.shape[1]), np.int32), np.zeros((0, top.shape[1]), np.float32))
    return Answer(
        "a", "legal", "continuation", "c", prompt, own, "eos", Sampling(), 0, scores[:, 0], top, scores, *none
    )


def test_the_trimmed_head_ranks_by_mass_and_leaves_out_what_the_draft_lacks():
    """T03: the target's own extra token (id 9) is answered, but the draft has only ids 0 .. 7."""
    rows = answer([[9, 3], [3, 5], [2, 5]], [[0.6, 0.4], [0.5, 0.4], [0.5, 0.3]])
    assert domain_token_ids([rows], 2, (0,), range(8)) == [0, 3, 5]
    assert domain_token_ids([rows], 20, (0, 9), range(8)) == [0, 2, 3, 5]
