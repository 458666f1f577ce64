"""Masks come from lengths, the loss from answer tokens alone, and what is saved is what was trained."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_answers import answers_of
from tiny_models import tiny_llama
from tiny_settings import distill_config
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback, TrainerState

from pipeline.adapters import trainer
from pipeline.adapters.trainer import COMPLETE, distill, newest_whole_checkpoint, write_history
from pipeline.core.batches import AnswerBatches, answer_logits
from pipeline.core.errors import PipelineError
from pipeline.core.losses import NAMES, forward_kl
from pipeline.core.objective import Objective
from pipeline.core.pruning import check_layers, keep_layers
from pipeline.core.training import DistillConfig

HEAD = list(range(0, 100, 2)) + [1, 3]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(std=0.1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def answers(target):
    return answers_of(target, 24)


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
    whole = Objective(forward_kl, torch.arange(100), 100, sampled_rows=None, chunk_tokens=100)
    _, losses = whole.loss(target, batch)
    assert losses.max() < 1e-4, "the target's own logits meet the stored ones at every scored position"
    found = whole.agreement(target, batch)
    assert found.shape == (len(expected), 3) and (found[:, :2] == 1).all()


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
     {"adam_beta2": 2.0}, {"weight_decay": float("nan")}, {"max_grad_norm": -1.0}, {"epochs": 0.0},
     {"jensen_shannon_beta": 0.9999}, {"kl_temperature": 2.0}, {"selected_share": 0.5}, {"reference_draft": "data/draft"}, {"loss": "kl"},
     {"target": "here"}, {"optimizer": "sgd"}, {"sampled_rows": -1}, {"patience": 0}, {"chunk_tokens": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        distill_config(**change)


def objective(**options) -> Objective:
    return Objective(forward_kl, torch.tensor(HEAD), 100, **{"sampled_rows": None, "chunk_tokens": 2048, **options})


def mean_loss(draft, answers) -> float:
    return objective().loss(draft, AnswerBatches(answers, HEAD, 10_000, seed=0)[0])[1].mean().item()


def train(draft, answers, dev, settings: DistillConfig, folder, **options) -> list[dict]:
    return distill(draft, answers, dev, HEAD, settings, 0, folder, vocabulary=100, **options)


def test_training_lowers_the_loss_and_reports_history(target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    before = mean_loss(draft, answers)
    rows = []
    history = train(draft, answers, answers[:6], distill_config(), tmp_path / "c", on_log=rows.append)
    reported = {row["step"]: {} for row in rows}
    for row in rows:
        reported[row["step"]].update(row)
    assert list(reported.values()) == history, "each row is reported while training, the last one included"
    assert mean_loss(draft, answers) < 0.7 * before
    measured = [row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row]
    assert len(measured) == 2
    dev = AnswerBatches(answers[:6], HEAD, 10_000, seed=0)
    assert objective().agreement(draft, dev[0])[:, 0].mean().item() == pytest.approx(max(measured))
    write_history(tmp_path / "history.csv", history)
    assert (tmp_path / "history.csv").read_text().startswith("step,tokens,loss,learning_rate,dev_token_acceptance,")


@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_a_quantised_target_in_the_loop_trains_the_draft(bits, target, answers, tmp_path):
    """L09: where bitsandbytes runs, the run goes on."""
    target.save_pretrained(tmp_path / "target")
    settings = BitsAndBytesConfig(**{bits: True})
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "target", quantization_config=settings, device_map="cpu")
    draft = keep_layers(target, [0, 3])
    online = distill_config(target="online", epochs=6)
    history = train(draft, answers, answers[:2], online, tmp_path / "c", target=small)
    losses = [row["loss"] for row in history if row.get("loss") is not None]
    assert losses[-1] < 0.8 * losses[0]


def test_padding_rows_of_the_draft_play_no_part_in_training(target, answers, tmp_path):
    """T01: rows beyond the tokenizer's ids are huge, and the loss stays finite and falls."""
    draft = tiny_llama(std=0.1, vocabulary=104, num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        draft.lm_head.weight[100:] = 1e4
    history = train(draft, answers, answers[:2], distill_config(), tmp_path / "c")
    losses = [row["loss"] for row in history if "loss" in row]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert bool((draft.lm_head.weight[100:] == 1e4).all())


@pytest.fixture
def float32(monkeypatch):
    monkeypatch.setattr(trainer, "resolve_dtype", lambda *_: torch.float32)


def flat(draft) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in draft.parameters()])


def test_accumulation_equals_one_large_batch(target, answers, tmp_path, float32):
    """Normalised by the answer tokens of the whole step: four micro-batches or one give the same update."""
    changes = {"epochs": 1, "evaluations": 1, "tokens_per_step": 10_000, "warmup_share": 0.0}
    weights = []
    for name, tokens in (("whole", 10_000), ("parts", 64)):
        draft = keep_layers(target, [0, 3])
        train(draft, answers, answers[:2], distill_config(**changes, tokens_per_forward=tokens), tmp_path / name)
        weights.append(flat(draft))
    assert (weights[0] - flat(keep_layers(target, [0, 3]))).abs().max() > 1e-4
    assert (weights[0] - weights[1]).abs().max() < 2e-4


def test_frozen_embeddings_stay_and_the_rest_is_trained(target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    train(draft, answers, answers[:2], distill_config(epochs=1, freeze_embeddings=True), tmp_path / "c")
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert not torch.equal(draft.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)


class _Killed(TrainerCallback):
    """Ends the run as a kill would: in the middle of a step, leaving what is on disk."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def watched(monkeypatch):
    """Records (optimiser step, rows of its forward pass, learning rate); `kill_at` ends a run there."""

    class Watched(trainer.DraftTrainer):
        kill_at = None
        seen: list = []

        def __init__(self, **options):
            super().__init__(**options)
            if Watched.kill_at:
                self.add_callback(_Killed(Watched.kill_at))

        def compute_loss(self, model, inputs, *args, **options):
            Watched.seen.append((self.state.global_step, int(inputs["index"]), self._get_learning_rate()))
            return super().compute_loss(model, inputs, *args, **options)

    monkeypatch.setattr(trainer, "DraftTrainer", Watched)
    return Watched


RESUMED = {"epochs": 3, "evaluations": 5, "sampled_rows": 8, "tokens_per_step": 128, "tokens_per_forward": 64}


def straight_run(target, answers, folder, watched) -> tuple[torch.Tensor, list]:
    draft = keep_layers(target, [0, 3])
    train(draft, answers, answers[:4], distill_config(**RESUMED), folder)
    seen, watched.seen = watched.seen, []
    return flat(draft), seen


def killed_run(target, answers, folder, watched, step: int) -> None:
    watched.kill_at = step
    with pytest.raises(KeyboardInterrupt):
        train(keep_layers(target, [0, 3]), answers, answers[:4], distill_config(**RESUMED), folder)
    watched.kill_at, watched.seen = None, []


def test_a_killed_run_continues_with_the_same_rows_rates_and_weights(target, answers, tmp_path, watched, float32):
    """P07: killed in the second epoch, between two checkpoints."""
    weights, seen = straight_run(target, answers, tmp_path / "straight", watched)
    last = seen[-1][0]
    assert last >= 8, "the run must have enough steps to be killed in the middle of"
    killed_run(target, answers, tmp_path / "killed", watched, step=last // 2 + 1)
    whole = newest_whole_checkpoint(tmp_path / "killed")
    resumed_at = int(whole.split("-")[-1])
    assert 0 < resumed_at <= last // 2 + 1 and resumed_at % ((last + 1) // 3), "inside the second epoch"
    draft = keep_layers(target, [0, 3])
    train(draft, answers, answers[:4], distill_config(**RESUMED), tmp_path / "killed")
    assert watched.seen == [entry for entry in seen if entry[0] >= resumed_at]
    assert (flat(draft) - weights).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "damage"),
    [("model.safetensors", "cut"), ("optimizer.pt", "empty"), ("trainer_state.json", "gone"), (COMPLETE, "gone"),
     (COMPLETE, "cut")],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_passed_over(
    name, damage, target, answers, tmp_path, watched, float32, caplog
):
    """P06"""
    weights, seen = straight_run(target, answers, tmp_path / "straight", watched)
    killed_run(target, answers, tmp_path / "killed", watched, step=seen[-1][0])
    folders = sorted((tmp_path / "killed").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
    broken = folders[-1] / name
    if damage == "gone":
        broken.unlink()
    else:
        broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2 if damage == "cut" else 0])
    draft = keep_layers(target, [0, 3])
    train(draft, answers, answers[:4], distill_config(**RESUMED), tmp_path / "killed")
    assert str(folders[-1]) in caplog.text
    assert watched.seen[0][0] == int(folders[-2].name.split("-")[-1])
    assert (flat(draft) - weights).abs().max() < 1e-6


def test_when_every_checkpoint_is_broken_training_starts_anew(tmp_path, caplog):
    for step in (8, 16):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
    assert newest_whole_checkpoint(tmp_path) is None
    assert caplog.text.count("not whole") == 2 and not list(tmp_path.iterdir())
    assert newest_whole_checkpoint(tmp_path / "absent") is None


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_checkpoint_whose_best_one_is_broken_is_passed_over(damage, tmp_path, caplog):
    """Else the newest weights would be taken for the best ones."""
    for step, best in ((8, 8), (16, 8), (24, 8)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        (folder / "trainer_state.json").write_text(f'{{"best_model_checkpoint": "elsewhere/checkpoint-{best}"}}')
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        (folder / COMPLETE).write_text(json.dumps(sizes))
    assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-24")
    broken = tmp_path / "checkpoint-8" / "model.safetensors"
    broken.unlink() if damage == "gone" else broken.write_text("w")
    assert newest_whole_checkpoint(tmp_path) is None
    assert "checkpoint-24 builds on checkpoint-8, which is not whole" in caplog.text


@pytest.mark.parametrize("left", ["nothing", "another"])
def test_the_best_checkpoint_is_found_after_a_move(left, target, answers, tmp_path, float32, monkeypatch):
    """Killed after its last checkpoint, and continued under another mount path, or as a copy whose original has gone on: the
    best weights are not the last ones."""
    found = iter([0.9])
    monkeypatch.setattr(trainer, "agreement_figures", lambda *_: {"token_acceptance": next(found, 0.1)})
    straight, moved = keep_layers(target, [0, 3]), keep_layers(target, [0, 3])
    train(straight, answers, answers[:4], distill_config(**RESUMED), tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    state = json.loads((Path(newest_whole_checkpoint(tmp_path / "after")) / "trainer_state.json").read_text())
    assert 0 < state["best_global_step"] < state["global_step"]
    if left == "another":
        keep_layers(target, [1, 2]).save_pretrained(tmp_path / "before" / f"checkpoint-{state['best_global_step']}")
    train(moved, answers, answers[:4], distill_config(**RESUMED), tmp_path / "after")
    assert torch.equal(flat(moved), flat(straight))


def test_a_loss_that_is_not_finite_names_its_rows_and_changes_no_weight(target, answers, tmp_path):
    rows = [copy.deepcopy(answer) for answer in answers]
    rows[5].top_logprobs[1] = float("nan")
    draft = keep_layers(target, [0, 3])
    before = flat(draft)
    with pytest.raises(PipelineError, match=r"p5;.*learning_rate"):
        train(
            draft, rows, answers[:2], distill_config(tokens_per_step=10_000, tokens_per_forward=10_000), tmp_path / "c"
        )
    assert torch.equal(flat(draft), before)


def test_gradients_that_are_not_finite_change_no_weight(target, answers, tmp_path, monkeypatch):
    draft = keep_layers(target, [0, 3])
    before = flat(draft)
    draft.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(PipelineError, match="gradients are not finite at optimiser step 1"):
        train(draft, answers, answers[:2], distill_config(), tmp_path / "c")
    assert torch.equal(flat(draft), before)


def test_the_bar_shows_tokens_per_second_and_the_time_left(target, answers, tmp_path, monkeypatch, capsys):
    class Redrawn(tqdm):
        def __init__(self, **options):
            super().__init__(**{**options, "mininterval": 0})

    monkeypatch.setattr(trainer, "tqdm", Redrawn)
    history = train(keep_layers(target, [0, 3]), answers, answers[:2], distill_config(), tmp_path / "c")
    total = tqdm.format_sizeof(history[-1]["tokens"])
    pattern = rf"distill: +(\d+)%.*/{re.escape(total)} \[\d+:\d+<(\d+:\d+), +[\d.]+k? tokens/s, loss="
    shares, left = zip(*re.findall(pattern, capsys.readouterr().err.replace("\r", "\n")), strict=True)
    assert len(shares) > 10 and shares[-1] == "100" and left[-1] == "00:00"


@pytest.mark.parametrize("begun_at", [0, 4])
def test_the_time_left_follows_from_this_attempts_speed(begun_at):
    """100 tokens a step and 5 seconds for each: 20 tokens/s, whatever an earlier attempt had done."""
    state = TrainerState(max_steps=10, global_step=begun_at, is_world_process_zero=True)
    progress = trainer._Progress(100.0, None)
    progress.on_train_begin(None, state, None)
    clock = [progress.bar.start_t]
    progress.bar._time = lambda: clock[0]
    for state.global_step in range(begun_at + 1, 7):
        clock[0] += 5
        progress.on_step_end(None, state, None)
    elapsed = "00:30" if begun_at == 0 else "00:10"
    assert str(progress.bar).endswith(f"| 600/1.00k [{elapsed}<00:20, 20.0 tokens/s]")
    progress.on_train_end(None, state, None)


def test_training_ends_early_when_dev_acceptance_stops_rising(target, answers, tmp_path):
    history = train(
        keep_layers(target, [0, 3]), answers, answers[:2],
        distill_config(epochs=40, evaluations=20, patience=2, learning_rate=1e-9), tmp_path / "c",
    )  # fmt: skip
    assert sum("dev_token_acceptance" in row for row in history) == 3


@pytest.mark.parametrize("loss", NAMES)
def test_every_loss_trains_with_the_target_in_the_loop(loss, target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    before = mean_loss(draft, answers)
    train(
        draft, answers, answers[:2], distill_config(loss=loss, target="online", epochs=6), tmp_path / "c", target=target
    )
    assert mean_loss(draft, answers) < 0.85 * before


@pytest.mark.parametrize("step", [5, 7, None])
def test_an_early_stop_comes_at_the_same_step_after_a_kill(step, target, answers, tmp_path, watched, float32):
    """Killed between two evaluations, or (None) after the stop itself."""
    settings = distill_config(epochs=40, evaluations=20, patience=2, learning_rate=1e-9)
    straight = train(keep_layers(target, [0, 3]), answers, answers[:2], settings, tmp_path / "straight")
    if step:
        watched.kill_at = step
        with pytest.raises(KeyboardInterrupt):
            train(keep_layers(target, [0, 3]), answers, answers[:2], settings, tmp_path / "killed")
        watched.kill_at = None
    folder = tmp_path / ("killed" if step else "straight")
    resumed = train(keep_layers(target, [0, 3]), answers, answers[:2], settings, folder)
    measured = [[row["step"] for row in h if "dev_token_acceptance" in row] for h in (straight, resumed)]
    assert measured[0] == measured[1] and len(measured[0]) == 3


@pytest.mark.parametrize("accumulated", [1, 4])
def test_as_many_epochs_as_asked_for_are_trained(accumulated, target, answers, tmp_path, watched):
    """Each epoch ends with a short step where the forward passes do not divide into steps."""
    settings = distill_config(epochs=3, tokens_per_forward=64, tokens_per_step=64 * accumulated)
    train(keep_layers(target, [0, 3]), answers, answers[:2], settings, tmp_path / "c")
    passes = len(AnswerBatches(answers, HEAD, 64, seed=0))
    assert passes % 4 != 0 and len(watched.seen) == 3 * passes


def test_answers_beyond_the_drafts_positions_are_left_out_with_a_warning(target, answers, caplog):
    longest = max(len(a.prompt_ids) + len(a.answer_ids) - 1 for a in answers)
    batches = AnswerBatches(answers, HEAD, 64, seed=0, max_positions=longest - 1)
    assert sum(map(len, batches.groups)) < len(answers) and "left out" in caplog.text
    with pytest.raises(PipelineError, match="longer context"):
        AnswerBatches(answers, HEAD, 64, seed=0, max_positions=2)


def test_the_8_bit_optimiser_trains(target, answers, tmp_path):
    draft = keep_layers(target, [0, 3])
    before = mean_loss(draft, answers)
    train(draft, answers, answers[:2], distill_config(optimizer="adamw_8bit"), tmp_path / "c")
    assert mean_loss(draft, answers) < 0.8 * before


@pytest.mark.parametrize("tied", [True, False])
def test_saved_draft_reloads_to_the_same_logits_in_a_new_process(tied, answers, tmp_path):
    """L08"""
    big = tiny_llama(std=0.1, num_hidden_layers=4, tie_word_embeddings=tied)
    draft = keep_layers(big, [1, 3])
    train(draft, answers, answers[:2], distill_config(epochs=1, evaluations=1), tmp_path / "c")
    assert draft.config.use_cache
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
