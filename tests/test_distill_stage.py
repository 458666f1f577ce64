"""The stage: killed anywhere it ends as if it had not been, what it finished is put back, and a reference draft is in reach."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from clone import checked
from dependencies import ROOT
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from tiny_projects import answered

from pipeline import distill, stage
from pipeline.adapters import trainer
from pipeline.adapters.answer_files import write_answers
from pipeline.adapters.mlflow_tracking import TrackingConfig
from pipeline.adapters.targets import Target
from pipeline.core.errors import PipelineError

RECIPE = [
    "experiment=smoke", "draft.dtype=float32", "distill.tokens_per_step=64", "distill.tokens_per_forward=64",
    "distill.epochs=2", "distill.evaluations=1",
]  # fmt: skip
LONG = ["distill.epochs=30", "distill.evaluations=12"]  # 120 steps, 12 checkpoints
NOWHERE = TrackingConfig(tracking_uri="http://127.0.0.1:9", experiment_name="e", timeout_seconds=1.0)


class Reached(Exception):
    """Training would begin."""


def config(*overrides: str) -> distill.Config:
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        return stage.typed_config(compose("config", overrides=[*RECIPE, *overrides]), distill.Config)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Path:
    """A project with its code and the tiny target's answers."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pipeline", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "dvc.yaml", folder)
    smoke = config()
    target = Target(smoke.target, folder)
    facts = {**target.facts, **smoke.generate.facts, "target_domain": "legal"}
    rows = answered(target)
    for split, some in (("train", rows), ("dev", rows[:4])):
        write_answers(folder / "data" / "answers" / split / "00000.parquet", some, facts)
    return folder


@pytest.fixture
def project(answers, monkeypatch) -> Path:
    """Nothing is distilled in it yet."""
    monkeypatch.setattr(stage, "PROJECT_ROOT", answers)
    for name in ("data/draft", "data/distill", ".cache/distill"):
        shutil.rmtree(answers / name, ignore_errors=True)
    return answers


@pytest.fixture
def untrained(monkeypatch):
    """Call it to let training fail from then on."""

    def training(*_, **__):
        raise Reached

    return lambda: monkeypatch.setattr(distill, "distill", training)


def outputs(root: Path) -> dict[str, bytes]:
    files = [*(root / "data/draft").rglob("*"), root / "data/distill/history.csv"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.name != "config.yaml"}


def weights(root: Path) -> torch.Tensor:
    tensors = load_file(root / "data/draft/model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def states(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".cache/distill").iterdir())


def killed_at_its_first_checkpoint(command: list[str], root: Path) -> None:
    with (root / "stderr").open("w") as errors:
        process = subprocess.Popen(command, cwd=root, stderr=errors)
        while not list((root / ".cache/distill").glob("*/checkpoint-*/complete.json")):
            assert process.poll() is None, (root / "stderr").read_text()
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_stage_that_is_killed_ends_with_the_weights_of_one_that_is_not(project, untrained):
    """P07: kill -9 in the middle of training, a second start, and a third that has nothing left to do."""
    distill.run(config(*LONG))
    straight = weights(project)
    for name in ("data/draft", "data/distill", ".cache/distill"):
        shutil.rmtree(project / name)
    command = [sys.executable, "-m", "pipeline.distill", *RECIPE, *LONG]
    killed_at_its_first_checkpoint(command, project)
    assert not (project / "data/draft").exists()
    printed = checked(command, project)
    assert 0 < int(re.search(r"distill: +(\d+)%", printed)[1]) < 100, "it began where it was killed"
    assert (weights(project) - straight).abs().max() < 1e-6
    (state,) = (project / ".cache/distill").iterdir()
    assert sorted(path.name for path in state.iterdir()) == ["finished", "mlflow_run_id"]
    with contextlib.closing(sqlite3.connect(project / "mlflow.db")) as store:
        ((run, status),) = store.execute("SELECT run_uuid, status FROM runs").fetchall()
        tags = dict(store.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,)))
    assert (status, tags["attempt"]) == ("FINISHED", "2") and len(tags["draft_fingerprint"]) == 16
    assert (state / "mlflow_run_id").read_text() == run
    before = outputs(project)
    shutil.rmtree(project / "data/draft")
    untrained()
    distill.run(config(*LONG), NOWHERE)
    assert outputs(project) == before


def test_what_was_finished_is_put_back_with_the_present_configuration(project, untrained, capsys):
    """Neither training nor the MLflow store is needed, and what DVC did with the outputs plays no part."""
    distill.run(config())
    before = outputs(project)
    shutil.rmtree(project / "data/draft")
    (key,) = states(project)
    state = project / ".cache/distill" / key
    (state / "checkpoint-9").mkdir()  # a kill came before it was removed
    (project / "data/distill/history.csv").write_text("changed")
    untrained()
    capsys.readouterr()
    distill.run(config("generate.batch_size=3"), NOWHERE)
    assert outputs(project) == before
    assert "batch_size: 3" in (project / "data/draft/config.yaml").read_text()
    printed = capsys.readouterr().out
    assert printed.startswith("distill: nothing has changed") and printed.count("\n") == 1
    assert [path.name for path in state.iterdir()] == ["finished"]


@pytest.mark.parametrize("change", ["damage", "code", "setting"])
def test_what_was_finished_otherwise_is_not_put_back(change, project, untrained, monkeypatch):
    distill.run(config())
    (key,) = states(project)
    if change == "damage":
        (project / ".cache/distill" / key / "finished/draft/model.safetensors").write_bytes(b"")
    elif change == "code":
        monkeypatch.setattr(distill, "code_fingerprint", lambda _: "changed")
    untrained()
    with pytest.raises(Reached):
        distill.run(config(*(["distill.learning_rate=1e-4"] if change == "setting" else [])))
    assert (key in states(project)) == (change == "setting"), "kept until another run has finished"


def test_a_kill_between_the_end_and_what_is_kept_costs_no_training(project, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(distill, "mark_finished", interrupted)
        distill.run(config())
    before = outputs(project)
    shutil.rmtree(project / "data/draft")
    monkeypatch.setattr(trainer.DraftTrainer, "compute_loss", lambda *_: pytest.fail("it was trained further"))
    distill.run(config())
    assert outputs(project) == before


def test_a_run_that_ends_removes_what_others_kept_but_nothing_that_is_in_use(project):
    distill.run(config("seed=1"))
    (first,) = states(project)
    (project / ".cache/distill/unfinished/checkpoint-1").mkdir(parents=True)
    with stage.alone("distill", first):  # a process is putting it back
        distill.run(config("seed=2"))
        assert first in states(project) and len(states(project)) == 3
    distill.run(config("seed=3"))
    assert len(states(project)) == 2 and "unfinished" in states(project) and first not in states(project)


def test_only_the_first_process_puts_it_back(project, untrained, monkeypatch):
    distill.run(config())
    shutil.rmtree(project / "data/draft")
    untrained()
    second = {"main_process_first": contextlib.nullcontext, "wait_for_everyone": lambda: None}
    monkeypatch.setattr(distill, "join", lambda: SimpleNamespace(is_main_process=False, num_processes=1, **second))
    with stage.alone("distill", *states(project)):
        distill.run(config())
    assert not (project / "data/draft").exists() and len(states(project)) == 1


def test_a_sweep_gets_it_in_the_folder_of_its_job(project, untrained, monkeypatch, tmp_path):
    distill.run(config())
    before = outputs(project)
    shutil.rmtree(project / "data/draft")
    untrained()
    monkeypatch.setattr(distill, "output_path", lambda relative: tmp_path / relative)
    distill.run(config())
    assert outputs(tmp_path) == before and not (project / "data/draft").exists()


def test_a_reference_draft_decides_which_tokens_are_trained(project, untrained):
    """Another one in the same folder means another result."""
    distill.run(config())
    whole = weights(project)
    shutil.copytree(project / "data/draft", project / "models/reference")
    selecting = ["distill.selected_share=0.5", "distill.reference_draft=models/reference"]
    distill.run(config(*selecting))
    assert (weights(project) - whole).abs().max() > 1e-5
    shutil.rmtree(project / "models/reference")
    shutil.copytree(project / "data/draft", project / "models/reference")
    untrained()
    with pytest.raises(Reached):
        distill.run(config(*selecting))
    shutil.rmtree(project / "models")


@pytest.mark.parametrize(("folder", "words"), [("data/draft", "DVC removes it"), ("models/absent", "no draft.json")])
def test_a_reference_draft_that_is_not_there_is_refused_first(folder, words, project, monkeypatch):
    monkeypatch.setattr(distill, "Target", lambda *_: pytest.fail("a model was looked at"))
    with pytest.raises(PipelineError, match=words):
        distill.run(config("distill.selected_share=0.5", f"distill.reference_draft={folder}"))
