"""What MLflow hears of a stage that stopped."""

from __future__ import annotations

import io
import os
import sys
import time

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_projects import fresh_registry

from pipeline import log_stopped, stage
from pipeline.adapters.mlflow_store import child_of, made_by


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def store(root):
    return fresh_registry(root)


@pytest.fixture
def stopped(root, store, monkeypatch):
    """A function that logs a stage as `pipeline.stage` has it logged; returns the runs that were added."""
    monkeypatch.setattr(stage, "PROJECT_ROOT", root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        config = OmegaConf.to_yaml(compose("config", overrides=["experiment=smoke"]))

    def runs() -> dict[str, object]:
        experiments = [found.experiment_id for found in store.client.search_experiments()]
        return {found.info.run_id: found for found in store.client.search_runs(experiments)}

    def log(name: str, status: str, began: float) -> list:
        before = runs()
        monkeypatch.setattr(sys, "argv", ["log_stopped", name, status, str(began), "PipelineError: no prompts"])
        monkeypatch.setattr(sys, "stdin", io.StringIO(config))
        log_stopped.main()
        return [found for run_id, found in runs().items() if run_id not in before]

    return log


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_pipelines_run_and_the_stage_in_it_say_how_and_why(stopped, store, status):
    """R06"""
    child, parent = sorted(stopped("prepare", status, time.time()), key=lambda found: found.info.run_name)
    assert (child.info.run_name, parent.info.run_name) == ("prepare", "tiny-legal-draft")
    assert child_of(parent.info.run_id).items() <= child.data.tags.items()
    for found in (child, parent):
        assert found.info.status == status and found.info.end_time
        assert found.data.tags["stopped_by"] == "PipelineError: no prompts"
        config = store.client.download_artifacts(found.info.run_id, "config.yaml")
        assert OmegaConf.load(config).domain.name == "legal"


def test_a_stage_that_was_followed_names_its_run_and_a_registration_has_its_tree(stopped, store):
    began = time.time()
    with pytest.raises(ValueError), store.run("domain-draft", "distill", made_by(os.getppid())) as live:
        raise ValueError
    distill = [found for found in stopped("distill", "FAILED", began) if found.info.run_name == "distill"]
    assert [found.data.tags["live_run"] for found in distill] == [live]
    assert stopped("register", "FAILED", began) == []
    later = stopped("evaluate", "FAILED", time.time() + 1)
    assert len(later) == 2 and "live_run" not in later[0].data.tags, "that run ended before this stage began"


def test_a_store_out_of_reach_costs_a_line(stopped, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert stopped("gate", "FAILED", time.time()) == []
    message = capsys.readouterr().err
    assert message.startswith("not logged in MLflow: The MLflow store http://127.0.0.1:9 cannot be used")
    assert message.count("\n") == 1
