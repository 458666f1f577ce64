"""MLflow's registry: self-contained model versions under aliases.

A version is an MLflow model of the `transformers` flavor. Its folder `model/` is the draft's folder byte for byte, with
metrics, verdict and card beside the weights, so that plain `from_pretrained` loads it too. Metrics, verdict and card are the
version's evidence: it is replaced when the same weights are measured anew, and the tag `evidence` says which it is.

Aliases are read by alias: what a search returns carries none (mlflow/mlflow #16734).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlflow.artifacts
import mlflow.pyfunc
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, Schema
from transformers import AutoTokenizer

from pipeline.adapters.mlflow_store import RunStore, errors_of, tag_texts
from pipeline.core.errors import PipelineError

MODEL_ARTIFACT = "draft"  # folder of the model in the run's artifacts
EVIDENCE_TAG = "evidence"  # fingerprint of the version's metrics.json and verdict.json


class MlflowStore(RunStore):
    """Runs and model versions of a store."""

    def find_version(self, model_name: str, tags: dict[str, str]) -> str | None:
        """The newest version of `model_name` that carries all `tags`, or None."""
        found = self.versions(model_name)
        return next((str(item.version) for item in found if tags.items() <= item.tags.items()), None)

    def versions(self, model_name: str) -> list[ModelVersion]:
        """All versions of `model_name`, the newest first, without their aliases."""
        with errors_of(self.uri):
            return self.client.search_model_versions(f"name = '{model_name}'", order_by=["version_number DESC"])

    def version_tags(self, model_name: str, version: str) -> dict[str, str] | None:
        """The tags of a version, or None when the store has no such version."""
        with errors_of(self.uri, absent_is_none=True):
            return self.client.get_model_version(model_name, version).tags
        return None

    def version_fingerprint(self, model_name: str, version: str) -> str | None:
        """The tag `fingerprint` of a version, or None when the store has no such version."""
        return (self.version_tags(model_name, version) or {}).get("fingerprint")

    def model_tags(self, model_name: str) -> dict[str, str]:
        """The tags of the registered model; empty when there is no such model."""
        with errors_of(self.uri, absent_is_none=True):
            return self.client.get_registered_model(model_name).tags
        return {}

    def aliases(self, model_name: str) -> dict[str, str]:
        """alias -> version, as the registered model has them; empty when there is no such model."""
        with errors_of(self.uri, absent_is_none=True):
            found = self.client.get_registered_model(model_name).aliases
            return {alias: str(version) for alias, version in found.items()}
        return {}

    def version_by_alias(self, model_name: str, alias: str) -> str | None:
        """The version that `alias` names, or None when there is none yet."""
        with errors_of(self.uri, absent_is_none=True):
            return str(self.client.get_model_version_by_alias(model_name, alias).version)
        return None

    def set_alias(self, model_name: str, alias: str, version: str) -> None:
        """Let `alias` name `version`."""
        with errors_of(self.uri):
            self.client.set_registered_model_alias(model_name, alias, version)

    def register_version(
        self, run_id: str, model_name: str, draft: Path, files: list[Path], card: str, dtype: str, tags: dict[str, Any]
    ) -> str:
        """Store the folder `draft` in the run as a self-contained MLflow model and register it; return the version.

        `files` and `card` (a Markdown text with a YAML head, stored as README.md) are put beside the weights. `dtype`
        is the dtype to load with. `tags` must hold the draft's `fingerprint`, and the `evidence` if `files` are that.
        """
        self._log_model(run_id, draft, files, card, dtype)
        with errors_of(self.uri):
            source = f"{self.client.get_run(run_id).info.artifact_uri}/{MODEL_ARTIFACT}"
            with contextlib.suppress(MlflowException):  # it exists: an error that matters recurs in the next call
                self.client.create_registered_model(model_name)
            return str(self.client.create_model_version(model_name, source, run_id, tags=tag_texts(tags)).version)

    def complete_version(
        self, model_name: str, version: str, draft: Path, files: list[Path], card: str, dtype: str
    ) -> None:
        """Store the model of a version again, as `register_version` did, where files of `draft` have gone from the store."""
        with errors_of(self.uri):
            run_id = self.client.get_model_version(model_name, version).run_id
            places = ("", "/components/tokenizer", "/model")
            listed = [item for place in places for item in self.client.list_artifacts(run_id, MODEL_ARTIFACT + place)]
        stored = {item.path: item.file_size for item in listed}
        sizes = {path.name: path.stat().st_size for path in draft.iterdir() if path.is_file()}
        weights = {f"{MODEL_ARTIFACT}/model/{name}": size for name, size in sizes.items()}
        tokenizer = [
            f"components/tokenizer/{name}" for name in sizes.keys() & {"tokenizer.json", "tokenizer_config.json"}
        ]
        evidence = [f"model/{name}" for name in ("README.md", *(file.name for file in files))]
        needed = {f"{MODEL_ARTIFACT}/{name}" for name in ("MLmodel", *tokenizer, *evidence)}
        if not weights.items() <= stored.items() or not needed <= stored.keys():
            self._log_model(run_id, draft, files, card, dtype)

    def _log_model(self, run_id: str, draft: Path, files: list[Path], card: str, dtype: str) -> None:
        with errors_of(self.uri), tempfile.TemporaryDirectory() as folder:
            model = Path(folder, MODEL_ARTIFACT)
            _save_model(model, draft, files, card, dtype)
            self.client.log_artifacts(run_id, str(model), MODEL_ARTIFACT)

    def replace_evidence(
        self, model_name: str, version: str, files: list[Path], card: str, tags: dict[str, Any]
    ) -> None:
        """Put newer `files` and `card` beside the weights of a version, and `tags` (`evidence` among them) on it.

        Until all is there, the tag `evidence` fits none, so that what a kill leaves is not taken for evidence.
        """
        with errors_of(self.uri), tempfile.TemporaryDirectory() as folder:
            _write_evidence(Path(folder), files, card)
            self.client.set_model_version_tag(model_name, version, EVIDENCE_TAG, "being replaced")
            run_id = self.client.get_model_version(model_name, version).run_id
            self.client.log_artifacts(run_id, folder, f"{MODEL_ARTIFACT}/model")
            for name, text in sorted(tag_texts(tags).items(), key=lambda tag: tag[0] == EVIDENCE_TAG):
                self.client.set_model_version_tag(model_name, version, name, text)

    def download(self, model_name: str, version: str, path: str, destination: Path) -> Path:
        """Copy the file or folder `path` of a version into the folder `destination`; return where it lies there."""
        with errors_of(self.uri):
            source = self.client.get_model_version_download_uri(model_name, version)
        try:
            found = mlflow.artifacts.download_artifacts(
                f"{source}/{path}", dst_path=str(destination), tracking_uri=self.uri, registry_uri=self.uri
            )
        except Exception as error:  # whatever the client of the artifact store raises
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PipelineError(
                f"{path} of {model_name} version {version} cannot be downloaded: {line}",
                "check that this machine can read the artifacts of the MLflow store, or choose another version.",
            ) from error
        return Path(found)


def _save_model(path: Path, draft: Path, files: list[Path], card: str, dtype: str) -> None:
    """Write the MLflow model (flavors `transformers` and `pyfunc`) in MLflow's own layout.

    `mlflow.transformers.save_model` is of no use here: given a folder it fails with transformers 5.24, asks the hub for
    a card and a licence of that folder, and records the folder's path; given a loaded model it writes the weights anew.
    """
    shutil.copytree(draft, path / "model")
    _write_evidence(path / "model", files, card)
    AutoTokenizer.from_pretrained(draft.resolve()).save_pretrained(path / "components" / "tokenizer")
    packages = ("mlflow", "torch", "transformers")
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in packages}
    (path / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    model = Model(signature=ModelSignature(Schema([ColSpec("string")]), Schema([ColSpec("string")])))
    model.add_flavor(
        "transformers",
        transformers_version=versions["transformers"],
        task="text-generation",
        instance_type="TextGenerationPipeline",
        torch_dtype=dtype,
        pipeline_model_type="AutoModelForCausalLM",
        model_binary="model",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )
    mlflow.pyfunc.add_to_model(model, loader_module="mlflow.transformers")
    model.save(path / "MLmodel")


def _write_evidence(folder: Path, files: list[Path], card: str) -> None:
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "README.md").write_text(card, encoding="utf-8")
