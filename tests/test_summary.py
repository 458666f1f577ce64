"""The closing summary: what it prints, and what it refuses to be silent about."""

from __future__ import annotations

import re

import pytest
from test_report import SHEET, sample_metrics, write_artifacts

from pipeline import stage, summary
from pipeline.adapters import mlflow_registry, mlflow_store
from pipeline.core.artifacts import write_json
from pipeline.core.roi import RoiConfig, roi


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PROJECT_ROOT", tmp_path)
    (tmp_path / "data/report").mkdir(parents=True)
    (tmp_path / "data/report/index.html").write_text("<!doctype html>")
    worth = roi(RoiConfig(**SHEET), sample_metrics())
    write_json(tmp_path / "data/report/roi.json", "domain-draft/roi", 1, worth)
    return tmp_path


@pytest.fixture
def store(project, monkeypatch):
    """A store that holds tiny-legal-draft version 3 with the weights ffff."""

    class Store:
        def __init__(self, uri):
            assert uri == f"sqlite:///{project}/mlflow.db"

        def version_fingerprint(self, model_name, version):
            return {("tiny-legal-draft", "3"): "ffff"}.get((model_name, version))

    (project / "mlflow.db").touch()
    monkeypatch.setattr(mlflow_registry, "MlflowStore", Store)
    monkeypatch.setattr(mlflow_store, "check_store", lambda uri, timeout_seconds: None)


def fails_with(capsys):
    with pytest.raises(SystemExit) as error:
        summary.main()
    assert error.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_a_quantised_target_is_labelled(project, store, capsys):
    """L09"""
    metrics = sample_metrics()
    write_artifacts(project, {**metrics, "compatibility_key": {**metrics["compatibility_key"], "quantization": "4bit"}})
    summary.main()
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Draft for tiny on legal (target in 4bit: not comparable with an unquantised one)"


def test_a_registered_draft(project, store, capsys):
    write_artifacts(project)
    summary.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Draft for tiny on legal"
    rows = {label: texts for label, *texts in (re.split(" {2,}", line.strip()) for line in lines)}
    assert rows["token acceptance"] == ["distilled", "undistilled", "prompt lookup"]
    assert rows["legal"] == ["62.1 % (60.1–64.1 %)", "7.1 % (5.1–9.1 %)", "21.4 % (19.4–23.4 %)"]
    assert rows["speedup (legal)"][0] == "1.41× (1.35–1.47×)"
    assert rows["plain decoding"][0] == "ours 23.1 tokens/s, transformers 19.2 tokens/s"
    assert rows["lossless"][0] == "100.0 %, 8 decoded answers compared"
    assert rows["money (legal service, batch 8)"][0].startswith("saves 1,200 (1,083–1,308) EUR a month, 30.0 %")
    assert rows["gate 'default'"][0] == "passed, 3 of 5 checks met"
    assert rows["model"][0] == "registered as tiny-legal-draft version 3 (@candidate)"
    assert rows["report"][0] == f"{project}/data/report/index.html"
    assert rows["runs"][0] == f"mlflow ui --backend-store-uri sqlite:///{project}/mlflow.db"
    assert any(line.startswith("  WARNED acceptance_rate (legal): 0.52, needs >= 0.54") for line in lines)
    assert any(line.startswith("  NO DATA speedup (chat)") for line in lines)
    assert len(lines) <= 20


def test_a_failed_gate_says_why_and_asks_no_store(project, capsys, monkeypatch):
    monkeypatch.setattr(mlflow_store, "check_store", None)
    metrics = sample_metrics()
    metrics["reference"] = dict.fromkeys(metrics["reference"])
    write_artifacts(project, metrics, smallest_acceptance=0.7)
    summary.main()
    printed = capsys.readouterr().out
    assert "FAILED, 2 of 5 checks met" in printed
    assert "  FAILED token_acceptance_trimmed_head (legal): 0.6213, needs >= 0.7" in printed
    assert "not registered: the gate 'default' failed: token_acceptance_trimmed_head" in printed
    assert "ours not measured, transformers not measured" in printed


@pytest.mark.parametrize(
    "name",
    ["eval/metrics.json", "gate/verdict.json", "registry/receipt.json", "report/roi.json", "report/index.html"],
)
def test_a_missing_file_ends_with_one_line(project, store, capsys, name):
    write_artifacts(project)
    (project / "data" / name).unlink()
    message = fails_with(capsys)
    assert f"data/{name} does not exist" in message and "dvc repro" in message


@pytest.mark.parametrize("change", [{"version": "7"}, {"fingerprint": "0000"}])
def test_a_version_that_the_store_lacks(project, store, capsys, change):
    receipt = {
        "registered": True,
        "reason": "the gate passed",
        "model_name": "tiny-legal-draft",
        "version": "3",
        "alias": "candidate",
        "tracking_uri": f"sqlite:///{project}/mlflow.db",
        "fingerprint": "ffff",
    }
    write_artifacts(project, receipt={**receipt, **change})
    message = fails_with(capsys)
    assert f"sqlite:///{project}/mlflow.db lacks" in message and "delete data/registry/receipt.json" in message


def test_a_store_file_that_is_gone_is_not_made_anew(project, capsys):
    write_artifacts(project)
    assert "lacks" in fails_with(capsys)
    assert not (project / "mlflow.db").exists()


def test_the_runs_of_a_server_and_of_a_path_with_spaces():
    assert summary._browse("http://mlflow:5000") == "http://mlflow:5000"
    assert summary._browse("sqlite:////a b/mlflow.db") == "mlflow ui --backend-store-uri 'sqlite:////a b/mlflow.db'"
