"""The MLflow store: how it is found and checked, and runs in it, which end as the work that they stand for does."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import http.client
import logging
import math
import os
import re
import socket
import sqlite3
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at import; its usage reports need the network

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from requests import RequestException

from pipeline.core.ending import ending
from pipeline.core.errors import PipelineError

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)

PARAMS_PER_BATCH = 100  # the tracking API's limits
METRICS_PER_BATCH = 1000
PARAM_CHARACTERS = 500  # servers before 2.x refuse more, current ones cut at 6,000
KEY_CHARACTERS = 250
TAG_CHARACTERS = 5000
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
STORE_REMEDY = "set MLFLOW_TRACKING_URI (or registry.tracking_uri) to a store that works, or unset it for mlflow.db"


def resolve_tracking_uri(configured: str | None, root: Path) -> str:
    """The tracking URI: `configured`, else MLFLOW_TRACKING_URI, else the SQLite file mlflow.db in the project `root`.

    A relative SQLite path counts from `root`, so that every stage sees the same store from any working directory.
    """
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if uri.startswith("sqlite:///"):
        relative = not Path(uri.removeprefix("sqlite:///")).is_absolute()
        if relative and {"?", "#"} & set(str(root.resolve())):
            raise PipelineError(
                f"An SQLite store cannot lie in {root.resolve()}: its URI would end at the special character.",
                "move the project to a path without ? and #, or set MLFLOW_TRACKING_URI to a server.",
            )
        return f"sqlite:///{root.resolve() / uri.removeprefix('sqlite:///')}"
    return uri


def check_store(uri: str, timeout_seconds: float) -> None:
    """Raise `PipelineError` within about `timeout_seconds` unless the store at `uri` answers.

    A fresh SQLite file is made into a store, by one process at a time. MLflow itself retries an unreachable store for
    minutes.
    """
    parsed = urlparse(uri)
    alone = contextlib.nullcontext()
    try:
        if parsed.scheme == "sqlite":
            alone = _checked_sqlite(Path(uri.removeprefix("sqlite:///")), timeout_seconds)
        elif parsed.scheme in ("http", "https"):
            _check_server(uri, timeout_seconds)
        elif parsed.hostname:
            port = parsed.port or DATABASE_PORTS.get(parsed.scheme.split("+")[0])
            if port is not None:
                socket.create_connection((parsed.hostname, port), timeout_seconds).close()
        with alone, errors_of(uri):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_registered_models(max_results=1)
            client.search_experiments(max_results=1)
    except (OSError, ValueError, sqlite3.Error, http.client.HTTPException) as error:
        reason = f"The MLflow store {_without_password(uri)} cannot be used: {error}."
        raise PipelineError(reason, STORE_REMEDY) from None


def is_gone(uri: str) -> bool:
    """Whether the SQLite file of `uri` is not there; `check_store` would put an empty store in its place."""
    return uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()


def limit_requests(timeout_seconds: float) -> None:
    """Let a server that stops answering cost seconds; MLflow's own retries would hold a stage up for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(math.ceil(timeout_seconds)))


def git_tags(root: Path) -> dict[str, str]:
    """The commit of the project at `root`, or nothing outside a git checkout."""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_commit": done.stdout.strip()}


@dataclass
class RunStore:
    """Runs of the store at `uri` (see `check_store` first).

    Every method raises `PipelineError` when the store refuses.
    """

    uri: str

    def __post_init__(self) -> None:
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def __str__(self) -> str:
        """The URI without its password."""
        return _without_password(self.uri)

    @contextlib.contextmanager
    def run(
        self, experiment_name: str, run_name: str, tags: dict[str, Any], past: tuple[float, float] | None = None
    ) -> Iterator[str]:
        """Yield the id of a new run that ends as the block does (see `ending`).

        `past`: when the work that is logged now began and was finished, in Unix seconds.
        """
        began, finished = past or (None, None)
        run_id = self.create_run(experiment_name, run_name, tags, began).info.run_id
        with ending(functools.partial(self.end_run, run_id, finished=finished)), errors_of(self.uri):
            yield run_id

    def create_run(self, experiment_name: str, run_name: str, tags: dict[str, Any], began: float | None = None) -> Run:
        """A new run, as RUNNING since `began` (Unix seconds, default now)."""
        with errors_of(self.uri):
            experiment_id = self._experiment_id(experiment_name)
            tags = tag_texts({**made_by(os.getpid()), **tags})
            return self.client.create_run(experiment_id, _milliseconds(began), tags, run_name)

    def experiment_of(self, run_id: str) -> str:
        """The name of the experiment that a run belongs to."""
        with errors_of(self.uri):
            return self.client.get_experiment(self.client.get_run(run_id).info.experiment_id).name

    def newest_run(self, experiment_name: str, tags: dict[str, str]) -> Run | None:
        """The run of an experiment that carries all `tags` and began last, or None."""
        with errors_of(self.uri):
            experiment = self.client.get_experiment_by_name(experiment_name)
            if experiment is None:
                return None
            carried = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
            order = ["attributes.start_time DESC"]
            found = self.client.search_runs([experiment.experiment_id], carried, max_results=1, order_by=order)
            return found[0] if found else None

    def reopen_run(self, run_id: str) -> Run | None:
        """The run `run_id`, as RUNNING again, or None when the store does not know it or it was deleted."""
        with errors_of(self.uri, absent_is_none=True):
            run = self.client.get_run(run_id)
            if run.info.lifecycle_stage == LifecycleStage.ACTIVE:
                self.client.update_run(run_id, status="RUNNING")
                return run
        return None

    def end_run(self, run_id: str, status: str, finished: float | None = None) -> None:
        """End a run as FINISHED, FAILED or KILLED; `finished`: when it was, in Unix seconds, if it is FINISHED."""
        with errors_of(self.uri):
            self.client.set_terminated(run_id, status, _milliseconds(finished if status == "FINISHED" else None))

    def set_tags(self, run_id: str, tags: dict[str, Any]) -> None:
        """Set `tags`, in place of their old values where there are any."""
        with errors_of(self.uri):
            self.client.log_batch(run_id, tags=[RunTag(key, text) for key, text in tag_texts(tags).items()])

    def log_params(self, run_id: str, values: dict[str, Any]) -> None:
        """Log nested `values` as flat params; a value over 500 characters is shortened and says so."""
        self._log_params(run_id, _param_texts(values))

    def log_params_again(self, run_id: str, values: dict[str, Any], logged: dict[str, str], prefix: str) -> None:
        """Log what `values` add to the params `logged` before, and what they change under the name `prefix` + key.

        MLflow refuses a new value for a param.
        """
        texts = _param_texts(values)
        new = {key: text for key, text in texts.items() if key not in logged}
        changed = {_key(f"{prefix}{key}"): text for key, text in texts.items() if logged.get(key, text) != text}
        self._log_params(run_id, {**new, **changed})

    def log_metrics(self, run_id: str, values: dict[str, float]) -> None:
        """Log single numbers at step 0."""
        now = int(time.time() * 1000)
        self.log_points(run_id, [(name, value, 0, now) for name, value in values.items()])

    def log_points(self, run_id: str, points: Iterable[tuple[str, float, int, int]]) -> None:
        """Log points of metrics: name, value, step and Unix milliseconds. Values that are not finite are left out."""
        metrics = [
            Metric(_key(name), value, timestamp, step)
            for name, value, step, timestamp in points
            if math.isfinite(value)
        ]
        with errors_of(self.uri):
            for batch in _batches(metrics, METRICS_PER_BATCH):
                self.client.log_batch(run_id, metrics=batch)

    def logged_points(self, run: Run) -> set[tuple[str, int]]:
        """Name and step of all points of `run`."""
        with errors_of(self.uri):
            curves = [self.client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
        return {(point.key, point.step) for curve in curves for point in curve}

    def log_text(self, run_id: str, name: str, text: str) -> None:
        """Store `text` as the file `name` among the run's artifacts."""
        with errors_of(self.uri):
            self.client.log_text(run_id, text, name)

    def log_files(self, run_id: str, files: dict[str, Path]) -> None:
        """Copy `files` (path among the run's artifacts -> file)."""
        with tempfile.TemporaryDirectory() as folder:
            for name, path in files.items():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
            self.client.log_artifacts(run_id, folder)

    def _log_params(self, run_id: str, texts: dict[str, str]) -> None:
        with errors_of(self.uri):
            for batch in _batches([Param(key, text) for key, text in texts.items()], PARAMS_PER_BATCH):
                self.client.log_batch(run_id, params=batch)

    def _experiment_id(self, name: str) -> str:
        """The experiment's id; a new one in SQLite keeps its artifacts in mlruns/ beside the file, not in the cwd."""
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        location = None
        if self.uri.startswith("sqlite:///"):
            location = (Path(self.uri.removeprefix("sqlite:///")).parent / "mlruns" / _key(name)).as_uri()
        try:
            return self.client.create_experiment(name, artifact_location=location)
        except MlflowException:
            if (experiment := self.client.get_experiment_by_name(name)) is None:
                raise
            return experiment.experiment_id  # another process was faster


def made_by(process_id: int) -> dict[str, str]:
    """The tag of runs that a process of this machine has opened."""
    return {"process": f"{socket.gethostname()} {process_id}"}


def child_of(run_id: str) -> dict[str, str]:
    """The tag that makes a run a child of the run `run_id`."""
    return {MLFLOW_PARENT_RUN_ID: run_id}


def is_child(run: Run) -> bool:
    return MLFLOW_PARENT_RUN_ID in run.data.tags


@contextlib.contextmanager
def _checked_sqlite(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Check that `path` can be written, and run the block while no other process is in here.

    MLflow makes its tables without such a lock, so that two first starts at once would break each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.closing(sqlite3.connect(path, timeout=timeout_seconds)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        yield


def _check_server(uri: str, timeout_seconds: float) -> None:
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_seconds).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
        error.close()  # it answers; a proxy that asks for credentials may refuse /health


@contextlib.contextmanager
def errors_of(uri: str, absent_is_none: bool = False) -> Iterator[None]:
    """Turn the exceptions of MLflow and of its requests for artifacts into `PipelineError`; with `absent_is_none`, swallow
    "there is no such thing"."""
    try:
        yield
    except MlflowException as error:
        absent = error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        if absent_is_none and absent:
            return
        line = (str(error).strip() or error.error_code).splitlines()[0]
        raise PipelineError(f"The MLflow store {_without_password(uri)} refused: {line}", STORE_REMEDY) from error
    except RequestException as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PipelineError(f"The MLflow store {_without_password(uri)} failed: {line}", STORE_REMEDY) from error


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(1000 * seconds)


def _without_password(uri: str) -> str:
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", uri)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists -> one level, keys joined by dots. An empty dict or list stays a value."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        return {_key(prefix): value}
    flat = {}
    for key, inner in items:
        flat.update(_flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _key(name: str) -> str:
    """`name` in the characters and the length that MLflow allows for keys."""
    clean = re.sub(r"[^\w\-. /]", "_", name)
    if len(clean) <= KEY_CHARACTERS:
        return clean
    return f"{clean[: KEY_CHARACTERS - 9]}.{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _param_texts(values: dict[str, Any]) -> dict[str, str]:
    return {key: _shorten(str(value), PARAM_CHARACTERS) for key, value in _flatten(values).items()}


def tag_texts(tags: dict[str, Any]) -> dict[str, str]:
    return {_key(key): _shorten(str(value), TAG_CHARACTERS) for key, value in tags.items()}


def _shorten(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    note = f"... ({len(text)} characters, whole in the run's files)"
    return text[: characters - len(note)] + note


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
