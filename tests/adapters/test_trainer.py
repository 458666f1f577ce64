"""Masks come from lengths, the loss from answer tokens alone, and what is saved is what was trained."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama

from pipeline.adapters import trainer
from pipeline.adapters.trainer import COMPLETE, distill, newest_whole_checkpoint, write_history
from pipeline.core.answers import Answer
from pipeline.core.batches import AnswerBatches, answer_logits, greedy_agreement
from pipeline.core.errors import PipelineError
from pipeline.core.losses import forward_kl_top
from pipeline.core.pruning import check_layers, keep_layers
from pipeline.core.sampling import Sampling
from pipeline.core.training import DistillConfig

HEAD = list(range(0, 100, 2)) + [1, 3]


def answer_of(target, prompt: list[int], tokens: int, name: str, top: int = 10) -> Answer:
    """A greedy answer with its stored probabilities, computed without any of the code under test."""
    ids = list(prompt)
    values, index = [], []
    with torch.inference_mode():
        scores = target(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1).topk(top)
        for _ in range(tokens):
            logprobs = target(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            best = logprobs.topk(top)
            values.append(best.values.numpy())
            index.append(best.indices.numpy().astype(np.int32))
            ids.append(int(best.indices[0]))
    own = np.array([row[0] for row in values], dtype=np.float32)
    return Answer(
        name, "legal", "continuation", name, np.array(prompt, np.int32), np.array(ids[len(prompt) :], np.int32),
        "length", Sampling(), 0, own, np.stack(index), np.stack(values), scores.indices.numpy().astype(np.int32),
        scores.values.numpy(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_llama(std=0.1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def answers(target):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, size=rng.integers(2, 9)).tolist() for _ in range(24)]
    return [answer_of(target, prompt, 3 + index % 5, f"p{index}") for index, prompt in enumerate(prompts)]


def test_every_answer_token_is_trained_once_and_nothing_else(answers):
    """L04: token values play no part; rows of different lengths share a batch."""
    batches = AnswerBatches(answers, HEAD, 64, seed=0)
    labels = np.concatenate([batches[index]["labels"].numpy() for index in range(len(batches))])
    expected = np.concatenate([answer.answer_ids for group in batches.groups for answer in group])
    assert sorted(a.prompt_id for group in batches.groups for a in group) == sorted(a.prompt_id for a in answers)
    assert np.array_equal(labels, expected)
    for index in range(len(batches)):
        batch = batches[index]
        flat = batch["input_ids"].reshape(-1)
        start = 0
        for row, answer in enumerate(batches.groups[index]):
            queries = batch["query"][start : start + len(answer.answer_ids)]
            assert flat[queries[0]] == answer.prompt_ids[-1]
            assert flat[queries[1:]].tolist() == answer.answer_ids[:-1].tolist()
            assert (queries // batch["input_ids"].shape[1] == row).all()
            start += len(answer.answer_ids)


def test_prompts_are_scored_only_when_asked_for(target, answers):
    with_prompts = AnswerBatches(answers, list(range(100)), 10_000, seed=0, prompts=True)
    batch, group = with_prompts[0], with_prompts.groups[0]
    expected = [token for a in group for token in [*a.prompt_ids[1:].tolist(), *a.answer_ids.tolist()]]
    assert batch["labels"].tolist() == expected
    with torch.inference_mode():
        losses = forward_kl_top(answer_logits(target, batch, None), batch["top_index"], batch["top_logprobs"])
    assert losses.max() < 1e-4, "the target's own logits meet the stored ones at every scored position"
    assert greedy_agreement(target, with_prompts, torch.arange(100)) == 1.0


def test_padding_and_neighbours_do_not_change_the_logits(target, answers):
    together = AnswerBatches(answers, HEAD, 10_000, seed=0)
    assert len(together) == 1
    head = torch.tensor(HEAD)
    with torch.inference_mode():
        logits = answer_logits(target, together[0], head)
        start = 0
        for answer in together.groups[0]:
            alone = answer_logits(target, AnswerBatches([answer], HEAD, 10_000, seed=0)[0], head)
            assert torch.allclose(logits[start : start + len(alone)], alone, atol=1e-5)
            start += len(alone)


def test_batches_are_no_wider_than_the_model(answers):
    batches = AnswerBatches(answers, HEAD, 64, seed=0, max_positions=13)
    widths = {batches[index]["input_ids"].shape[1] for index in range(len(batches))}
    assert max(widths) <= 13 and max(len(a.prompt_ids) + len(a.answer_ids) - 1 for a in answers) <= 13


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": float("inf")}, {"learning_rate": 1e6}, {"warmup_share": 5.0}, {"warmup_share": -1.0},
     {"adam_beta2": 2.0}, {"weight_decay": float("nan")}, {"max_grad_norm": -1.0}, {"epochs": 0.0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        config(**change)


def test_target_as_its_own_draft_agrees_everywhere(target, answers):
    batches = AnswerBatches(answers, list(range(100)), 64, seed=0)
    assert greedy_agreement(target, batches, torch.arange(100)) == 1.0


def config(**changes) -> DistillConfig:
    settings = {
        "epochs": 8, "learning_rate": 3e-3, "warmup_share": 0.1, "weight_decay": 0.0, "adam_beta2": 0.98,
        "max_grad_norm": 1.0, "tokens_per_step": 64, "tokens_per_forward": 64, "evaluations": 2, "head_tokens": 52, "train_on_prompts": False, "freeze_embeddings": False,
    }  # fmt: skip
    return DistillConfig(**{**settings, **changes})


def mean_loss(draft, answers) -> float:
    batch = AnswerBatches(answers, HEAD, 10_000, seed=0)[0]
    with torch.inference_mode():
        return forward_kl_top(
            answer_logits(draft, batch, torch.tensor(HEAD)), batch["top_index"], batch["top_logprobs"]
        ).mean().item()  # fmt: skip


def test_training_lowers_the_loss_and_reports_history(target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    before = mean_loss(draft, answers)
    history = distill(draft, answers, answers[:6], HEAD, config(), seed=0, checkpoints=tmp_path / "c")
    assert mean_loss(draft, answers) < 0.7 * before
    measured = [row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row]
    assert len(measured) == 2
    dev = AnswerBatches(answers[:6], HEAD, 10_000, seed=0)
    assert greedy_agreement(draft, dev, torch.tensor(HEAD)) == pytest.approx(max(measured))
    write_history(tmp_path / "history.csv", history)
    assert (tmp_path / "history.csv").read_text().startswith("step,tokens,loss,learning_rate,dev_token_acceptance\n")


def test_padding_rows_of_the_draft_play_no_part_in_training(target, answers, tmp_path):
    """T01: rows beyond the tokenizer's ids are huge, and the loss stays finite and falls."""
    draft = tiny_llama(std=0.1, vocabulary=104, num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        draft.lm_head.weight[100:] = 1e4
    history = distill(draft, answers, answers[:2], HEAD, config(), seed=0, checkpoints=tmp_path / "c")
    losses = [row["loss"] for row in history if "loss" in row]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert bool((draft.lm_head.weight[100:] == 1e4).all())


def test_accumulation_equals_one_large_batch(target, answers, tmp_path, monkeypatch):
    """Normalised by the answer tokens of the whole step: four micro-batches or one give the same update."""
    monkeypatch.setattr(trainer, "resolve_dtype", lambda *_: torch.float32)
    changes = {"epochs": 1, "evaluations": 1, "tokens_per_step": 10_000, "warmup_share": 0.0}
    weights = []
    for name, tokens in (("whole", 10_000), ("parts", 64)):
        draft = keep_layers(target, [0, 3])
        distill(draft, answers, answers[:2], HEAD, config(**changes, tokens_per_forward=tokens), 0, tmp_path / name)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in draft.parameters()]))
    start = torch.cat([p.detach().flatten() for p in keep_layers(target, [0, 3]).parameters()])
    assert (weights[0] - start).abs().max() > 1e-4
    assert (weights[0] - weights[1]).abs().max() < 2e-4


def test_frozen_embeddings_stay_and_the_rest_is_trained(target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    distill(draft, answers, answers[:2], HEAD, config(epochs=1, freeze_embeddings=True), 0, tmp_path / "c")
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert not torch.equal(draft.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    """P06: a killed save leaves a folder without its last file."""
    for step, whole in ((8, True), (16, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if whole:
            (folder / COMPLETE).touch()
    assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    assert newest_whole_checkpoint(tmp_path / "absent") is None


def test_a_diverging_run_stops_with_the_remedy(target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    with torch.no_grad():
        draft.model.norm.weight.fill_(float("nan"))
    with pytest.raises(PipelineError, match="learning_rate"):
        distill(draft, answers, answers[:2], HEAD, config(), seed=0, checkpoints=tmp_path / "c")


@pytest.mark.parametrize("tied", [True, False])
def test_saved_draft_reloads_to_the_same_logits_in_a_new_process(tied, answers, tmp_path):
    """L08"""
    big = tiny_llama(std=0.1, num_hidden_layers=4, tie_word_embeddings=tied)
    draft = keep_layers(big, [1, 3])
    distill(draft, answers, answers[:2], HEAD, config(epochs=1, evaluations=1), seed=0, checkpoints=tmp_path / "c")
    draft.save_pretrained(tmp_path / "draft")
    with torch.inference_mode():
        torch.save(draft(torch.tensor([[1, 2, 3]])).logits, tmp_path / "logits.pt")
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as M; from safetensors import safe_open\n"
        "folder = sys.argv[1]; model, info = M.from_pretrained(folder + '/draft', output_loading_info=True)\n"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "logits = model.eval()(torch.tensor([[1, 2, 3]])).logits\n"
        "assert (logits - torch.load(folder + '/logits.pt')).abs().max() < 1e-6\n"
        "names = safe_open(folder + '/draft/model.safetensors', 'pt').keys()\n"
        "assert ('lm_head.weight' in names) != model.config.tie_word_embeddings, names\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pruning_keeps_the_named_layers_and_the_original(target):
    draft = keep_layers(target, [1, 3])
    for new, old in enumerate([1, 3]):
        assert torch.equal(draft.model.layers[new].mlp.up_proj.weight, target.model.layers[old].mlp.up_proj.weight)
        assert draft.model.layers[new].self_attn.layer_idx == new
    assert target.config.num_hidden_layers == 4
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)


@pytest.mark.parametrize("keep", [[], [0, 0], [3, 1], [0, 4], [-1, 2]])
def test_layers_that_do_not_exist_are_refused(keep):
    with pytest.raises(PipelineError, match="keep_layers"):
        check_layers(keep, 4)
