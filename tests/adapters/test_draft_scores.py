"""Scores of drafts from stored answers: what an uncached draft would have said, without the target's weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_answers import answers_of
from tiny_models import noisy_copy, tiny_llama
from transformers import AutoModelForCausalLM

from pipeline.adapters.answer_files import write_answers
from pipeline.adapters.draft_scores import Scoring, read_stored_answers, score_distilled, score_start
from pipeline.adapters.drafts import DraftConfig, LayerChoice, save_draft
from pipeline.adapters.targets import Target
from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import teacher_forced
from pipeline.core.models import ModelConfig
from pipeline.core.sampling import Sampling
from pipeline.core.tiny import build_tiny_tokenizer
from pipeline.core.vocabulary import domain_token_ids

SCORING = Scoring(Sampling(), head_tokens=40, half_weights=False, tokens_per_forward=64, bootstrap_samples=20)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target, a draft that errs like a sibling, and answers; facts and checks as in a run."""
    root = tmp_path_factory.mktemp("project")
    model = tiny_llama(vocabulary=259, std=0.2)
    for name, part in (("target", model), ("sibling", noisy_copy(model, 0.03))):
        part.save_pretrained(root / name)
        build_tiny_tokenizer().save_pretrained(root / name)
    answers = answers_of(model, 8, top=259)
    facts = {**target_of(root).facts, "target_domain": "legal"}
    for split, rows in (("train", answers[:4]), ("dev", answers[2:])):
        write_answers(root / "answers" / split / "00000.parquet", rows, facts)
    return root


def target_of(root, name="target") -> Target:
    return Target(ModelConfig(name="t", id=name, dtype="float32"), root)


def pretrained() -> DraftConfig:
    return DraftConfig("sibling", "pretrained", id="sibling", dtype="float32")


@torch.inference_mode()
def agreement_by_hand(model, answers, allowed) -> float:
    """Token by token, without a cache, over the ids `allowed`."""
    hits = total = 0
    for answer in answers:
        ids = answer.prompt_ids.tolist()
        for token in answer.answer_ids.tolist():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            hits += allowed[logits[allowed].argmax().item()] == token
            total += 1
            ids.append(token)
    return hits / total


def test_a_pretrained_draft_is_scored_without_the_weights_of_the_target(root, monkeypatch):
    monkeypatch.setattr(Target, "model", property(lambda _: pytest.fail("the target's weights were loaded")))
    stored = read_stored_answers(target_of(root), root / "answers")
    found = score_start(pretrained(), stored, SCORING, root)
    draft = AutoModelForCausalLM.from_pretrained(root / "sibling", dtype=torch.float32)
    head = domain_token_ids(stored.train, 40, (0,), range(259))
    trimmed, whole = (agreement_by_hand(draft, stored.dev, ids) for ids in (head, list(range(259))))
    assert set(found) == {"legal", "all"}
    assert found["all"]["token_acceptance_trimmed_head"]["value"] == pytest.approx(trimmed)
    assert found["all"]["token_acceptance_full_head"]["value"] == pytest.approx(whole)
    assert 0 < trimmed < 1 and trimmed != whole


def test_above_temperature_zero_the_stored_probabilities_stand_for_the_target(root):
    """All of them are stored here, so that the estimate is exact; the distilled draft has the head that it was saved with."""
    stored = read_stored_answers(target_of(root), root / "answers")
    warm = replace(SCORING, sampling=Sampling(temperature=0.7, top_p=0.9))
    draft = AutoModelForCausalLM.from_pretrained(root / "sibling", dtype=torch.float32)
    head = list(range(0, 259, 2))
    save_draft(root / "draft", draft, target_of(root), head, pretrained())
    found = score_distilled(root / "draft", stored, warm)["all"]
    target = target_of(root).model
    for name, ids in (("trimmed", head), ("full", list(range(259)))):
        by_hand = teacher_forced(ModelDrafter(draft, ids), target, stored.dev, range(259), warm.sampling, 64)
        total = sum(row.tokens for row in by_hand)
        expected = sum(row.trimmed_head for row in by_hand) / total
        assert found[f"token_acceptance_{name}_head"]["value"] == pytest.approx(expected, abs=2e-3)
        assert 0 < expected < 1


def test_a_pruned_draft_takes_its_layers_from_the_target_and_lets_it_go(root):
    stored = read_stored_answers(target_of(root), root / "answers")
    own = DraftConfig("all layers", "pruned", keep_layers=[0, 1], dtype="float32")
    found = score_start(own, stored, replace(SCORING, head_tokens=259), root)
    assert found["all"]["token_acceptance_full_head"]["value"] == 1.0
    assert "model" not in vars(stored.target)
    choice = LayerChoice([1], epochs=1.0, draft_lengths=[1], half_weights=False)
    chosen = DraftConfig("one layer", "pruned", layer_choice=choice, dtype="float32")
    named = DraftConfig("one layer", "pruned", keep_layers=[0], dtype="float32")
    scores = [score_start(config, stored, SCORING, root) for config in (chosen, named)]
    assert scores[0] == scores[1]


def test_answers_of_another_target_are_refused(root):
    with pytest.raises(PipelineError, match="come from another target"):
        read_stored_answers(target_of(root, "sibling"), root / "answers")
