"""The register stage: what is logged and registered, what a failed gate and an old receipt do."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from mlflow import MlflowClient
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline import gate, register, stage
from pipeline.adapters.mlflow_registry import MlflowStore
from pipeline.adapters.mlflow_store import resolve_tracking_uri
from pipeline.core.artifacts import fingerprint_files, fingerprint_weights, read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.gating import Check, judge

KEY = {"target": "builtin:tiny", "tokenizer": "0123456789abcdef", "quantization": "none"}


def build_draft(folder: Path, seed: int = 0) -> None:
    """A tiny Llama, its tokenizer and the JSON files of a draft's folder."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(16)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    weights = fingerprint_weights(folder)
    facts = {"compatibility_key": KEY, "fingerprint": weights, "dtype": "float32", "layers": 1}
    write_json(folder / "draft.json", "domain-draft/draft", 1, facts)
    (folder / "head_token_ids.json").write_text("[1, 2]")
    (folder / "config.yaml").write_text(f"distill:\n  learning_rate: {0.001 * (seed + 1)}\n  notes: {'x' * 10_000}\n")


def write_verdict(root: Path, acceptance: float) -> None:
    entry = {"value": acceptance, "interval": None, "count": 72, "reason": None}
    metrics = {
        "target": {"name": "tiny", "id": "builtin:tiny", "revision": "v1"},
        "domain": "legal",
        "compatibility_key": KEY,
        "draft_fingerprint": fingerprint_weights(root / "data/draft"),
        "settings": {"draft_length": 3, "temperature": 0.0},
        "candidates": {"distilled": {"legal": {"acceptance_rate": entry}}},
        "lossless": {"value": 1.0, "interval": None, "count": 8, "reason": None, "departures": []},
    }
    write_json(root / "data/eval/metrics.json", "domain-draft/metrics", 1, metrics)
    verdict = judge(metrics, [Check("acceptance_rate", "legal", "point", ">=", 0.4, "fail")])
    measured = fingerprint_files([root / "data/eval/metrics.json"])
    facts = {"gate": "smoke", "metrics_fingerprint": measured, **verdict, "config": {"gate": {"name": "smoke"}}}
    write_json(root / "data/gate/verdict.json", "domain-draft/verdict", 1, facts)


def acceptance(path: Path) -> float:
    return json.loads(path.read_text())["candidates"]["distilled"]["legal"]["acceptance_rate"]["value"]


def artifact(store: MlflowStore, run_id: str, name: str) -> Path:
    return Path(store.client.download_artifacts(run_id, name))


def children(store: MlflowStore, parent: str) -> dict:
    """stage -> run of the tree under `parent`."""
    experiment = store.client.get_run(parent).info.experiment_id
    found = store.client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    return {run.data.tags["stage"]: run for run in found}


def cut_after_first(original):
    """`original` for one call; the next is interrupted."""
    calls = []

    def guarded(*args, **kwargs):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return original(*args, **kwargs)

    return guarded


def config(model_name: str, uri: str | None = None) -> register.Config:
    return register.Config(register.RegistryConfig(uri, "domain-draft", 3.0, model_name, "candidate"))


def receipt(root: Path) -> dict:
    return read_json(root / "data/registry/receipt.json", "domain-draft/receipt", 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One project for the module: creating the store takes seconds."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture
def project(root, tmp_path, monkeypatch):
    """The project with the artifacts of all earlier stages and no receipt; the working directory is elsewhere."""
    monkeypatch.setattr(stage, "PROJECT_ROOT", root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(root / "data", ignore_errors=True)
    build_draft(root / "data/draft")
    write_verdict(root, acceptance=0.5)
    summary = {"speedup": 1.5, "draft_length": 3, "dtype": "float32", "rate": None}
    write_json(root / "data/eval/summary.json", "domain-draft/summary", 1, summary)
    (root / "data/eval/config.yaml").write_text("decode:\n  draft_length: 3\n")
    (root / "data/prompts").mkdir()
    (root / "data/prompts/config.yaml").write_text("seed: 0\n")
    (root / "data/prompts/train.parquet").write_text("prompts")
    (root / "dvc.lock").write_text("stages: {}\n")
    took = {"started_unix_seconds": 1000.0, "seconds": 60.0, "peak_memory_bytes": 1, "git_commit": None}
    write_json(root / "data/provenance/evaluate.json", "domain-draft/provenance", 1, took)
    (root / "data/distill").mkdir()
    (root / "data/distill/history.csv").write_text("step,tokens,loss,dev_token_acceptance\n1,10,2.0,\n2,20,1.0,0.3\n")
    return root


@pytest.fixture
def store(project):
    return MlflowStore(resolve_tracking_uri(None, project))


def test_a_passed_draft_is_registered_once(project, store, tmp_path, capsys):
    register.run(config("once"))
    first = receipt(project)
    assert (first["registered"], first["version"], first["alias"]) == (True, "1", "candidate")
    assert first["tracking_uri"] == f"sqlite:///{project}/mlflow.db"
    assert "registered once version 1 as @candidate" in capsys.readouterr().out
    register.run(config("once"))
    assert receipt(project)["version"] == "1"
    shutil.rmtree(project / "data/draft")
    build_draft(project / "data/draft", seed=1)
    with pytest.raises(PipelineError, match="another draft"):
        register.run(config("once"))
    write_verdict(project, acceptance=0.5)
    register.run(config("once"))
    assert receipt(project)["version"] == "2"
    assert store.version_by_alias("once", "candidate") == "2"
    assert list(tmp_path.iterdir()) == []


def test_the_same_weights_measured_anew_are_the_same_version(project, store, tmp_path):
    """The version carries the newer evidence; the older stays in its run."""
    register.run(config("anew"))
    older = receipt(project)
    write_verdict(project, acceptance=0.6)  # for example at another draft length
    register.run(config("anew"))
    newer = receipt(project)
    assert (older["version"], newer["version"]) == ("1", "1") and older["run_id"] != newer["run_id"]
    tags = store.version_tags("anew", "1")
    assert (tags["acceptance_rate"], tags["evidence_run"]) == ("0.6", newer["run_id"])
    folder = store.download("anew", "1", "model", tmp_path)
    assert acceptance(folder / "metrics.json") == 0.6
    assert fingerprint_files([folder / "metrics.json", folder / "verdict.json"]) == tags["evidence"]
    for found, value in ((older, 0.5), (newer, 0.6)):
        assert acceptance(artifact(store, found["run_id"], "metrics.json")) == value
        assert f"acceptance_rate (legal): {value}" in artifact(store, found["run_id"], "README.md").read_text()


@pytest.mark.parametrize(
    ("lost", "anew"), [("model", False), ("model", True), ("components", False), ("MLmodel", False)]
)
def test_a_known_version_of_which_files_have_gone_from_the_store_is_made_whole(project, store, tmp_path, lost, anew):
    name = f"gone-{lost}-{anew}"
    register.run(config(name))
    version = store.client.get_model_version(name, "1")
    kept = Path(store.client.get_run(version.run_id).info.artifact_uri.removeprefix("file://")) / "draft"
    (shutil.rmtree if (kept / lost).is_dir() else Path.unlink)(kept / lost)
    with pytest.raises(PipelineError, match="cannot be downloaded"):
        store.download(name, "1", lost, tmp_path / "before")
    if anew:
        write_verdict(project, acceptance=0.7)
    register.run(config(name))
    assert receipt(project)["version"] == "1"
    assert store.download(name, "1", lost, tmp_path / "after").exists()
    folder = store.download(name, "1", "model", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == (project / "data/draft/model.safetensors").read_bytes()
    tags = store.version_tags(name, "1")
    assert fingerprint_files([folder / "metrics.json", folder / "verdict.json"]) == tags["evidence"]


def test_a_known_version_carries_a_verdict_that_it_failed(project, store, capsys):
    register.run(config("fallen"))
    write_verdict(project, acceptance=0.3)
    register.run(config("fallen"))
    assert "fallen version 1 holds these weights and carries the new verdict" in capsys.readouterr().out
    assert (receipt(project)["registered"], receipt(project)["version"]) == (False, None)
    assert store.version_tags("fallen", "1")["verdict"] == "failed"


def test_a_killed_update_of_the_evidence_is_done_anew(project, store, monkeypatch):
    register.run(config("killed"))
    first = store.version_tags("killed", "1")

    write_verdict(project, acceptance=0.6)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MlflowClient, "set_model_version_tag", cut_after_first(MlflowClient.set_model_version_tag))
        register.run(config("killed"))
    write_verdict(project, acceptance=0.5)  # the first evidence again
    register.run(config("killed"))
    assert store.version_tags("killed", "1")["evidence"] == first["evidence"]


def test_the_runs_hold_configs_metrics_curves_and_tags(project, store):
    """R02: a text of 10,000 characters does no harm and is whole in a file."""
    register.run(config("logged"))
    run = store.client.get_run(receipt(project)["run_id"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "logged")
    assert run.data.params["distill.distill.learning_rate"] == "0.001"
    assert run.data.params["evaluate.decode.draft_length"] == "3"
    assert run.data.params["register.registry.model_name"] == "logged"
    assert run.data.metrics == {"speedup": 1.5, "draft_length": 3.0}
    assert (run.data.tags["verdict"], run.data.tags["gate"]) == ("passed", "smoke")
    assert run.data.tags["compatibility.tokenizer"] == KEY["tokenizer"]
    assert (run.data.tags["target"], run.data.tags["target_revision"]) == ("builtin:tiny", "v1")
    prompts = fingerprint_files([project / "data/prompts/train.parquet"])
    assert (run.data.tags["fingerprint.prompts"], "fingerprint.answers" in run.data.tags) == (prompts, False)
    assert run.data.tags["dvc_lock"] == fingerprint_files([project / "dvc.lock"])
    assert artifact(store, run.info.run_id, "dvc.lock").read_text() == "stages: {}\n"
    assert "x" * 10_000 in artifact(store, run.info.run_id, "config/distill.yaml").read_text()
    card = artifact(store, run.info.run_id, "draft/model/README.md").read_text()
    assert "| speedup | 1.5 |" in card and "builtin:tiny" in card
    names = {item.path for item in store.client.list_artifacts(run.info.run_id, "draft/model")}
    assert {"draft/model/metrics.json", "draft/model/verdict.json", "draft/model/head_token_ids.json"} <= names
    tags = store.version_tags("logged", "1")
    assert (tags["acceptance_rate"], tags["speedup"], tags["draft_length"]) == ("0.5", "not measured", "3")
    assert (tags["dtype"], tags["compatibility.target"]) == ("float32", KEY["target"])


def test_one_tree_per_run_of_the_pipeline(project, store):
    """Each stage is a child; the live run of distillation joins the first tree."""
    live = {"stage": "distill", "logged": "live"}
    weights = read_json(project / "data/draft/draft.json", "domain-draft/draft", 1)["fingerprint"]
    with store.run("domain-draft", "distill", {**live, "draft_fingerprint": weights}) as live_run:
        pass
    register.run(config("tree"))
    first = children(store, receipt(project)["run_id"])
    register.run(config("tree"))
    second = children(store, receipt(project)["run_id"])
    for tree in (first, second):
        assert set(tree) == {"prepare", "distill", "evaluate", "gate", "register"}  # data/answers has no config here
        assert {run.info.status for run in tree.values()} == {"FINISHED"}
        assert (tree["evaluate"].info.start_time, tree["evaluate"].info.end_time) == (1_000_000, 1_060_000)
        assert tree["evaluate"].data.metrics["speedup"] == 1.5 and tree["gate"].data.tags["verdict"] == "passed"
        assert tree["register"].data.params["registry.alias"] == "candidate"
        texts = {
            name: artifact(store, run.info.run_id, "config.yaml") for name, run in tree.items() if name != "distill"
        }
        assert "smoke" in texts["gate"].read_text() and "draft_length: 3" in texts["evaluate"].read_text()
    assert first["distill"].info.run_id == live_run
    assert second["distill"].data.tags["live_run"] == live_run
    assert second["distill"].data.metrics["loss"] == 1.0


def test_sigterm_ends_the_tree_as_killed(project, store, monkeypatch):
    monkeypatch.setattr(MlflowStore, "register_version", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as error:
        register.run(config("stopped"))
    assert error.value.code == 128 + signal.SIGTERM
    parent = store.newest_run("domain-draft", {"mlflow.runName": "stopped"})
    assert parent.info.status == "KILLED"
    statuses = {name: run.info.status for name, run in children(store, parent.info.run_id).items()}
    assert statuses == {"prepare": "FINISHED", "evaluate": "FINISHED", "gate": "FINISHED", "register": "KILLED"}
    assert not (project / "data/registry").exists()


def test_a_failed_gate_registers_nothing(project, store, capsys):
    write_verdict(project, acceptance=0.3)
    register.run(config("failing"))
    result = receipt(project)
    assert (result["registered"], result["version"], result["alias"]) == (False, None, None)
    assert result["reason"] == "the gate 'smoke' failed: acceptance_rate"
    assert "not registered" in capsys.readouterr().out
    run = store.client.get_run(result["run_id"])
    assert (run.info.status, run.data.tags["verdict"]) == ("FINISHED", "failed")
    assert store.version_by_alias("failing", "candidate") is None
    assert [item for item in store.client.search_registered_models() if item.name == "failing"] == []
    register.run(config("failing"))  # a receipt without a version is no obstacle


def test_the_target_as_its_own_draft_agrees_always_saves_nothing_and_is_not_registered(project, store):
    """Acceptance alone would take it: the rules on speed and memory of the default gate refuse it."""
    one = {"value": 1.0, "interval": [1.0, 1.0], "count": 24, "reason": None}
    slower = {**one, "value": 0.85, "interval": [0.82, 0.88]}
    accepted = ("token_acceptance_trimmed_head", "token_acceptance_without_loops", "acceptance_rate")
    measures = {**dict.fromkeys((*accepted, "ttft_ratio", "smoothness"), one), "speedup": slower}
    metrics = read_json(project / "data/eval/metrics.json", "domain-draft/metrics", 1)
    metrics |= {
        "candidates": {"distilled": {"legal": measures}},
        "memory": {"candidates": {"distilled": {"draft_share": 0.5}}},
    }
    metrics |= {"champion": None, "versus_champion": None, "skipped": {"champion": "no draft was promoted yet"}}
    write_json(project / "data/eval/metrics.json", "domain-draft/metrics", 1, metrics)
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        gate.run(stage.typed_config(compose("config"), gate.Config))
    checks = read_json(project / "data/gate/verdict.json", "domain-draft/verdict", 1)["checks"]
    states = {check["metric"]: check["state"] for check in checks}
    assert [states[name] for name in accepted] == ["passed"] * 3
    assert {name for name, state in states.items() if state == "failed"} == {"speedup", "draft_share"}
    register.run(config("own-target"))
    assert not receipt(project)["registered"] and "speedup" in receipt(project)["reason"]
    assert store.version_by_alias("own-target", "candidate") is None


def test_a_receipt_that_the_store_lacks_stops_at_once(project, store):
    register.run(config("stale"))
    path = project / "data/registry/receipt.json"
    old = json.loads(path.read_text())
    runs = len(store.client.search_runs(["1"]))
    for change in ({"version": "7"}, {"model_name": "gone"}, {"fingerprint": "0" * 16}):
        path.write_text(json.dumps({**old, **change}))
        with pytest.raises(PipelineError, match="lacks") as error:
            register.run(config("stale"))
        assert store.uri in error.value.reason
        assert "MLFLOW_TRACKING_URI" in error.value.remedy and "receipt.json" in error.value.remedy
    assert len(store.client.search_runs(["1"])) == runs


def test_damaged_weights_and_a_verdict_on_other_figures_are_refused(project):
    weights = project / "data/draft/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(PipelineError, match="not those that its draft.json names"):
        register.run(config("damaged"))
    weights.write_bytes(whole)
    metrics = read_json(project / "data/eval/metrics.json", "domain-draft/metrics", 1)
    write_json(project / "data/eval/metrics.json", "domain-draft/metrics", 1, {**metrics, "domain": "legal", "more": 1})
    with pytest.raises(PipelineError, match="another evaluation"):
        register.run(config("damaged"))
    assert not (project / "data/registry").exists()


def test_a_draft_of_another_target_is_refused(project):
    path = project / "data/draft/draft.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "compatibility_key": {**KEY, "tokenizer": "other"}}))
    with pytest.raises(PipelineError, match="different targets"):
        register.run(config("mismatch"))


def test_an_error_while_logging_leaves_a_failed_run_and_no_receipt(project, store):
    (project / "data/distill/history.csv").write_text("step,tokens,loss\n1,10,not a number\n")
    with pytest.raises(ValueError, match="not a number"):
        register.run(config("broken"))
    parent = store.newest_run("domain-draft", {"mlflow.runName": "broken"})
    assert parent.info.status == children(store, parent.info.run_id)["distill"].info.status == "FAILED"
    assert not (project / "data/registry").exists()


def test_an_unreachable_server_stops_before_anything_is_read(project, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    shutil.rmtree(project / "data")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    start = time.monotonic()
    with pytest.raises(PipelineError, match="cannot be used"):
        register.run(config("unreachable"))
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "change",
    [
        {"alias": "v1"},
        {"alias": "latest"},
        {"alias": "a b"},
        {"alias": "champion"},
        {"model_name": "a/b"},
        {"model_name": "client's"},
    ],
)
def test_names_that_the_registry_refuses_are_refused_when_they_are_read(change):
    values = {
        "tracking_uri": None,
        "experiment_name": "e",
        "model_name": "m",
        "alias": "candidate",
        "timeout_seconds": 1,
    }
    with pytest.raises(ValueError, match="registry"):
        register.RegistryConfig(**{**values, **change})


@pytest.mark.parametrize("name", ["eval/summary.json", "distill/history.csv"])
def test_a_missing_artifact_is_named_before_a_run_is_opened(project, store, name):
    (project / "data" / name).unlink()
    with pytest.raises(PipelineError, match=name):
        register.run(config("incomplete"))
    assert store.client.get_experiment_by_name("domain-draft") is None or not [
        run for run in store.client.search_runs(["1"]) if run.info.run_name == "incomplete"
    ]
