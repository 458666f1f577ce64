"""Stage register: log the pipeline's run in MLflow and register a draft that passed its gate.

Reads:  data/draft/, data/eval/{metrics,summary}.json, data/gate/verdict.json, data/distill/history.csv; for the log
        data/*/config.yaml, data/provenance/, prompts, answers and dvc.lock, as far as they are there
Writes: a tree of MLflow runs (pipeline.adapters.mlflow_tree), a model version under the alias of conf/registry/,
        data/registry/receipt.json (schema "domain-draft/receipt")
Does:   logs configs, figures and curves of all stages. If the gate passed, registers the draft as a self-contained
        version. The same weights are one version: measured anew, they carry the newer evidence, whether it passed the
        gate or not; the older stays in its run.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from pipeline import stage
from pipeline.adapters.mlflow_tracking import TrackingConfig
from pipeline.core.artifacts import fingerprint_files, fingerprint_weights, read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.model_card import Evidence, headline_tags, identity_tags, model_card
from pipeline.core.promotion import CHAMPION, PREVIOUS, gate_failure
from pipeline.stage import execute, input_path, output_path, read_provenance

if TYPE_CHECKING:  # importing mlflow takes seconds
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_tree import FinishedStage

RECEIPT = "data/registry/receipt.json"
CONFIG_FOLDERS = {"prepare": "prompts", "generate": "answers", "distill": "draft", "evaluate": "eval"}


@dataclass
class RegistryConfig(TrackingConfig):
    model_name: str  # of the registered model
    alias: str  # set on the registered version

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.alias) or self.alias == "latest" or re.fullmatch(r"[vV]\d+", self.alias):
            raise ValueError(f"registry.alias {self.alias!r} must be letters, digits, _ and -, not 'latest' or 'v1'")
        if self.alias in (CHAMPION, PREVIOUS):
            raise ValueError(f"registry.alias {self.alias!r} is set by a promotion, choose another")
        if not self.model_name.strip() or set("/:'\"") & set(self.model_name):
            raise ValueError(
                f"registry.model_name {self.model_name!r} must not be empty nor hold / : or a quotation mark"
            )


@dataclass
class Config:
    registry: RegistryConfig


def run(config: Config) -> None:
    """Log the run, register the draft if its gate passed, and write the receipt.

    Raises `PipelineError` when the store cannot be used, when an old receipt names a version that it lacks, or when
    draft and metrics belong to different targets.
    """
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_store import check_store, resolve_tracking_uri

    registry = config.registry
    uri = resolve_tracking_uri(registry.tracking_uri, stage.PROJECT_ROOT)
    check_store(uri, registry.timeout_seconds)
    store = MlflowStore(uri)
    check_receipt(store)
    evidence = _read_evidence()
    passed = evidence.verdict["passed"]
    run_id, version = _log_and_register(store, config, evidence)
    if passed:
        reason = "the gate passed"
        print(f"registered {registry.model_name} version {version} as @{registry.alias} in {store}")
    else:
        reason = gate_failure(evidence.verdict)
        print(f"not registered: {reason}. The run {run_id} is logged in {store}")
        if version is not None:
            print(f"{registry.model_name} version {version} holds these weights and carries the new verdict")
    receipt = {
        "registered": passed,
        "reason": reason,
        "model_name": registry.model_name,
        "version": version if passed else None,
        "alias": registry.alias if passed else None,
        "run_id": run_id,
        "tracking_uri": uri,
        "fingerprint": evidence.draft["fingerprint"],
    }
    write_json(output_path(RECEIPT), "domain-draft/receipt", 1, receipt)


def _read_evidence() -> Evidence:
    evidence = Evidence(
        draft=read_json(input_path("data/draft/draft.json"), "domain-draft/draft", 1),
        metrics=read_json(input_path("data/eval/metrics.json"), "domain-draft/metrics", 1),
        summary=read_json(input_path("data/eval/summary.json"), "domain-draft/summary", 1),
        verdict=read_json(input_path("data/gate/verdict.json"), "domain-draft/verdict", 1),
    )
    if not input_path("data/distill/history.csv").is_file():
        raise PipelineError("data/distill/history.csv does not exist.", "run `dvc repro distill`.")
    if evidence.draft["compatibility_key"] != evidence.metrics["compatibility_key"]:
        raise PipelineError(
            "data/draft and data/eval/metrics.json belong to different targets (their compatibility keys differ).",
            "evaluate this draft: `dvc repro`.",
        )
    if evidence.draft["fingerprint"] != evidence.metrics["draft_fingerprint"]:
        raise PipelineError(
            "data/eval/metrics.json was measured with another draft than data/draft (their fingerprints differ).",
            "evaluate this draft: `dvc repro`.",
        )
    if evidence.draft["fingerprint"] != fingerprint_weights(input_path("data/draft")):
        raise PipelineError(
            "The weights in data/draft are not those that its draft.json names.",
            "distil it again: `dvc repro distill`.",
        )
    if evidence.verdict.get("metrics_fingerprint") != fingerprint_files([input_path("data/eval/metrics.json")]):
        raise PipelineError(
            "data/gate/verdict.json is about another evaluation than data/eval/metrics.json.", "run `dvc repro gate`."
        )
    return evidence


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


def _log_and_register(store: MlflowStore, config: Config, evidence: Evidence) -> tuple[str, str | None]:
    """The pipeline's run, complete, and the version of the draft, if there is one."""
    from pipeline.adapters.mlflow_store import child_of, git_tags
    from pipeline.adapters.mlflow_tree import LIVE, join_live, log_finished

    registry, tags = config.registry, identity_tags(evidence)
    experiment = registry.experiment_name
    stages = {found.name: found for found in _finished_stages(evidence)}
    commit = git_tags(stage.PROJECT_ROOT)
    with store.run(experiment, registry.model_name, {**tags, **_data_tags(), **commit}) as run_id:
        _log_whole(store, run_id, config, evidence, list(stages.values()))
        for name, found in stages.items():
            if name != LIVE:
                log_finished(store, experiment, run_id, found)
        with store.run(experiment, "register", {**child_of(run_id), "stage": "register", **commit}) as child:
            store.log_text(child, "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
            store.log_params(child, asdict(config))
            version = _register(store, run_id, registry, evidence, tags)
        if LIVE in stages:
            join_live(store, experiment, run_id, stages[LIVE], evidence.draft["fingerprint"])
    return run_id, version


def _register(
    store: MlflowStore, run_id: str, registry: RegistryConfig, evidence: Evidence, tags: dict[str, Any]
) -> str | None:
    """The version of these weights, new or known, with this evidence; None when they failed their first gate."""
    name = registry.model_name
    files = [input_path("data/eval/metrics.json"), input_path("data/gate/verdict.json")]
    tags = {**tags, **headline_tags(evidence), "evidence": fingerprint_files(files), "evidence_run": run_id}
    version = store.find_version(name, {"fingerprint": tags["fingerprint"]})
    if version is None and not evidence.verdict["passed"]:
        return None
    card = model_card(name, evidence)
    model = {"draft": input_path("data/draft"), "files": files, "card": card, "dtype": evidence.draft["dtype"]}
    if version is None:
        version = store.register_version(run_id=run_id, model_name=name, tags=tags, **model)
    else:
        store.complete_version(name, version, **model)
        if store.version_tags(name, version).get("evidence") != tags["evidence"]:
            store.replace_evidence(name, version, files, card, tags)
    if evidence.verdict["passed"]:
        store.set_alias(name, registry.alias, version)
    return version


def _log_whole(
    store: MlflowStore, run_id: str, config: Config, evidence: Evidence, stages: list[FinishedStage]
) -> None:
    """What all stages ran with and came to, in the parent run."""
    names = ("eval/metrics.json", "eval/summary.json", "gate/verdict.json", "distill/history.csv", "draft/draft.json")
    files = {Path(name).name: input_path(f"data/{name}") for name in names}
    if input_path("dvc.lock").exists():
        files["dvc.lock"] = input_path("dvc.lock")
    store.log_files(run_id, files)
    for found in stages:
        store.log_text(run_id, f"config/{found.name}.yaml", found.config)
    store.log_text(run_id, "README.md", model_card(config.registry.model_name, evidence))
    store.log_params(run_id, {**{found.name: found.params for found in stages}, "register": asdict(config)})
    store.log_metrics(run_id, evidence.numbers)


def _finished_stages(evidence: Evidence) -> list[FinishedStage]:
    """The stages before this one, in their order, as far as their configuration is there."""
    from pipeline.adapters.mlflow_tree import FinishedStage

    files = {name: input_path(f"data/{folder}/config.yaml") for name, folder in CONFIG_FOLDERS.items()}
    configs = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    configs["gate"] = OmegaConf.to_yaml(OmegaConf.create(evidence.verdict["config"]))
    more = {
        "distill": {"history": input_path("data/distill/history.csv")},
        "evaluate": {"figures": evidence.numbers},
        "gate": {"tags": {"gate": evidence.verdict["gate"], "verdict": evidence.outcome}},
    }
    return [FinishedStage(name, text, read_provenance(name), **more.get(name, {})) for name, text in configs.items()]


def _data_tags() -> dict[str, str]:
    """Fingerprints of the prompts, the answers and dvc.lock (as it was when this stage began), where they are there."""
    files = {
        "fingerprint.prompts": sorted(input_path("data/prompts").glob("*.parquet")),
        "fingerprint.answers": sorted(input_path("data/answers").glob("*/*.parquet")),
        "dvc_lock": [path for path in (input_path("dvc.lock"),) if path.exists()],
    }
    return {name: fingerprint_files(paths) for name, paths in files.items() if paths}


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
