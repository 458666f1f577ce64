"""The MLflow store: how it is found and checked, and runs in it."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import http.client
import logging
import math
import os
import re
import socket
import sqlite3
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
from mlflow.entities import Metric, Param, RunStatus
from mlflow.exceptions import MlflowException

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

    A fresh SQLite file is made into a store. MLflow itself retries an unreachable store for minutes.
    """
    parsed = urlparse(uri)
    try:
        if parsed.scheme == "sqlite":
            _check_sqlite(Path(uri.removeprefix("sqlite:///")), timeout_seconds)
        elif parsed.scheme in ("http", "https"):
            _check_server(uri, timeout_seconds)
        elif parsed.hostname:
            port = parsed.port or DATABASE_PORTS.get(parsed.scheme.split("+")[0])
            if port is not None:
                socket.create_connection((parsed.hostname, port), timeout_seconds).close()
        with errors_of(uri):
            MlflowClient(tracking_uri=uri, registry_uri=uri).search_registered_models(max_results=1)
    except (OSError, ValueError, sqlite3.Error, http.client.HTTPException) as error:
        reason = f"The MLflow store {_without_password(uri)} cannot be used: {error}."
        raise PipelineError(reason, STORE_REMEDY) from None


@dataclass
class RunStore:
    """Runs of the store at `uri` (see `check_store` first).

    Every method raises `PipelineError` when the store refuses.
    """

    uri: str

    def __post_init__(self) -> None:
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @contextlib.contextmanager
    def run(self, experiment_name: str, run_name: str, tags: dict[str, Any]) -> Iterator[str]:
        """Yield the id of a new run. It ends as FINISHED, or as FAILED when the block raises."""
        with errors_of(self.uri):
            run = self.client.create_run(self._experiment_id(experiment_name), run_name=run_name, tags=tag_texts(tags))
        run_id = run.info.run_id
        try:
            with errors_of(self.uri):
                yield run_id
        except BaseException:
            self.client.set_terminated(run_id, RunStatus.to_string(RunStatus.FAILED))
            raise
        self.client.set_terminated(run_id, RunStatus.to_string(RunStatus.FINISHED))

    def log_params(self, run_id: str, values: dict[str, Any]) -> None:
        """Log nested `values` as flat params; a value over 500 characters is shortened and says so."""
        params = [Param(key, _shorten(str(value), PARAM_CHARACTERS)) for key, value in _flatten(values).items()]
        for batch in _batches(params, PARAMS_PER_BATCH):
            self.client.log_batch(run_id, params=batch)

    def log_metrics(self, run_id: str, values: dict[str, float]) -> None:
        """Log single numbers at step 0."""
        self._log_metrics(run_id, ((name, value, 0) for name, value in values.items()))

    def log_curves(self, run_id: str, prefix: str, history: Path) -> None:
        """Log each column of the CSV file `history` as the metric `<prefix>/<column>` over its column `step`.

        Empty cells are left out.
        """
        with history.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        points = (
            (f"{prefix}/{column}", float(cell), int(row["step"]))
            for row in rows
            for column, cell in row.items()
            if column != "step" and cell
        )
        self._log_metrics(run_id, points)

    def log_files(self, run_id: str, files: dict[str, Path]) -> None:
        """Copy `files` (path among the run's artifacts -> file)."""
        with tempfile.TemporaryDirectory() as folder:
            for name, path in files.items():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
            self.client.log_artifacts(run_id, folder)

    def _log_metrics(self, run_id: str, points: Iterable[tuple[str, float, int]]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_key(name), value, now, step) for name, value, step in points if math.isfinite(value)]
        for batch in _batches(metrics, METRICS_PER_BATCH):
            self.client.log_batch(run_id, metrics=batch)

    def _experiment_id(self, name: str) -> str:
        """The experiment's id; a new one in SQLite keeps its artifacts in mlruns/ beside the file, not in the cwd."""
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        location = None
        if self.uri.startswith("sqlite:///"):
            location = (Path(self.uri.removeprefix("sqlite:///")).parent / "mlruns" / _key(name)).as_uri()
        return self.client.create_experiment(name, artifact_location=location)


def _check_sqlite(path: Path, timeout_seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, timeout=timeout_seconds)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _check_server(uri: str, timeout_seconds: float) -> None:
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_seconds).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
        error.close()  # it answers; a proxy that asks for credentials may refuse /health


@contextlib.contextmanager
def errors_of(uri: str, absent_is_none: bool = False) -> Iterator[None]:
    """Turn MLflow's exceptions into `PipelineError`; with `absent_is_none`, swallow "there is no such thing"."""
    try:
        yield
    except MlflowException as error:
        absent = error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        if absent_is_none and absent:
            return
        line = (str(error).strip() or error.error_code).splitlines()[0]
        raise PipelineError(f"The MLflow store {_without_password(uri)} refused: {line}", STORE_REMEDY) from error


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
