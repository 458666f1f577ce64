"""A stage's own MLflow run: its configuration, its curves while it works, what it took and how it ended.

Tracking changes no result. Hence store and experiment are no DVC parameters of a tracked stage, and a store that fails
once the work is under way costs warnings, not the work. What the stage wrote is named in a tag, by which the run finds its
place in the tree of the pipeline's run later (`pipeline.adapters.mlflow_tree`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from omegaconf import OmegaConf

from pipeline.core.artifacts import atomic_path
from pipeline.core.ending import ending
from pipeline.core.errors import PipelineError

if TYPE_CHECKING:
    from mlflow.entities import Run

    from pipeline.adapters.mlflow_store import RunStore

logger = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow_run_id"  # in the stage's resumable folder
SECONDS_BETWEEN_BATCHES = 5.0  # a batch takes some 10 to 30 ms
SECONDS_AFTER_FAILURE = 60.0  # each try may wait for the store's timeout, twice


@dataclass
class TrackingConfig:
    tracking_uri: Optional[str]  # null: MLFLOW_TRACKING_URI, else the SQLite file mlflow.db of the project
    experiment_name: str
    timeout_seconds: float  # to wait for a server's answer


class Untracked:
    """Takes the place of a `StageRun` where nothing is tracked."""

    def log_row(self, row: dict[str, float]) -> None:
        """Do nothing."""

    def wrote(self, tags: dict[str, str]) -> None:
        """Do nothing."""


class StageRun:
    """An open run. Figures are sent in batches every few seconds, so that they can be watched at no cost to the stage."""

    def __init__(self, store: RunStore, run: Run) -> None:
        self.store = store
        self.run_id = run.info.run_id
        self.attempt = int(run.data.tags.get("attempt", 0)) + 1
        self.logged_params = run.data.params  # by earlier attempts
        self.earlier = run.data.metrics  # the newest values of all figures
        self.known = store.logged_points(run)  # names and steps of points that were sent, or wait to be
        self.started = time.monotonic()
        self.step = max((step for name, step in self.known if name == "tokens_seen"), default=0)
        self.progress: list[tuple[float, int]] = []  # seconds, tokens: at the first and the newest row
        self.points: list[tuple[str, float, int, int]] = []  # to be sent: name, value, step, Unix milliseconds
        self.next_batch = 0.0

    def describe(self, tags: dict[str, Any], config: Any) -> None:
        """Log tags, and the dataclass `config` as params and, whole, as a file.

        A param that differs from the first attempt's is added as `attempt_<n>/<key>`, the file as `config.attempt_<n>.yaml`.
        """
        from pipeline.adapters.mlflow_store import made_by

        name = "config.yaml" if self.attempt == 1 else f"config.attempt_{self.attempt}.yaml"
        self.store.set_tags(self.run_id, {**tags, "attempt": self.attempt, **made_by(os.getpid())})
        self.store.log_text(self.run_id, name, OmegaConf.to_yaml(OmegaConf.structured(config)))
        prefix = f"attempt_{self.attempt}/"
        self.store.log_params_again(self.run_id, dataclasses.asdict(config), self.logged_params, prefix)

    def log_row(self, row: dict[str, float]) -> None:
        """Log the `curve_points` of what was measured at one optimiser step.

        A figure that was logged before for the same step is left out, for a new attempt repeats what came after its
        checkpoint.
        """
        step, tokens = row["step"], row["tokens"]
        curves = curve_points(row)
        now = int(time.time() * 1000)
        self.points += [(*point, now) for point in curves if (point[0], point[2]) not in self.known]
        self.known |= {(name, place) for name, _, place in curves}
        self.step = max(self.step, step)
        if not self.progress or tokens > self.progress[-1][1]:
            self.progress = [*self.progress[:1], (time.monotonic(), tokens)]
        if time.monotonic() >= self.next_batch:
            self._send()

    def wrote(self, tags: dict[str, str]) -> None:
        """Name what the stage wrote."""
        with _refusals_as_warnings():
            self.store.set_tags(self.run_id, tags)

    def close(self, status: str) -> None:
        """Send what is left and end the run as FINISHED, FAILED or KILLED."""
        self._send()
        with _refusals_as_warnings():
            self.store.end_run(self.run_id, status)

    def _send(self) -> None:
        """Send the points that wait, and the summary so far, so that a run that is killed has one too."""
        now = int(time.time() * 1000)
        summary = [(name, value, self.step, now) for name, value in self._summary().items()]
        self.next_batch = time.monotonic() + SECONDS_AFTER_FAILURE
        with _refusals_as_warnings():
            self.store.log_points(self.run_id, [*self.points, *summary])
            self.points = []
            self.next_batch = time.monotonic() + SECONDS_BETWEEN_BATCHES

    def _summary(self) -> dict[str, float]:
        """Seconds and peak memory of all attempts; tokens per second (dev evaluation included) of this one."""
        figures = {"wall_seconds": self.earlier.get("wall_seconds", 0.0) + time.monotonic() - self.started}
        figures |= {name: max(peak, self.earlier.get(name, 0)) for name, peak in _peak_memory().items()}
        if len(self.progress) == 2:
            (start, first), (end, last) = self.progress
            figures["tokens_per_second"] = (last - first) / (end - start)
        return figures


@contextlib.contextmanager
def stage_run(
    tracking: TrackingConfig | None, stage: str, config: Any, root: Path, cache: Path, main_process: bool
) -> Iterator[StageRun | Untracked]:
    """Follow the block in an MLflow run named `stage`; without `tracking`, or not in the main process, do nothing.

    `config` is the stage's dataclass, `root` the project's folder. `cache` is the stage's resumable folder, named by the
    fingerprint of all that the result depends on. The run's id is kept there: a stage that was killed continues its run.
    The run ends as FINISHED, as KILLED after SIGTERM or an interrupt, or as FAILED after any other exception.

    Raises `PipelineError` before the block when the store cannot be used.
    """
    if tracking is None or not main_process:
        yield Untracked()
        return
    from pipeline.adapters.mlflow_store import RunStore, check_store, git_tags, limit_requests, resolve_tracking_uri

    limit_requests(tracking.timeout_seconds)
    uri = resolve_tracking_uri(tracking.tracking_uri, root)
    check_store(uri, tracking.timeout_seconds)
    store = RunStore(uri)
    run = StageRun(store, _open(store, tracking.experiment_name, stage, cache / RUN_ID_FILE))
    with ending(run.close):
        run.describe({"stage": stage, "logged": "live", "fingerprint": cache.name, **git_tags(root)}, config)
        yield run


def curve_points(row: dict[str, float]) -> list[tuple[str, float, int]]:
    """Points (name, value, step) of what was measured at optimiser step `row["step"]`, after `row["tokens"]` tokens.

    Each other figure is a point of two curves: over steps under its name, over tokens as `by_tokens/<name>`.
    """
    step, tokens = int(row["step"]), int(row["tokens"])
    points = [("tokens_seen", tokens, step)]
    for name in row.keys() - {"step", "tokens"}:
        points += [(name, row[name], step), (f"by_tokens/{name}", row[name], tokens)]
    return points


def _open(store: RunStore, experiment_name: str, stage: str, id_file: Path) -> Run:
    """The run that an earlier attempt noted in `id_file`, or a new one where the store does not know it."""
    run = store.reopen_run(id_file.read_text(encoding="utf-8")) if id_file.exists() else None
    if run is None:
        run = store.create_run(experiment_name, stage, {})
        with atomic_path(id_file) as temporary:
            temporary.write_text(run.info.run_id, encoding="utf-8")
    return run


@contextlib.contextmanager
def _refusals_as_warnings() -> Iterator[None]:
    try:
        yield
    except PipelineError as error:
        logger.warning("tracking: %s", error.reason)


def _peak_memory() -> dict[str, int]:
    """Bytes: of this process, and of the accelerators it used."""
    figures = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch = sys.modules.get("torch")  # a stage without it does not load it for this
    if torch is not None and torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        figures["peak_accelerator_memory_bytes"] = sum(map(torch.cuda.max_memory_allocated, devices))
    return figures
