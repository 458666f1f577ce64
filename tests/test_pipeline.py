"""The whole DAG on the tiny model, in a clone of the project: end to end, re-run behaviour, overrides, other folders."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from clone import checked, run

from pipeline.adapters.mlflow_store import RunStore

STAGES = ("prepare", "generate", "distill", "evaluate", "gate", "register", "report")


def read(clone: Path, name: str) -> dict:
    return json.loads((clone / name).read_text(encoding="utf-8"))


def executed(output: str) -> set[str]:
    return {name for name in STAGES if f"Running stage '{name}'" in output}


def charts(page: str) -> list[dict]:
    """The Vega-Lite specifications in a page of `dvc plots`."""
    return [json.loads(text) for text in re.findall(r"var spec = (.*);\n", page)]


def test_it_reaches_a_registered_draft(clone):
    verdict, receipt = read(clone, "data/gate/verdict.json"), read(clone, "data/registry/receipt.json")
    assert verdict["passed"] and verdict["gate"] == "smoke"
    assert receipt["registered"] and receipt["model_name"] == "tiny-legal-draft"
    assert (clone / "data/report/index.html").stat().st_size > 5000
    metrics = read(clone, "data/eval/metrics.json")
    assert set(metrics["candidates"]) == {"prompt_lookup", "undistilled", "distilled"}
    assert set(metrics["candidates"]["distilled"]) == {"legal", "code", "conversation", "all"}
    assert metrics["lossless"]["value"] == 1.0
    assert metrics["candidates"]["distilled"]["legal"]["speedup"]["interval"] is not None


def test_distillation_is_tracked(clone):
    """R06: the run lies in the tree that registration made, with its curves, its configuration and what it took."""
    receipt = read(clone, "data/registry/receipt.json")
    client = RunStore(receipt["tracking_uri"]).client
    parent = client.get_run(receipt["run_id"])
    tree = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {run.info.run_name: run.info.status for run in [parent, *tree]} == dict.fromkeys(
        ["tiny-legal-draft", *STAGES], "FINISHED"
    )
    assert {"fingerprint.prompts", "fingerprint.answers", "dvc_lock", "git_commit"} <= set(parent.data.tags)
    (run,) = [run for run in tree if run.info.run_name == "distill"]
    assert run.data.tags["logged"] == "live"
    history = (clone / "data/distill/history.csv").read_text().splitlines()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "distill")
    assert {"git_commit", "fingerprint"} <= set(run.data.tags)
    assert len(client.get_metric_history(run.info.run_id, "tokens_seen")) == len(history) - 1
    assert run.data.metrics["tokens_seen"] == int(history[-1].split(",")[1])
    assert {"loss", "learning_rate", "dev_token_acceptance", "by_tokens/loss", "wall_seconds", "tokens_per_second",
            "peak_memory_bytes"} <= set(run.data.metrics)  # fmt: skip
    config = Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text()
    assert config == (clone / "data/draft/config.yaml").read_text()


def test_the_summary_says_it_all(clone):
    text = checked([sys.executable, "-m", "pipeline.summary"], clone)
    for words in ("legal", "code", "conversation", "transformers", "tiny-legal-draft", "index.html", "mlflow ui"):
        assert words in text


def test_no_stage_leaves_temporary_files_or_logs(clone):
    left = [path for path in clone.rglob("*.tmp") if ".dvc" not in path.parts] + list(clone.glob("*.log"))
    assert not left
    assert not list((clone / ".cache").glob("distill/*/checkpoint-*"))


def test_a_second_run_has_nothing_to_do(clone):
    assert "Data and pipelines are up to date" in checked(["dvc", "repro"], clone)


def test_dvc_shows_metrics_and_plots(clone):
    shown = json.loads(run(["dvc", "metrics", "show", "--json"], clone).stdout)[""]["data"]
    found = shown["data/eval/summary.json"]["data"]
    assert found == read(clone, "data/eval/summary.json")
    committed = json.loads(checked(["git", "show", "HEAD:data/eval/summary.json"], clone))
    compared = json.loads(run(["dvc", "metrics", "diff", "--json"], clone).stdout)["data/eval/summary.json"]
    change, name = compared["speedup_legal"], "speedup_legal"
    assert (change["old"], change["new"]) == (committed[name], found[name])
    assert change["diff"] == pytest.approx(found[name] - committed[name])
    checked(["dvc", "plots", "show", "-o", "plots"], clone)
    drawn = {
        chart["title"]["text"]: chart for chart in charts((clone / "plots/index.html").read_text(encoding="utf-8"))
    }
    for named in yaml.safe_load((clone / "dvc.yaml").read_text(encoding="utf-8"))["plots"]:
        for title, plot in named.items():
            ((file, y),) = plot["y"].items()
            x = plot["x"] if isinstance(plot["x"], str) else plot["x"][file]
            rows = drawn[title]["data"]["values"]
            assert rows and all(row[x] and row[y] for row in rows), f"{title}: Vega draws an empty cell as 0"
    by_position = drawn["acceptance by position"]
    assert by_position["encoding"]["color"]["field"] == "candidate"
    assert {row["candidate"] for row in by_position["data"]["values"]} == {"prompt_lookup", "undistilled", "distilled"}


def test_an_override_reaches_the_code_and_reruns_what_depends_on_it(clone):
    """P02: distill and what follows run, generation does not; the artifact and the tracked run say the new value."""
    on_policy = ["-S", "distill.on_policy.steps=2", "-S", "distill.on_policy.max_new_tokens=8"]
    changes = ["-S", "distill.epochs=2", "-S", "decode.draft_length=2", *on_policy]
    output = checked(["dvc", "exp", "run", "-S", "experiment=smoke", *changes], clone)
    assert executed(output) >= {"distill", "evaluate"} and not executed(output) & {"prepare", "generate"}
    effective = yaml.safe_load((clone / "data/draft/config.yaml").read_text(encoding="utf-8"))
    assert effective["distill"]["epochs"] == 2
    history = (clone / "data/distill/history.csv").read_text(encoding="utf-8").splitlines()
    assert history[0].endswith(",on_policy_kept") and history[-1][-2:] in (",0", ",1")
    params = yaml.safe_load((clone / "params.yaml").read_text(encoding="utf-8"))
    assert {name: params[name] for name in effective} == effective
    code = (
        "import json, sys; from mlflow import MlflowClient\n"
        "receipt = json.load(open('data/registry/receipt.json'))\n"
        "run = MlflowClient(receipt['tracking_uri']).get_run(receipt['run_id'])\n"
        "print({float(value) for name, value in run.data.params.items() if name.endswith('distill.epochs')})\n"
    )
    assert checked([sys.executable, "-c", code], clone).splitlines()[-1] == "{2.0}"
    assert read(clone, "data/eval/summary.json")["draft_length"] == 2
    failed = run(["dvc", "exp", "run", "-S", "distill.no_such_key=3"], clone)
    assert failed.returncode != 0 and "no_such_key" in failed.stdout + failed.stderr


def test_an_edit_in_conf_reruns_exactly_its_stage(clone):
    checked([sys.executable, "-m", "pipeline.compose", "experiment=smoke"], clone)
    checked(["dvc", "repro"], clone)
    path = clone / "conf/gate/smoke.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("threshold: 0.05", "threshold: 0.04"), encoding="utf-8")
    checked([sys.executable, "-m", "pipeline.compose", "experiment=smoke"], clone)
    output = checked(["dvc", "repro"], clone)
    assert "gate" in executed(output) and not executed(output) & {"prepare", "generate", "distill", "evaluate"}


def test_the_command_of_distill_is_chosen_by_a_parameter(clone):
    launches = {
        "launch=ddp": "accelerate launch --config_file conf/accelerate/ddp.yaml",
        "launch=one_process": "python",
    }
    for choice, command in launches.items():
        checked([sys.executable, "-m", "pipeline.compose", "experiment=smoke", choice], clone)
        output = checked(["dvc", "repro", "--dry", "--force", "--single-item", "distill"], clone)
        assert f"> {command} -m pipeline.distill -cn from_params\n" in output


def test_stages_run_from_any_folder_and_with_chdir(clone, tmp_path):
    """P04: paths are the project's, whatever the working directory."""
    written = ("prompts/train.parquet", "gate/verdict.json", "report/index.html")
    before = [(clone / "data" / name).read_bytes() for name in written]
    arguments = ["experiment=smoke", "hydra.job.chdir=true", f"hydra.run.dir={tmp_path}/job"]
    for stage, name in (("prepare", written[0]), ("gate", written[1]), ("report", written[2])):
        (clone / "data" / name).unlink()
        checked([sys.executable, "-m", f"pipeline.{stage}", *arguments], tmp_path, PYTHONPATH=str(clone))
    assert [(clone / "data" / name).read_bytes() for name in written] == before
    assert read(clone, "data/gate/verdict.json")["passed"]
    assert not (tmp_path / "data").exists()


def test_multirun_jobs_write_into_their_own_folders(clone):
    """P04: three results, none mixed, DVC's outputs untouched."""
    before = (clone / "data/prompts/train.parquet").read_bytes()
    output = checked([sys.executable, "-m", "pipeline.prepare", "-m", "experiment=smoke", "seed=1,2,3"], clone)
    jobs = sorted((clone / "multirun").glob("*/*/*/data/prompts/train.parquet"))
    assert len(jobs) == 3 and len({job.read_bytes() for job in jobs}) == 3
    assert all(f"written to {job.parents[1]}\n" in output for job in jobs)
    assert (clone / "data/prompts/train.parquet").read_bytes() == before


def test_a_stage_that_stops_leaves_a_run_that_says_why(clone):
    """R06: FAILED, with a parent that is, in the store that the parameters name."""
    path = clone / "data/eval/metrics.json"
    path.rename(clone / "metrics.json")
    gate = [sys.executable, "-m", "pipeline.gate", "-cn", "from_params"]
    failed = run(gate, clone)
    (clone / "metrics.json").rename(path)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    client = RunStore(read(clone, "data/registry/receipt.json")["tracking_uri"]).client
    experiments = [found.experiment_id for found in client.search_experiments()]
    stopped = client.search_runs(experiments, "attributes.status = 'FAILED' and tags.stage = 'gate'")
    child, parent = sorted(stopped, key=lambda found: found.info.run_name)
    assert (child.info.run_name, parent.info.run_name) == ("gate", "tiny-legal-draft")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert "metrics.json does not exist" in child.data.tags["stopped_by"] and child.info.end_time
    config = Path(client.download_artifacts(child.info.run_id, "config.yaml")).read_text()
    assert yaml.safe_load(config) == yaml.safe_load((clone / "params.yaml").read_text())


def test_the_candidate_is_promoted(clone):
    assert "is the champion" in checked([sys.executable, "-m", "pipeline.promote", "--force", "a test"], clone)
    document, receipt = read(clone, "data/champion/metrics.json"), read(clone, "data/registry/receipt.json")
    assert (document["model_name"], document["tracking_uri"]) == ("tiny-legal-draft", None)
    assert (document["version"], document["fingerprint"]) == (receipt["version"], receipt["fingerprint"])
    assert document["metrics"] == read(clone, "data/eval/metrics.json")


ANOTHER_DRAFT = ["-S", "experiment=smoke", "-S", "distill.epochs=6"]


def test_the_next_draft_is_measured_beside_the_champion_and_held_against_it(clone):
    states = {check["metric"]: check["state"] for check in read(clone, "data/gate/verdict.json")["checks"]}
    assert states["token_acceptance_difference"] == states["speedup_ratio"] == "not applicable"
    champion = read(clone, "data/champion/metrics.json")
    output = checked(["dvc", "exp", "run", *ANOTHER_DRAFT], clone)
    assert executed(output) >= {"distill", "evaluate", "gate", "register", "report"}
    metrics, checks = read(clone, "data/eval/metrics.json"), read(clone, "data/gate/verdict.json")["checks"]
    named = ("model_name", "version", "fingerprint")
    assert metrics["champion"] == {**{name: champion[name] for name in named}, "comparable": True}
    assert metrics["draft_fingerprint"] != champion["fingerprint"] and "champion" not in metrics["skipped"]
    assert metrics["draft_lengths"]["champion"] == champion["metrics"]["settings"]["draft_length"]
    shares = {
        name: metrics["candidates"][name]["code"]["token_acceptance_trimmed_head"]["value"]
        for name in ("distilled", "champion")
    }
    (held,) = [
        check for check in checks if (check["metric"], check["domain"]) == ("token_acceptance_difference", "code")
    ]
    assert held["state"] == "passed" and held["value"] == pytest.approx(shares["distilled"] - shares["champion"])
    assert [check["state"] for check in checks if check["metric"] == "speedup_ratio"] == ["passed"]
    assert "Against the champion" in (clone / "data/report/index.html").read_text(encoding="utf-8")


def test_a_failed_gate_registers_nothing_and_can_end_the_run(clone):
    overrides = [*ANOTHER_DRAFT, "-S", "gate.checks.0.threshold=1.01"]
    enforced = run(["dvc", "exp", "run", *overrides, "-S", "gate.enforce=true"], clone)
    assert enforced.returncode != 0 and "gate FAILED" in enforced.stdout + enforced.stderr
    receipt = read(clone, "data/registry/receipt.json")
    assert not receipt["registered"] and receipt["reason"]
    assert (clone / "data/report/index.html").exists()
