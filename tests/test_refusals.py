"""A target that cannot be rolled back ends the run before it costs anything (D07)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from transformers import MambaConfig

from pipeline import generate, stage
from pipeline.core.errors import PipelineError
from pipeline.core.tiny import build_tiny_tokenizer


@pytest.fixture
def mamba(tmp_path) -> str:
    """A folder with a configuration and a tokenizer, and no weights that could be loaded."""
    MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    build_tiny_tokenizer().save_pretrained(tmp_path / "mamba")
    return str(tmp_path / "mamba")


def test_the_diagnose_command_exits_with_the_models_name(mamba, tmp_path):
    command = [sys.executable, "-m", "pipeline.diagnose", "experiment=smoke", f"target.id={mamba}"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    ended = subprocess.run(command, cwd=stage.PROJECT_ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert f"target cache: {mamba}: its cache cannot be rolled back by position" in ended.stderr
    assert "no attention layers" in ended.stderr and "Traceback" not in ended.stderr


def test_generate_stops_before_it_reads_prompts_or_weights(mamba, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PROJECT_ROOT", tmp_path)
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        cfg = compose("config", overrides=["experiment=smoke", f"target.id={mamba}"])
    with pytest.raises(PipelineError, match=f"{mamba}: its cache cannot be rolled back"):
        generate.run(stage.typed_config(cfg, generate.Config))
    assert not (tmp_path / "data").exists(), "no file claims success"
