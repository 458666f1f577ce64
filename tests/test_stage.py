"""The frame of the stages: what ends a stage before its work."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from dataclasses import dataclass

import pytest
from dependencies import ROOT
from omegaconf import OmegaConf

import pipeline.stage
from pipeline.core.errors import PipelineError


@dataclass
class Config:
    seed: int


def test_a_place_that_cannot_be_written_ends_the_stage_before_its_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").write_text("a file where a folder belongs")
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        pipeline.stage.execute(lambda _: pytest.fail("the stage ran"), Config, OmegaConf.create({"seed": 0}))
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {tmp_path / 'data'} cannot be written") and message.count("\n") == 1


def test_a_full_disk_is_an_error_with_a_remedy_and_a_fault_of_ours_a_traceback(tmp_path, monkeypatch, capsys):
    def stage(number: int) -> None:
        raise OSError(number, os.strerror(number), "data/answers")

    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    cfg = OmegaConf.create({"seed": 0})
    with pytest.raises(SystemExit):
        pipeline.stage.execute(lambda _: stage(errno.ENOSPC), Config, cfg)
    message = capsys.readouterr().err
    assert "No space left on device: 'data/answers'. Remedy: free space" in message and message.count("\n") == 1
    with pytest.raises(FileNotFoundError):
        pipeline.stage.execute(lambda _: stage(errno.ENOENT), Config, cfg)


@pytest.mark.parametrize("after", ["seed: 1\n", "", "seed: [0\n"])
def test_params_that_change_while_a_stage_runs_are_not_recorded(after, tmp_path, monkeypatch, capsys):
    """DVC reads params.yaml after the stage: it would take the new values for those that made the result."""
    params = tmp_path / "params.yaml"
    params.write_text("seed: 0\n")
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(pipeline.stage, "_params_in_use", params.read_bytes)
    monkeypatch.setattr(pipeline.stage, "_log_stopped", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        pipeline.stage.execute(lambda _: params.write_text(after), Config, OmegaConf.create({"seed": 0}))
    assert ended.value.code == 1
    assert "params.yaml changed while this stage ran" in capsys.readouterr().err


def test_params_of_other_stages_may_change_while_one_runs(tmp_path, monkeypatch):
    params = tmp_path / "params.yaml"
    params.write_text("seed: 0\ngate: {name: a}\n")
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(pipeline.stage, "_params_in_use", params.read_bytes)
    changed = "# a remark\ngate:\n  name: b\nseed: 0\n"
    pipeline.stage.execute(lambda _: params.write_text(changed), Config, OmegaConf.create({"seed": 0}))
    assert (tmp_path / "data/provenance/test_stage.json").is_file()


def test_the_code_of_a_stage_is_that_of_the_modules_it_lists(tmp_path, monkeypatch):
    """In a copy of the project: an edit of the report leaves distillation's alone."""
    for name in ("pipeline", "dvc.yaml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, tmp_path / name)
    monkeypatch.setattr(pipeline.stage, "__file__", str(tmp_path / "pipeline/stage.py"))
    stages = ("distill", "generate", "report")
    before = [pipeline.stage.code_fingerprint(name) for name in stages]
    for path, changed in (("core/report_page.py", [2]), ("core/objective.py", [0]), ("core/cache.py", [0, 1])):
        with (tmp_path / "pipeline" / path).open("a") as file:
            file.write("# changed\n")
        after = [pipeline.stage.code_fingerprint(name) for name in stages]
        assert [index for index in range(3) if after[index] != before[index]] == changed
        before = after


@pytest.mark.parametrize(
    ("stop", "status", "reason"),
    [
        (lambda: signal.raise_signal(signal.SIGTERM), "KILLED", "Terminated: 143"),
        (lambda: signal.raise_signal(signal.SIGINT), "KILLED", "KeyboardInterrupt: "),
        (lambda: [].pop(), "FAILED", "IndexError: pop from empty list"),
        (
            lambda: pipeline.stage.input_path("data/champion/metrics.json").stat() and None,
            "FAILED",
            "FileNotFoundError: ",
        ),
    ],
)
def test_a_stage_of_the_pipeline_that_stops_says_so_and_why(tmp_path, monkeypatch, stop, status, reason):
    logged = []
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(pipeline.stage, "_params_in_use", lambda: b"seed: 0")
    monkeypatch.setattr(pipeline.stage, "_log_stopped", lambda *handed: logged.append(handed))
    interrupting = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(BaseException):
            pipeline.stage.execute(lambda _: stop(), Config, OmegaConf.create({"seed": 0}))
    finally:
        signal.signal(signal.SIGINT, interrupting)
    (((stage, ended, began, why), config),) = logged
    assert OmegaConf.create(config) == {"seed": 0}
    assert (stage, ended) == ("test_stage", status) and float(began) > 0 and why.startswith(reason)
    assert signal.getsignal(signal.SIGTERM) == before and not (tmp_path / "data/provenance").exists()


def test_two_processes_never_work_with_the_same_state_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    alone, words = pipeline.stage.alone, "Another process runs distill here already"
    with alone("distill", "0123"), alone("distill", "4567"), alone("generate", "0123"):
        with pytest.raises(PipelineError, match=words), alone("distill", "0123"):
            pytest.fail("both went on")
    with alone("distill", "0123"):
        pass


def test_a_damaged_champion_is_not_taken_for_none(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    assert pipeline.stage.read_champion() is None
    path = tmp_path / pipeline.stage.CHAMPION_FILE
    path.parent.mkdir(parents=True)
    path.write_text("<<<<<<< HEAD")
    with pytest.raises(PipelineError, match="pipeline.promote --list` writes it anew"):
        pipeline.stage.read_champion()
