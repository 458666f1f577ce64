"""The gate stage: verdict on disk, lines on the screen, configuration errors."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline import gate, stage
from pipeline.core.artifacts import read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.gating import REMEDIES
from pipeline.stage import typed_config


def config(threshold=0.45, **changes):
    rule = {
        "metric": "token_acceptance_trimmed_head",
        "domain": "legal",
        "statistic": "point",
        "op": ">=",
        "threshold": threshold,
        "severity": "fail",
        **changes,
    }
    document = {
        "gate": {"name": "smoke", "model_name": "tiny-legal-draft", "enforce": True, "checks": [rule]},
        "other": {"ignored": 1},
    }
    return typed_config(OmegaConf.create(document), gate.Config)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PROJECT_ROOT", tmp_path)
    entry = {"value": 0.41, "interval": [0.38, 0.44], "count": 72, "reason": None}
    candidates = {"distilled": {"legal": {"token_acceptance_trimmed_head": entry}}}
    lossless = {"value": 1.0, "interval": None, "count": 8, "reason": None, "departures": []}
    facts = {"candidates": candidates, "lossless": lossless}
    write_json(tmp_path / "data/eval/metrics.json", "domain-draft/metrics", 1, facts)
    return tmp_path


def test_a_failed_gate_writes_its_verdict_and_ends_normally(project, capsys):
    gate.run(config())
    verdict = read_json(project / "data/gate/verdict.json", "domain-draft/verdict", 1)
    assert (verdict["gate"], verdict["passed"]) == ("smoke", False)
    assert verdict["checks"][0]["shortfall"] == pytest.approx(0.04)
    assert verdict["config"]["gate"]["checks"][0]["threshold"] == 0.45
    printed = capsys.readouterr().out
    assert "FAILED token_acceptance_trimmed_head (legal): 0.41, needs >= 0.45, short by 0.04. Remedy: " in printed
    assert printed.endswith("gate FAILED\n")


def test_a_passed_gate(project, capsys):
    gate.run(config(threshold=0.4))
    assert read_json(project / "data/gate/verdict.json", "domain-draft/verdict", 1)["passed"]
    assert capsys.readouterr().out.endswith("gate passed\n")


@pytest.mark.parametrize(("field", "value"), [("op", "=>"), ("threshold", "high"), ("thresold", 1.0)])
def test_an_invalid_configuration_is_one_line(field, value):
    with pytest.raises(PipelineError) as error:
        config(**{field: value})
    assert "\n" not in str(error.value)
    assert field in str(error.value)


def test_missing_metrics_name_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PROJECT_ROOT", tmp_path)
    with pytest.raises(PipelineError, match="dvc repro"):
        gate.run(config())


@pytest.mark.parametrize("name", ["default", "smoke"])
def test_the_shipped_gates_are_valid(name):
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        shipped = typed_config(compose("config", overrides=[f"gate={name}"]), gate.Config).gate
    assert shipped.name == name
    assert "lossless" in {check.metric for check in shipped.checks if check.severity == "fail"}
    assert {check.metric for check in shipped.checks} <= set(REMEDIES)


def test_only_a_champion_of_this_model_is_compared_with(project):
    metrics = read_json(project / "data/eval/metrics.json", "domain-draft/metrics", 1)
    metrics |= {"draft_fingerprint": "new", "champion": None, "versus_champion": None, "skipped": {}}
    write_json(project / "data/eval/metrics.json", "domain-draft/metrics", 1, metrics)
    states = []
    for name in ("another-draft", "tiny-legal-draft"):
        champion = {"model_name": name, "version": "3", "fingerprint": "old"}
        write_json(project / "data/champion/metrics.json", "domain-draft/champion", 1, champion)
        gate.run(config(metric="token_acceptance_difference", threshold=-0.03))
        verdict = read_json(project / "data/gate/verdict.json", "domain-draft/verdict", 1)
        states.append((verdict["checks"][0]["state"], verdict["passed"]))
    assert states == [("not applicable", True), ("no data", False)]
