"""Stop strings of many bytes, whose characters are split over tokens and blocks (D10)."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.core.decoding import DecodeConfig, GeneratedSequence, decode
from pipeline.core.tiny import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer()
PROMPT = TOKENIZER("ab").input_ids
POSITIONS = 64


def speller(text: str, spoilt: int | None = None) -> GPT2LMHeadModel:
    """A model whose greedy answer to PROMPT is `text`, byte by byte; every token numbered a multiple of `spoilt` is wrong.

    Its hidden state is the one-hot position, and the output head says which token belongs there.
    """
    shape = {"n_positions": POSITIONS, "n_embd": POSITIONS, "n_layer": 1, "n_head": 1, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=264, bos_token_id=None, eos_token_id=None, **shape)).eval()
    answer = TOKENIZER(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        for weight in (model.transformer.wte.weight, *model.transformer.h.parameters(), model.lm_head.weight):
            weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(POSITIONS))
        for index in range(POSITIONS - len(PROMPT)):
            token = answer[index] if index < len(answer) else TOKENIZER("~").input_ids[0]
            wrong = spoilt is not None and index % spoilt == 0
            model.lm_head.weight[(token + 1) % 259 if wrong else token, len(PROMPT) - 1 + index] = 1.0
    return model


def expected(text: str, stops: tuple[str, ...], cap: int) -> tuple[int, str, str]:
    """Tokens, text and finish reason by hand: the first byte after which a stop string stands there whole."""
    data = (text + "~" * POSITIONS).encode()[:cap]
    for count in range(1, cap + 1):
        whole = data[:count].decode("utf-8", errors="ignore")
        starts = [whole.index(stop) for stop in stops if stop in whole]
        if starts:
            return count, whole[: min(starts)], "stop"
    return cap, data.decode("utf-8", errors="replace"), "length"


CASES = [
    ("契約書の東京支店。終", ("東京",)),
    ("亭京亭京", ("京",)),  # the first two bytes of both characters agree
    ("é東\u0301京 end", ("京", "\u0301京")),  # two stops end at once: the earlier start counts
    ("ok 👨‍👩‍👧‍👦 done", ("👩",)),  # inside a joined sequence
    ("ok 👨‍👩‍👧‍👦 done", ("\u200d👧‍👦",)),  # begins with the joiner
    ("ok 👨‍👩‍👧‍👦 done", ("👨‍👩‍👧‍👦",)),
    ("😀😁😂😃", ("😂😃", "😁😂")),  # four bytes each, the first three equal
    ("a👍🏽b👍", ("👍b", "🏽")),
    ("日本語だけ", ("存在しない",)),
]


@pytest.mark.parametrize(("text", "stops"), CASES)
def test_characters_split_over_tokens_stop_where_plain_decoding_stops(text, stops):
    """Every cap from one byte to beyond the end, so that caps and blocks end inside characters; k = 1, 3, 8."""
    target = speller(text)
    assert len(PROMPT) == 2 and len(text.encode()) + 2 < POSITIONS
    caps = range(1, min(len(text.encode()) + 3, POSITIONS - 2))
    drafts = {"plain": (None, 1), "copy, k=1": (speller(text), 1), "copy, k=8": (speller(text), 8)}
    drafts["spoilt, k=3"] = speller(text, spoilt=5), 3
    ids = TOKENIZER(text + "~~~", add_special_tokens=False).input_ids
    for cap in caps:
        count, cut, reason = expected(text, stops, cap)
        for name, (draft, k) in drafts.items():
            found = answer(target, draft, DecodeConfig(draft_length=k, max_new_tokens=cap, stop=stops))
            assert (found.token_ids, found.text, found.finish_reason) == (ids[:count], cut, reason), (name, cap)


def answer(target: GPT2LMHeadModel, draft: GPT2LMHeadModel | None, config: DecodeConfig) -> GeneratedSequence:
    return decode(target, draft, [PROMPT], config, tokenizer=TOKENIZER).sequences[0]


def test_the_spoilt_draft_is_kept_and_refused():
    text = CASES[0][0]
    config = DecodeConfig(draft_length=3, max_new_tokens=20)
    stats = decode(speller(text), speller(text, spoilt=5), [PROMPT], config).stats
    assert 0 < stats.accepted < stats.drafted
