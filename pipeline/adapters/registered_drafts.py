"""A registered version as the start of another draft: found by its MLflow model URI, and copied once into .cache/."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from pipeline.core.artifacts import atomic_path, read_json
from pipeline.core.errors import PipelineError
from pipeline.core.models import load_config

if TYPE_CHECKING:  # importing mlflow takes seconds
    from pipeline.adapters.mlflow_registry import MlflowStore

_MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[\w-]+)|/(?P<version>\d+))")


@dataclass
class RegisteredDraft:
    """A version in the registry, with its `draft.json` and its model config read."""

    store: MlflowStore
    name: str
    version: str
    facts: dict[str, Any]
    config: PreTrainedConfig

    @property
    def uri(self) -> str:
        """Names this version whatever the aliases say later."""
        return f"models:/{self.name}/{self.version}"

    def folder(self, project_root: Path) -> Path:
        """The draft's folder, downloaded to `.cache/models/` unless these weights are there."""
        folder = project_root / ".cache" / "models" / f"draft-{self.facts['fingerprint']}"
        if not folder.is_dir():
            with tempfile.TemporaryDirectory() as temporary, atomic_path(folder) as whole:
                shutil.move(self.store.download(self.name, self.version, "model", Path(temporary)), whole)
        return folder


def find_registered(
    model_uri: str | None, tracking_uri: str | None, timeout_seconds: float, root: Path
) -> RegisteredDraft:
    """The version that `model_uri` (models:/NAME@ALIAS or models:/NAME/VERSION) names; no weights are downloaded.

    Raises `PipelineError` when the URI or the store is of no use, when there is no such version, or when this pipeline
    did not register it.
    """
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_store import check_store, resolve_tracking_uri

    parsed = _MODEL_URI.fullmatch(model_uri or "")
    if not parsed:
        raise PipelineError(
            f"draft.id={model_uri!r} names no registered draft, which draft.init=champion starts from.",
            "give models:/NAME@champion or models:/NAME/VERSION, or choose another draft.init.",
        )
    uri = resolve_tracking_uri(tracking_uri, root)
    check_store(uri, timeout_seconds)
    store = MlflowStore(uri)
    name, alias, version = parsed.group("name", "alias", "version")
    version = store.version_by_alias(name, alias) if alias else version
    if version is None or store.version_fingerprint(name, version) is None:
        raise PipelineError(
            f"There is no {model_uri} in the MLflow store to start the draft from.",
            "distil a first draft with another draft.init (conf/draft/), register and promote it, or let"
            " MLFLOW_TRACKING_URI name the store that has one.",
        )
    with tempfile.TemporaryDirectory() as folder:
        for file in ("draft.json", "config.json"):
            store.download(name, version, f"model/{file}", Path(folder))
        facts = read_json(Path(folder, "draft.json"), "domain-draft/draft", 1)
        return RegisteredDraft(store, name, version, facts, load_config(folder))
