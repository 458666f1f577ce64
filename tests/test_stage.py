"""The frame of the stages: what ends a stage before its work."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

import pipeline.stage


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
