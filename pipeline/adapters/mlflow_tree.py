"""One MLflow run tree per run of the pipeline: a parent, and a child for each stage.

`register` opens the parent: it comes after all that decides what is registered, and so the parent's status is known by
the process that opened it. Only distillation, the one stage worth watching, has a live run of its own
(`pipeline.adapters.mlflow_tracking`), which joins the tree when this is complete. The stages before and after it are logged
from what they wrote: their configuration, their figures, and start and duration from data/provenance/. Live runs of
theirs would make each of them wait for the store, let an edit in here answer all prompts anew, and leave the stages that
DVC skips out of the tree, whereas what these wrote belongs to it. One that stops before its end leaves a tree of its own,
FAILED or KILLED, of the pipeline's run and the stage (`pipeline.log_stopped`). The report, drawn from the same files
afterwards, joins the tree with its page.

A live run has one parent, the first tree that was completed with the draft that it made. Later trees of the same draft (the
evaluation or the gate changed) log distillation from its files, and name the live run in a tag.
"""

from __future__ import annotations

import csv
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.adapters.mlflow_store import (
    RunStore,
    check_store,
    child_of,
    git_tags,
    is_child,
    is_gone,
    limit_requests,
)
from pipeline.adapters.mlflow_tracking import curve_points
from pipeline.core.errors import PipelineError

LIVE = "distill"  # the stage that is tracked while it works


@dataclass(frozen=True)
class FinishedStage:
    """What a stage left."""

    name: str
    config: str  # YAML: the values that it ran with
    provenance: dict[str, Any] | None  # domain-draft/provenance; None where it did not come with the artifacts
    figures: dict[str, float] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    history: Path | None = None  # CSV: step, tokens, and figures that may be empty

    @property
    def params(self) -> Any:
        """The configuration, nested."""
        return OmegaConf.to_container(OmegaConf.create(self.config))


def log_finished(store: RunStore, experiment_name: str, parent: str, stage: FinishedStage) -> None:
    """Log a stage from what it left, as a finished child of the run `parent`."""
    tags: dict[str, Any] = {**child_of(parent), "stage": stage.name, "logged": "from its files", **stage.tags}
    past, resources = None, {}
    if stage.provenance is not None:
        began, seconds = stage.provenance["started_unix_seconds"], stage.provenance["seconds"]
        past = (began, began + seconds)
        resources = {"wall_seconds": seconds, "peak_memory_bytes": stage.provenance["peak_memory_bytes"]}
        tags["git_commit"] = stage.provenance["git_commit"] or ""
    with store.run(experiment_name, stage.name, tags, past) as run_id:
        store.log_text(run_id, "config.yaml", stage.config)
        store.log_params(run_id, stage.params)
        store.log_metrics(run_id, {**stage.figures, **resources})
        if stage.history is not None:
            store.log_points(run_id, _points(stage.history))


def join_live(store: RunStore, experiment_name: str, parent: str, stage: FinishedStage, draft_fingerprint: str) -> None:
    """Make the live run that wrote the draft a child of the run `parent`, or log the stage from its files.

    To be called when the rest of the tree is complete, lest an unfinished one keep the live run.
    """
    wrote = {"stage": LIVE, "draft_fingerprint": draft_fingerprint, "logged": "live"}
    live = store.newest_run(experiment_name, wrote)
    if live is not None and not is_child(live):
        store.set_tags(live.info.run_id, child_of(parent))
        return
    tags = {**stage.tags, "live_run": live.info.run_id} if live is not None else stage.tags
    log_finished(store, experiment_name, parent, replace(stage, tags=tags))


def log_report(
    uri: str, timeout_seconds: float, parent: str, config: str, page: Path, began: float, root: Path
) -> None:
    """Log the report of the project `root`, begun at `began` (Unix seconds) and finished now, as a child of the run `parent`
    in the store `uri`."""
    if is_gone(uri):
        raise PipelineError(
            f"The MLflow store {uri} is gone.", "bring it back, or register anew: `dvc repro register`."
        )
    limit_requests(timeout_seconds)
    check_store(uri, timeout_seconds)
    store = RunStore(uri)
    tags = {**child_of(parent), "stage": "report", **git_tags(root)}
    with store.run(store.experiment_of(parent), "report", tags, (began, time.time())) as run_id:
        store.log_text(run_id, "config.yaml", config)
        store.log_files(run_id, {page.name: page})


def _points(history: Path) -> list[tuple[str, float, int, int]]:
    """The points of all rows; empty cells are left out."""
    now = int(time.time() * 1000)
    with history.open(encoding="utf-8", newline="") as stream:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(stream)]
    return [(*point, now) for row in rows for point in curve_points(row)]
