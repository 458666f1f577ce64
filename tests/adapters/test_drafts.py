"""However a draft starts: padding rows play no part, what is saved is what was trained, and the start is on record."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_models import uncached_greedy
from tiny_projects import (
    ARCHITECTURE,
    REAL,
    Project,
    build_project,
    fresh_registry,
    register,
    smoke_config,
)
from transformers import AutoModelForCausalLM, TrainerCallback

from pipeline import distill, stage
from pipeline.adapters import layer_choice, trainer
from pipeline.adapters.drafts import (
    INITS,
    DraftConfig,
    LayerChoice,
    check_draft,
    check_frozen_embeddings,
    initial_draft,
    load_draft,
    read_draft_facts,
    save_draft,
)
from pipeline.adapters.layer_choice import best_row, try_layers
from pipeline.adapters.mlflow_registry import MlflowStore
from pipeline.core.cost_model import Costs
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError

CHOICE = LayerChoice([3, 1, 2], epochs=2.0, draft_lengths=[1, 2, 3], half_weights=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> MlflowStore:
    return fresh_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def projects(tmp_path_factory, store) -> dict[str, Project]:
    """The draft's rows fewer than the target's and more, heads tied and not."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("narrower", "wider")}
    return {
        "narrower": build_project(folders["narrower"], 272, 264, True, store),
        "wider": build_project(folders["wider"], 264, 272, False, store),
    }


@pytest.fixture(params=["narrower", "wider"])
def project(request, projects, monkeypatch) -> Project:
    return opened(projects[request.param], monkeypatch)


@pytest.fixture
def narrower(projects, monkeypatch) -> Project:
    return opened(projects["narrower"], monkeypatch)


def opened(project: Project, monkeypatch) -> Project:
    monkeypatch.setattr(stage, "PROJECT_ROOT", project.root)
    return project


@pytest.mark.parametrize("init", INITS)
def test_padding_plays_no_part_from_the_answers_to_decoding(init, project):
    """T01"""
    target = project.target
    prompts = [answer.prompt_ids.tolist() for answer in project.answers[:3]]
    assert uncached_greedy(target.model, prompts[0], 1)[0] >= REAL, "without a limit padding would win"
    assert max(answer.top_ids.max() for answer in project.answers) < REAL
    folder = project.distilled(project.start(init))
    draft, head = load_draft(folder, target)
    rows = project.sibling_rows if init in ("pretrained", "champion") else target.model_config.vocab_size
    assert draft.get_input_embeddings().weight.shape[0] == draft.config.vocab_size == rows
    assert max(head) < REAL
    losses = [line.split(",")[2] for line in (project.root / "data/distill/history.csv").read_text().splitlines()[1:]]
    assert all(np.isfinite(float(loss)) for loss in losses if loss)
    expected = [uncached_greedy(target.model, prompt, 16, allowed=REAL) for prompt in prompts]
    config = DecodeConfig(3, 16, allowed_token_ids=range(REAL))
    for drafter in (ModelDrafter(draft, head), ModelDrafter(draft)):
        result = decode(target.model, drafter, prompts, config)
        assert [sequence.token_ids for sequence in result.sequences] == expected
        assert result.stats.drafted > 0


@pytest.mark.parametrize("init", INITS)
def test_what_is_saved_is_what_was_trained(init, project, tmp_path):
    """L08, T01: every way to start, heads tied and not."""
    start = project.start(init)
    draft = initial_draft(start, project.target, project.root)
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
    ids = torch.tensor([[5, 6, 7, 8]])
    for _ in range(2):
        draft(ids, labels=ids).loss.backward()
        optimizer.step()
    save_draft(tmp_path / "draft", draft, project.target, [0, 2, 5], start.pinned(project.root))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.inference_mode():
        assert torch.equal(loaded.eval()(ids).logits, draft(ids).logits)
    with safe_open(tmp_path / "draft" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != project.tied  # noqa: SIM118 - no mapping
    assert loaded.config.tie_word_embeddings == project.tied


@pytest.mark.parametrize("init", INITS)
def test_the_record_of_a_draft_leads_back_to_its_start(init, narrower, tmp_path):
    """What the evaluation compares with is the draft before distillation, even if the alias has moved meanwhile."""
    start = narrower.start(init)
    before = initial_draft(start, narrower.target, narrower.root, seed=3)
    save_draft(tmp_path / "draft", before, narrower.target, [0, 2], start.pinned(narrower.root))
    if init == "champion":
        version = register(narrower, initial_draft(narrower.start("config"), narrower.target, narrower.root))
        assert start.registered(narrower.root).version == version
    recorded = start.recorded(read_draft_facts(tmp_path / "draft"))
    again = initial_draft(recorded, narrower.target, narrower.root, seed=3)
    narrower.store.set_alias(narrower.champion, "champion", "1")
    for (name, own), other in zip(before.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(own, other), name


def test_a_champion_goes_on_from_its_own_weights(project):
    champion = initial_draft(project.start("champion"), project.target, project.root)
    folder = project.start("champion").registered(project.root).folder(project.root)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(own, other) for own, other in zip(champion.parameters(), saved.parameters(), strict=True))
    assert folder.parent == project.root / ".cache" / "models"


def test_there_is_no_champion_yet(narrower):
    start = replace(narrower.start("champion"), id="models:/nothing-yet@champion")
    with pytest.raises(PipelineError, match="no models:/nothing-yet@champion in the MLflow store") as error:
        narrower.distilled(start)
    assert "distil a first draft with another draft.init" in error.value.remedy
    with pytest.raises(PipelineError, match="There is no models:/nothing-yet/9"):
        check_draft(replace(start, id="models:/nothing-yet/9"), narrower.target, narrower.root)
    with pytest.raises(PipelineError, match="names no registered draft"):
        check_draft(replace(start, id="models/target"), narrower.target, narrower.root)


def test_a_champion_of_another_target_is_refused_with_what_differs(projects, tmp_path):
    other = projects["wider"]
    start = projects["narrower"].start("champion")
    with pytest.raises(PipelineError, match=r"@champion \(version 1\) was distilled for another target") as error:
        check_draft(start, other.target, tmp_path)
    assert "target_fingerprint" in error.value.reason
    assert "tokenizer" not in error.value.reason and "quantization" not in error.value.reason
    assert "another draft.init" in error.value.remedy
    assert not (tmp_path / ".cache").exists(), "no weights were downloaded"


def test_an_architecture_of_another_width_needs_trained_embeddings(narrower):
    path = narrower.root / "models" / "narrow.json"
    path.write_text(json.dumps({**ARCHITECTURE, "hidden_size": 32, "num_attention_heads": 2}), encoding="utf-8")
    start = replace(narrower.start("config"), id="models/narrow.json")
    with pytest.raises(PipelineError, match="32 wide.*64 wide") as error:
        check_frozen_embeddings(start, narrower.target, narrower.root)
    assert "distill.freeze_embeddings=false" in error.value.remedy
    check_frozen_embeddings(narrower.start("config"), narrower.target, narrower.root)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(PipelineError, match="narrow.json cannot be loaded"):
        check_draft(start, narrower.target, narrower.root)


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "neither is given"), ({"keep_layers": [0], "layer_choice": CHOICE}, "both are given")],
)
def test_layers_are_named_or_chosen(options, words):
    with pytest.raises(PipelineError, match=words):
        DraftConfig(name="d", init="pruned", **options)


def chosen(project: Project, counts: list[int]) -> DraftConfig:
    choice = replace(CHOICE, layer_counts=counts)
    return DraftConfig(name="d", init="pruned", layer_choice=choice, dtype="float32")


class Trial:
    """Drafts of 1, 2, 3 layers reach these acceptances, and their steps cost these shares of a target pass."""

    acceptance = {1: 0.2, 2: 0.6, 3: 0.65}
    cost_ratio = {1: 0.1, 2: 0.2, 3: 0.7}

    def __init__(self, monkeypatch) -> None:
        self.trained: list[int] = []
        monkeypatch.setattr(layer_choice, "measure_costs", self.measure_costs)

    def train(self, draft, checkpoints: Path) -> list[dict]:
        self.trained.append(draft.config.num_hidden_layers)
        return [{"step": 1, "loss": 1.0}, {"step": 2, "dev_token_acceptance": self.acceptance[self.trained[-1]]}]

    def measure_costs(self, target, drafter, lengths, *_) -> Costs:
        assert lengths == [1, 2, 3] and target.config.num_hidden_layers == 4
        layers = drafter.model.config.num_hidden_layers
        noise = {1: 1.0, 2: 3.0, 3: 0.5}[layers]  # the machine is busier in one trial than in another
        passes = {k: noise * (1.0 + {1: 0.01, 2: 0.05, 3: 0.2}[layers] * k) for k in (0, *lengths)}
        return Costs(noise * self.cost_ratio[layers], passes)


def test_the_best_prediction_wins_and_all_rows_are_kept(narrower, tmp_path, monkeypatch, capsys):
    trial = Trial(monkeypatch)
    rows = try_layers(chosen(narrower, [3, 1, 2]), narrower.target, [0, 2, 5], trial.train, tmp_path)
    assert trial.trained == [1, 2, 3]
    assert [row["layers"] for row in rows] == [[0], [0, 3], [0, 1, 3]]
    assert [row["dev_token_acceptance"] for row in rows] == [0.2, 0.6, 0.65]
    assert rows[1]["draft_length"] == 2 and rows[1]["predicted_speedup"] == pytest.approx(1.96 / 1.5)
    assert rows[2]["draft_length"] == 1 and rows[2]["predicted_speedup"] == pytest.approx(1.65 / 1.75)
    assert best_row(rows) == rows[1]
    assert best_row([{**row, "predicted_speedup": 1.0} for row in rows])["layers"] == [0]
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "tried layers [0, 3]: dev token acceptance 0.600, cost ratio 0.200"
    assert lines[3] == "keep layers [0, 3]: predicted speedup 1.31 at k = 2"


def test_a_killed_choice_tries_nothing_twice(narrower, tmp_path, monkeypatch):
    trial = Trial(monkeypatch)

    def killed(draft, checkpoints):
        if draft.config.num_hidden_layers == 2:
            raise KeyboardInterrupt
        return trial.train(draft, checkpoints)

    arguments = (chosen(narrower, [1, 2, 3]), narrower.target, [0, 2, 5])
    with pytest.raises(KeyboardInterrupt):
        try_layers(*arguments, killed, tmp_path)
    rows = try_layers(*arguments, trial.train, tmp_path)
    assert trial.trained == [1, 2, 3]
    assert try_layers(*arguments, killed, tmp_path) == rows


def test_of_several_processes_one_measures_and_all_agree(narrower, tmp_path, monkeypatch):
    """Two processes that timed each for itself could choose differently, and would wait for each other for ever."""
    arguments = (chosen(narrower, [1, 2]), narrower.target, [0, 2, 5])
    rows = try_layers(*arguments, Trial(monkeypatch).train, tmp_path / "first")

    class Second:
        is_main_process = False

        def wait_for_everyone(self):
            (tmp_path / "second").mkdir(exist_ok=True)
            shutil.copy(tmp_path / "first" / "trials.json", tmp_path / "second")

    trial = Trial(monkeypatch)
    monkeypatch.setattr(layer_choice, "PartialState", Second)
    monkeypatch.setattr(layer_choice, "measure_costs", lambda *_: pytest.fail("the second process measured"))
    assert try_layers(*arguments, trial.train, tmp_path / "second") == rows


def test_the_stage_chooses_once_and_records_what_it_tried(narrower, monkeypatch):
    start = chosen(narrower, [2, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "initial_draft", lambda *_: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            narrower.distilled(start)
    monkeypatch.setattr(layer_choice, "measure_costs", lambda *_: pytest.fail("it measured again"))
    folder = narrower.distilled(start)
    facts = read_draft_facts(folder)
    assert [row["layers"] for row in facts["layer_choice"]] == [[0], [0, 3]]
    assert all(0 <= row["dev_token_acceptance"] <= 1 and row["cost_ratio"] > 0 for row in facts["layer_choice"])
    assert facts["start"]["keep_layers"] == best_row(facts["layer_choice"])["layers"]
    assert facts["layers"] == len(facts["start"]["keep_layers"])
    assert start.recorded(facts).layer_choice is None
    (state,) = (narrower.root / ".cache" / "distill").iterdir()
    assert [path.name for path in state.iterdir()] == ["finished"], "a finished run leaves no checkpoints"


def test_a_killed_stage_goes_on_and_a_changed_setting_begins_anew(narrower, monkeypatch):
    """What a killed run left belongs to its settings: others find nothing to go on from."""
    begun, killed_at = [], [3]

    class Killed(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in killed_at:
                raise KeyboardInterrupt

    class Watched(trainer.DraftTrainer):
        def __init__(self, **options):
            super().__init__(**options)
            self.add_callback(Killed())

    monkeypatch.setattr(trainer, "DraftTrainer", Watched)
    smoke = smoke_config()
    recipe = replace(smoke.distill, epochs=6, evaluations=6, tokens_per_step=2048, tokens_per_forward=2048)
    config = replace(smoke, target=narrower.target.config, draft=narrower.start("pruned"), distill=recipe)
    other = replace(config, distill=replace(recipe, learning_rate=1e-4))
    for settings in (config, other):
        with pytest.raises(KeyboardInterrupt):
            distill.run(settings)
    killed_at.clear()
    distill.run(config)
    assert begun == [0, 0, 2]
    distill.run(other)
    assert begun[3:] == [2], "what the other run had left was there to go on from"
    assert len(list((narrower.root / ".cache" / "distill").iterdir())) == 1, "what the first one kept is gone"


def test_without_a_choice_the_record_says_so(narrower):
    assert read_draft_facts(narrower.distilled(narrower.start("pruned")))["layer_choice"] is None
