"""The target is identified by what it is, and artifacts of another one are refused (S09, P08, I07, T07)."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.adapters.drafts import DraftConfig, check_draft, initial_draft, load_draft, read_draft_facts, save_draft
from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.targets import Target, check_same_target
from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig
from pipeline.core.templates import encode_prompts
from pipeline.core.tiny import build_tiny_tokenizer, save_tiny_target

DRAFT = DraftConfig(name="d", init="pruned", keep_layers=[0, 3])


@pytest.fixture
def target(tmp_path) -> Target:
    save_tiny_target(tmp_path / "models" / "tiny")
    return Target(ModelConfig(name="tiny", id="models/tiny", dtype="float32"), tmp_path)


def test_eos_and_sizes_come_from_the_target(target):
    assert target.eos_token_ids == (0, 2)
    assert target.vocabulary_size == 259 < target.model_config.vocab_size


def test_answers_of_another_target_or_template_are_refused(target, tmp_path):
    facts = json.loads(json.dumps(target.facts))
    check_same_target(facts, target)
    for name in facts:
        with pytest.raises(PipelineError, match=f"differs in {name}"):
            check_same_target({**facts, name: "x"}, target)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "tiny")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "model")
    tokenizer.save_pretrained(tmp_path / "models" / "tiny")
    with pytest.raises(PipelineError, match="differs in template"):
        check_same_target(facts, Target(target.config, tmp_path))


def test_weights_edited_in_place_change_the_key(target, tmp_path):
    before = target.compatibility_key
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "models" / "tiny")
    assert Target(target.config, tmp_path).compatibility_key != before


def test_a_saved_draft_is_whole_and_belongs_to_its_target(target, tmp_path, monkeypatch):
    draft = initial_draft(DRAFT, target, tmp_path)
    save_draft(tmp_path / "draft", draft, target, [1, 2, 3], DRAFT)
    loaded, head = load_draft(tmp_path / "draft", target)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, draft(ids).logits)
    assert head == [1, 2, 3] and read_draft_facts(tmp_path / "draft")["layers"] == 2
    assert loaded.generation_config.eos_token_id == [0, 2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    chats = [[{"role": "user", "content": text}] for text in ("a", "Whereas", "§ 4")]
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        target.tokenizer.eos_token_id,
        target.tokenizer.pad_token_id,
    )
    for chat in chats:
        assert tokenizer.apply_chat_template(chat, tokenize=False) == target.tokenizer.apply_chat_template(
            chat, tokenize=False
        )
    monkeypatch.setattr(target, "template", "another")
    with pytest.raises(PipelineError, match="another chat template"):
        load_draft(tmp_path / "draft", target)
    monkeypatch.undo()
    target.compatibility_key["target_fingerprint"] = "another"
    with pytest.raises(PipelineError, match="another target"):
        load_draft(tmp_path / "draft", target)


def test_layers_and_ids_are_checked_without_weights(target, tmp_path):
    with pytest.raises(PipelineError, match="keep_layers"):
        check_draft(DraftConfig(name="d", init="pruned", keep_layers=[0, 9]), target, tmp_path)
    assert "model" not in target.__dict__, "no weights were loaded"


@pytest.mark.parametrize("model_id", [None, "models/absent/deep", "/nowhere/model", "package:no-such-distribution"])
def test_a_model_that_is_not_there_is_named(model_id, tmp_path):
    with pytest.raises(PipelineError):
        resolve_model(model_id, tmp_path)


def test_rows_that_the_template_refuses_are_listed():
    """I07"""
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    good = {"prompt_id": "a", "text": "x", "messages": None}
    system = {"prompt_id": "b", "text": None, "messages": '[{"role": "system", "content": "s"}]'}
    trailing = {"prompt_id": "c", "text": None, "messages": '[{"role": "assistant", "content": "s"}]'}
    empty = {"prompt_id": "d", "text": "", "messages": None}
    with pytest.raises(PipelineError, match=r"row 1 \(b\).*row 2 \(c\).*row 3 \(d\)"):
        encode_prompts(tokenizer, [good, system, trailing, empty], None)
    with pytest.raises(PipelineError, match="at most 2 fit"):
        encode_prompts(tokenizer, [{**good, "text": "long text"}], 2)
    tokenizer.chat_template = None
    with pytest.raises(PipelineError, match="no chat template"):
        encode_prompts(tokenizer, [system], None)
