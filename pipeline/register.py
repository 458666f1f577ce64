"""Stage register: log the pipeline's run in MLflow and register a draft that passed its gate.

Reads:  data/draft/, data/eval/{metrics,summary}.json, data/gate/verdict.json, data/distill/history.csv,
        data/*/config.yaml
Writes: an MLflow run, a model version under the alias of conf/registry/, data/registry/receipt.json
        (schema "domain-draft/receipt")
Does:   logs configs, metrics and training curves in one run. If the gate passed, registers the draft as a
        self-contained version; the same weights are one version, however often they are registered.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from pipeline import stage
from pipeline.adapters.mlflow_tracking import TrackingConfig
from pipeline.core.artifacts import fingerprint_files, read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.gating import verdict_lines
from pipeline.stage import execute, input_path, output_path

RECEIPT = "data/registry/receipt.json"


@dataclass
class RegistryConfig(TrackingConfig):
    model_name: str  # of the registered model
    alias: str  # set on the registered version

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.alias) or self.alias == "latest" or re.fullmatch(r"[vV]\d+", self.alias):
            raise ValueError(f"registry.alias {self.alias!r} must be letters, digits, _ and -, not 'latest' or 'v1'")
        if not self.model_name.strip() or {"/", ":"} & set(self.model_name):
            raise ValueError(f"registry.model_name {self.model_name!r} must not be empty nor hold / or :")


@dataclass
class Config:
    registry: RegistryConfig


@dataclass
class Inputs:
    """What the earlier stages left, as documents."""

    draft: dict[str, Any]
    metrics: dict[str, Any]
    summary: dict[str, Any]
    verdict: dict[str, Any]


def run(config: Config) -> None:
    """Log the run, register the draft if its gate passed, and write the receipt.

    Raises `PipelineError` when the store cannot be used, when an old receipt names a version that it lacks, or when
    draft and metrics belong to different targets.
    """
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_store import check_store, git_tags, resolve_tracking_uri

    registry = config.registry
    uri = resolve_tracking_uri(registry.tracking_uri, stage.PROJECT_ROOT)
    check_store(uri, registry.timeout_seconds)
    store = MlflowStore(uri)
    check_receipt(store)
    inputs = _read_inputs()
    passed = inputs.verdict["passed"]
    tags = _tags(inputs)
    run_tags = {**tags, **git_tags(stage.PROJECT_ROOT)}
    with store.run(registry.experiment_name, registry.model_name, run_tags) as run_id:
        _log_run(store, run_id, config, inputs)
        version = _register(store, run_id, registry, inputs, tags) if passed else None
    if passed:
        reason = "the gate passed"
        print(f"registered {registry.model_name} version {version} as @{registry.alias} in {uri}")
    else:
        missed = [item for item in inputs.verdict["checks"] if not item["passed"]]
        failed = [item["metric"] for item in missed if item["severity"] == "fail"]
        reason = f"the gate {inputs.verdict['gate']!r} failed: {', '.join(failed)}"
        print(f"not registered: {reason}. The run {run_id} is logged in {uri}")
    receipt = {
        "registered": passed,
        "reason": reason,
        "model_name": registry.model_name,
        "version": version,
        "alias": registry.alias if passed else None,
        "run_id": run_id,
        "tracking_uri": uri,
        "fingerprint": inputs.draft["fingerprint"],
    }
    write_json(output_path(RECEIPT), "domain-draft/receipt", 1, receipt)


def _read_inputs() -> Inputs:
    inputs = Inputs(
        draft=read_json(input_path("data/draft/draft.json"), "domain-draft/draft", 1),
        metrics=read_json(input_path("data/eval/metrics.json"), "domain-draft/metrics", 1),
        summary=read_json(input_path("data/eval/summary.json"), "domain-draft/summary", 1),
        verdict=read_json(input_path("data/gate/verdict.json"), "domain-draft/verdict", 1),
    )
    if not input_path("data/distill/history.csv").is_file():
        raise PipelineError("data/distill/history.csv does not exist.", "run `dvc repro distill`.")
    if inputs.draft["compatibility_key"] != inputs.metrics["compatibility_key"]:
        raise PipelineError(
            "data/draft and data/eval/metrics.json belong to different targets (their compatibility keys differ).",
            "evaluate this draft: `dvc repro`.",
        )
    if inputs.draft["fingerprint"] != inputs.metrics["draft_fingerprint"]:
        raise PipelineError(
            "data/eval/metrics.json was measured with another draft than data/draft (their fingerprints differ).",
            "evaluate this draft: `dvc repro`.",
        )
    return inputs


def check_receipt(store: Any) -> None:
    """Refuse to go on when the last receipt's version is not in this store: nothing would tell the two apart later."""
    path = output_path(RECEIPT)
    if not path.exists():
        return
    receipt = read_json(path, "domain-draft/receipt", 1)
    if not receipt["registered"]:
        return
    if store.version_fingerprint(receipt["model_name"], receipt["version"]) != receipt["fingerprint"]:
        raise PipelineError(
            f"{RECEIPT} names {receipt['model_name']} version {receipt['version']} with the weights "
            f"{receipt['fingerprint']}, which the MLflow store {store.uri} lacks (it was registered in "
            f"{receipt['tracking_uri']}).",
            f"point MLFLOW_TRACKING_URI at the store that has it, or delete {RECEIPT} and run again.",
        )


def _register(store: Any, run_id: str, registry: RegistryConfig, inputs: Inputs, tags: dict[str, Any]) -> str:
    """The version of these weights with this evidence, new or known, with the alias set on it."""
    files = [input_path("data/eval/metrics.json"), input_path("data/gate/verdict.json")]
    tags = {**tags, "evidence": fingerprint_files(files)}
    version = store.find_version(registry.model_name, {name: tags[name] for name in ("fingerprint", "evidence")})
    if version is None:
        version = store.register_version(
            run_id=run_id,
            model_name=registry.model_name,
            draft=input_path("data/draft"),
            files=files,
            card=_card(registry.model_name, inputs),
            dtype=inputs.draft["dtype"],
            tags=tags,
        )
    store.set_alias(registry.model_name, registry.alias, version)
    return version


def _log_run(store: Any, run_id: str, config: Config, inputs: Inputs) -> None:
    configs = {path.parent.name: path for path in sorted(input_path("data").glob("*/config.yaml"))}
    names = ("eval/metrics.json", "eval/summary.json", "gate/verdict.json", "distill/history.csv", "draft/draft.json")
    files = {Path(name).name: input_path(f"data/{name}") for name in names}
    store.log_files(run_id, {**{f"config/{name}.yaml": path for name, path in configs.items()}, **files})
    params = {name: OmegaConf.to_container(OmegaConf.load(path)) for name, path in configs.items()}
    store.log_params(run_id, {**params, "gate": inputs.verdict["config"], "register": asdict(config)})
    numbers = {name: value for name, value in _figures(inputs).items() if isinstance(value, int | float)}
    store.log_metrics(run_id, numbers)
    store.log_curves(run_id, "distill", input_path("data/distill/history.csv"))


def _figures(inputs: Inputs) -> dict[str, Any]:
    """The summary without its schema."""
    return {name: value for name, value in inputs.summary.items() if name not in ("schema", "schema_version")}


def _tags(inputs: Inputs) -> dict[str, Any]:
    key = {f"compatibility.{name}": value for name, value in inputs.draft["compatibility_key"].items()}
    return {
        **key,
        "fingerprint": inputs.draft["fingerprint"],
        "target": inputs.metrics["target"]["id"],
        "target_revision": inputs.metrics["target"]["revision"] or "",
        "domain": inputs.metrics["domain"],
        "draft_length": inputs.metrics["settings"]["draft_length"],
        "gate": inputs.verdict["gate"],
        "verdict": "passed" if inputs.verdict["passed"] else "failed",
    }


def _card(model_name: str, inputs: Inputs) -> str:
    """The model card: what the draft is for, what was measured, how to load it."""
    target, settings = inputs.metrics["target"], inputs.metrics["settings"]
    rows = "\n".join(f"| {name} | {value} |" for name, value in _figures(inputs).items())
    key = "\n".join(f"- {name}: {value}" for name, value in inputs.draft["compatibility_key"].items())
    verdict = "\n".join(f"- {line}" for line in verdict_lines(inputs.verdict))
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft-model]
---
# {model_name}

A draft model for speculative decoding in the domain {inputs.metrics["domain"]!r}. It is valid for one target only,
{target["id"]} (revision {target["revision"] or "as installed"}):

{key}

Load it with `AutoModelForCausalLM.from_pretrained` on this folder ({inputs.draft["dtype"]}).
`head_token_ids.json` lists the token ids of its trimmed head. The licences of the target and of the prompts apply.

## Measured at draft length {settings["draft_length"]}, temperature {settings["temperature"]}

| metric | value |
| --- | --- |
{rows}

## Gate {inputs.verdict["gate"]!r}

{verdict}

Definitions and intervals: `metrics.json`, `verdict.json`.
"""


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
