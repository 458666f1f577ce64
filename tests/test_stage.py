"""The frame of the stages: what ends a stage before its work."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
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


def test_params_that_change_while_a_stage_runs_are_not_recorded(tmp_path, monkeypatch, capsys):
    """DVC reads params.yaml after the stage: it would take the new values for those that made the result."""
    params = tmp_path / "params.yaml"
    params.write_text("seed: 0\n")
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(pipeline.stage, "_params_in_use", params.read_bytes)
    with pytest.raises(SystemExit) as ended:
        pipeline.stage.execute(lambda _: params.write_text("seed: 1\n"), Config, OmegaConf.create({"seed": 0}))
    assert ended.value.code == 1
    assert "params.yaml changed while this stage ran" in capsys.readouterr().err


def test_a_damaged_champion_is_not_taken_for_none(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.stage, "PROJECT_ROOT", tmp_path)
    assert pipeline.stage.read_champion() is None
    path = tmp_path / pipeline.stage.CHAMPION_FILE
    path.parent.mkdir(parents=True)
    path.write_text("<<<<<<< HEAD")
    with pytest.raises(PipelineError, match="pipeline.promote --list` writes it anew"):
        pipeline.stage.read_champion()
