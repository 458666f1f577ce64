"""The run tree: stages logged from what they left, and the live run that joins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fresh_store import fresh_store

from pipeline.adapters.mlflow_store import RunStore, child_of
from pipeline.adapters.mlflow_tree import FinishedStage, join_live, log_finished

PROVENANCE = {"started_unix_seconds": 1000.0, "seconds": 12.5, "peak_memory_bytes": 7_000_000, "git_commit": "abcd"}
STAGE = FinishedStage("distill", "distill:\n  epochs: 3\n  note: '{x}'\n".format(x="é" * 10_000), PROVENANCE)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with fresh_store(RunStore, tmp_path_factory) as (made, _):
        yield made


def children(store: RunStore, parent: str) -> list:
    experiment = store.client.get_run(parent).info.experiment_id
    return store.client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")


def test_a_stage_is_logged_from_what_it_left(store):
    """R02: a long value is shortened among the params and whole in the file."""
    stage = replace(STAGE, name="evaluate", figures={"speedup": 1.5}, tags={"gate": "smoke"})
    with store.run("left", "parent", {}) as parent:
        log_finished(store, "left", parent, stage)
    (run,) = children(store, parent)
    info, data = run.info, run.data
    assert (info.run_name, info.status, info.start_time, info.end_time) == (
        "evaluate",
        "FINISHED",
        1_000_000,
        1_012_500,
    )
    assert data.metrics == {"speedup": 1.5, "wall_seconds": 12.5, "peak_memory_bytes": 7_000_000}
    assert data.params["distill.epochs"] == "3" and len(data.params["distill.note"]) == 500
    tags = {"stage": "evaluate", "gate": "smoke", "git_commit": "abcd", "logged": "from its files"}
    assert tags.items() <= data.tags.items()
    text = Path(store.client.download_artifacts(info.run_id, "config.yaml")).read_text(encoding="utf-8")
    assert text == stage.config


def test_without_provenance_there_is_no_duration(store):
    with store.run("bare", "parent", {}) as parent:
        log_finished(store, "bare", parent, replace(STAGE, provenance=None))
    (run,) = children(store, parent)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {})
    assert "git_commit" not in run.data.tags


def test_curves_leave_empty_cells_out(store, tmp_path):
    history = tmp_path / "history.csv"
    rows = ["1,10,2.5,", "2,20,,0.25", *(f"{step},{10 * step},1.0," for step in range(3, 1500))]
    history.write_text("\n".join(["step,tokens,loss,dev_token_acceptance", *rows]) + "\n")
    with store.run("curves", "parent", {}) as parent:
        log_finished(store, "curves", parent, replace(STAGE, history=history))
    (run,) = children(store, parent)
    curve = {
        name: [(point.step, point.value) for point in store.client.get_metric_history(run.info.run_id, name)]
        for name in ("loss", "dev_token_acceptance", "by_tokens/dev_token_acceptance", "tokens_seen")
    }
    assert curve["loss"][:2] == [(1, 2.5), (3, 1.0)] and len(curve["loss"]) == 1498
    assert curve["dev_token_acceptance"] == [(2, 0.25)]
    assert curve["by_tokens/dev_token_acceptance"] == [(20, 0.25)]
    assert curve["tokens_seen"][-1] == (1499, 14990)


def test_the_live_run_joins_the_first_tree_and_later_ones_name_it(store):
    wrote = {"stage": "distill", "logged": "live", "draft_fingerprint": "ffff"}
    with store.run("live", "distill", wrote) as live:
        store.log_metrics(live, {"loss": 1.0})
    with store.run("live", "another draft's", {**wrote, "draft_fingerprint": "eeee"}):
        pass
    parents = []
    for _ in range(2):
        with store.run("live", "parent", {}) as parent:
            join_live(store, "live", parent, STAGE, "ffff")
        parents.append(parent)
    (first,), (second,) = (children(store, parent) for parent in parents)
    assert first.info.run_id == live and first.data.metrics["loss"] == 1.0
    assert first.data.tags["mlflow.parentRunId"] == parents[0]
    assert (second.data.tags["live_run"], second.data.tags["logged"]) == (live, "from its files")


def test_without_a_live_run_the_stage_is_logged_from_its_files(store):
    with store.run("no-live", "parent", {}) as parent:
        join_live(store, "no-live", parent, STAGE, "ffff")
    (run,) = children(store, parent)
    assert run.data.tags["logged"] == "from its files" and "live_run" not in run.data.tags


def test_a_broken_file_leaves_no_run_that_seems_to_go_on(store, tmp_path):
    history = tmp_path / "history.csv"
    history.write_text("step,tokens,loss\n1,10,not a number\n")
    with pytest.raises(ValueError, match="not a number"), store.run("broken", "parent", {}) as parent:
        log_finished(store, "broken", parent, replace(STAGE, history=history))
    (run,) = children(store, parent)
    assert (run.info.status, store.client.get_run(parent).info.status) == ("FAILED", "FAILED")
    assert child_of(parent).items() <= run.data.tags.items()
