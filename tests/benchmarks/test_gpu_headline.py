"""The headline benchmark runs on a tiny model as on a bare GPU machine; it chooses, judges and stops as it says."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from script import load, run_tiny
from tiny_answers import answers_of

from pipeline.core.cost_model import Costs
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import Request

gpu_headline = load("gpu_headline")
gpu_twins = load("gpu_twins")
WORK = gpu_headline.TINY


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run_tiny("gpu_headline.py", tmp_path_factory.mktemp("gpu"))


def test_every_part_is_there(result):
    found, text = result
    assert found["machine"]["torch"] == torch.__version__ and found["left_out"] == []
    assert found["answers"]["answers"] == 16 * (1 + WORK.samples) and found["answers"]["prompts"] == 16
    assert set(found["minutes"]) == {
        "answers", *(f"distillation, {name}" for name in WORK.drafts), "twin", "draft lengths", "decoding", "lossless",
    }  # fmt: skip
    assert found["argmax_agreement"] == 1.0 and found["timed_prompts"] == WORK.timed_prompts
    assert text.count("needs >=") == len(found["goals"]) == 4 * len(WORK.drafts) + 1


def test_training_is_counted(result):
    answers = result[0]["answers"]
    prompt_tokens = answers["answers"] * (20 - 1)  # a row's last token predicts nothing
    for name, facts in result[0]["distillation"].items():
        assert facts["layers"] == WORK.drafts[name]
        assert facts["recipe"]["epochs"] == WORK.epochs and facts["steps"] > gpu_headline.UNTIMED_STEPS
        assert facts["recipe"]["loss"] == gpu_headline.recipe().loss
        assert facts["tokens_seen"] == WORK.epochs * (answers["tokens"] + prompt_tokens)
        assert facts["tokens_per_second_within_steps"] > facts["tokens_per_second"] > 0
        assert 0 < facts["dev_token_acceptance"] <= 1


def test_a_grown_draft_accepts_as_the_draft_does_and_nothing_is_lost(result):
    decoding = result[0]["decoding"]
    assert set(decoding) == {f"{name}{grown}" for name in WORK.drafts for grown in ("", ", grown")}
    for name in WORK.drafts:
        own, grown = decoding[name], decoding[f"{name}, grown"]
        assert own["k"] in WORK.draft_lengths
        if own["k"] == grown["k"]:
            assert own["acceptance_rate"] == grown["acceptance_rate"]
        assert own["speedup"]["count"] == WORK.timed_prompts and own["speedup"]["interval"][0] > 0
    lossless = result[0]["lossless"]
    assert lossless["lossless"] == 1.0 and set(lossless["equal_share"].values()) == {1.0}
    assert result[0]["best_draft"] in decoding


def test_without_time_the_least_is_done_and_the_rest_is_named(tmp_path):
    output = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--tiny", "--minutes", "0", "--output", str(output)]
    assert gpu_headline.main(arguments) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    first, second = WORK.drafts
    assert found["answers"]["answers"] == 16 and found["timed_prompts"] == WORK.lot
    assert list(found["distillation"]) == [first] and found["distillation"][first]["steps"] <= 2
    words = ("sampled answers", f"the draft of {second}", "timed prompts")
    assert len(found["left_out"]) == 3 and all(word in line for word, line in zip(words, found["left_out"]))


def test_checkpoints_and_k_are_chosen_on_other_prompts_than_are_timed():
    prompts = gpu_twins.build_tiny_splits()
    prompts.dev[0].domain = "code"
    choice, timed = gpu_headline.answer_dev_prompts(gpu_twins.build_tiny()[0], prompts, WORK)
    ids = [{answer.prompt_id for answer in half} for half in (choice, timed)]
    assert ids[0] | ids[1] == {prompt.prompt_id for prompt in prompts.dev[1:]} and not ids[0] & ids[1]


def test_k_is_the_fastest_that_keeps_the_rate():
    costs = Costs(0.01, {k: 1.0 for k in (0, 3, 4, 5)})  # drafting is nearly free, so more is faster
    chosen = gpu_headline.choose_draft_length([0.9, 0.7, 0.6, 0.45, 0.3], costs, (3, 4, 5))
    assert (chosen["k"], chosen["fastest_k"]) == (4, 5)
    assert [row["expected_acceptance_rate"] for row in chosen["lengths"]] == pytest.approx([2.2 / 3, 2.65 / 4, 0.59])
    chosen = gpu_headline.choose_draft_length([0.6, 0.5, 0.4, 0.3, 0.2], costs, (3, 4, 5))
    assert chosen["k"] == chosen["fastest_k"] == 5


def test_the_best_draft_is_the_fastest_of_those_that_keep_the_rate():
    def metrics(rate: float, speedup: float) -> dict:
        return {"k": 3, "acceptance_rate": {"value": rate}, "speedup": {"value": speedup}}

    found = {"a": metrics(0.66, 2.0), "b": metrics(0.7, 2.4), "c": metrics(0.5, 3.0)}
    assert gpu_headline.best_draft(found) == "b"
    assert gpu_headline.best_draft({"a": metrics(0.3, 2.0), "c": metrics(0.5, 3.0)}) == "c"
    goals = gpu_headline.judge_goals(found, {"lossless": 0.5})
    assert [goal["met"] for goal in goals] == [True, False, True, False, False, True, False]


def request(tokens: list[int], prompt_id: str, departure: int | None) -> Request:
    times = {"seconds": 1.0, "plain_seconds": 1.0, "ttft_seconds": 0.1, "plain_ttft_seconds": 0.1}
    times |= {"gaps_seconds": [], "plain_gaps_seconds": []}
    names = {"candidate": "draft", "condition": "headline", "batch": 1, "lot": 0, "target_passes": 1}
    names |= {"draft_length": 3, "temperature": 0.0}
    names |= {"prompt_id": prompt_id, "domain": "legal", "task": "t", "cluster": prompt_id}
    counts = {"prompt_tokens": 1, "drafted": [], "accepted": [], "emitted": []}
    return Request(**names, **times, **counts, token_ids=tokens, first_departure=departure)


def test_a_departure_that_is_no_near_tie_is_a_loss():
    target = gpu_twins.build_tiny_target()
    answers = answers_of(target, 2)
    plain = {answer.prompt_id: answer.answer_ids.tolist() for answer in answers}
    worst = int(target(torch.tensor([answers[0].prompt_ids.tolist()])).logits[0, -1, :259].argmin())
    requests = [request([worst], "p0", 0), request(plain["p1"], "p1", None)]
    pair = gpu_headline.Pair(target, target.bfloat16(), {}, [], range(259))
    found = gpu_headline.judge_lossless(pair, answers, requests, plain)
    assert found["lossless"] == 0.5 and found["equal_share"] == {"draft": 0.5}
    assert not found["departures"][0]["legal"] and found["judge"].startswith("float32 copy")


def test_a_draft_that_cannot_be_trained_is_left_out(tmp_path, monkeypatch):
    def train_draft(name, *rest):
        if name == next(iter(WORK.drafts)):
            raise PipelineError("The loss is not finite.", "lower it.")
        return gpu_twins.build_tiny()[1]

    monkeypatch.setattr(gpu_headline, "train_draft", train_draft)
    report = gpu_headline.TimedReport(tmp_path / "x.json", "x", budget_seconds=60)
    lesson = gpu_headline.Lesson(gpu_twins.build_tiny_target(), [], [], [], 259)
    drafts = gpu_headline.train_drafts(lesson, WORK, report)
    assert list(drafts) == list(WORK.drafts)[1:] and "The loss is not finite." in report.left_out[0]


def test_the_recipe_is_the_pipelines_with_changes():
    stored = gpu_headline.settings("distill", "default")
    changed = gpu_headline.recipe(epochs=3.5)
    assert changed.epochs == 3.5 and changed.learning_rate == stored["learning_rate"]
    assert dataclasses.replace(changed, epochs=stored["epochs"]) == gpu_headline.recipe()


@pytest.mark.parametrize(("options", "words"), [([], "--device cpu --tiny"), (["--device", "cpu"], "add --tiny")])
def test_without_a_gpu_it_refuses(options, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_headline.main(options) == 1
    assert words in capsys.readouterr().err
