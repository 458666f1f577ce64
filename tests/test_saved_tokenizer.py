"""A saved draft brings the target's tokenizer, unchanged in all that it does (T07)."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from pipeline.adapters.drafts import DraftConfig, initial_draft, save_draft
from pipeline.adapters.targets import Target
from pipeline.core.models import ModelConfig
from pipeline.core.tiny import build_tiny_target, build_tiny_tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "What is a lease?"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  東京 🙂\tx = 1"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
]
NAMES = ("eos_token", "pad_token", "bos_token", "unk_token")


@pytest.mark.parametrize("pad_token", [None, "<|endoftext|>", "<|im_end|>"])
def test_a_saved_drafts_tokenizer_is_the_targets(tmp_path, pad_token):
    """T07: the same ids, special tokens (none invented), added token, template output and padding side."""
    tokenizer = build_tiny_tokenizer()
    tokenizer.pad_token = pad_token
    tokenizer.add_tokens(["<clause>"])
    build_tiny_target().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = Target(ModelConfig(name="t", id=str(tmp_path / "target"), dtype="float32"), tmp_path)
    config = DraftConfig(name="d", init="pruned", keep_layers=[0, 3], dtype="float32")
    (tmp_path / "draft").mkdir()
    save_draft(tmp_path / "draft", initial_draft(config, target, tmp_path), target, [0, 2, 5], config)
    saved = AutoTokenizer.from_pretrained(tmp_path / "draft")
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert [getattr(saved, name) for name in NAMES] == [getattr(tokenizer, name) for name in NAMES]
    assert saved.pad_token == pad_token and saved.padding_side == target.tokenizer.padding_side
    assert sorted(saved.all_special_ids) == sorted(tokenizer.all_special_ids)
    for conversation in CONVERSATIONS:
        for generation in (False, True):
            texts = [
                side.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation)
                for side in (tokenizer, saved)
            ]
            assert texts[0] == texts[1]
            assert saved(texts[0]).input_ids == tokenizer(texts[0]).input_ids
    assert saved("a<clause>b").input_ids == tokenizer("a<clause>b").input_ids
