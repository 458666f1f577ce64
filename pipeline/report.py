"""report: one page for all that was measured, and the end of the pipeline.

Reads:  data/prompts/stats.json, data/draft/draft.json, data/distill/history.csv, data/eval/metrics.json,
        data/gate/verdict.json, data/registry/receipt.json, data/provenance/ as far as it is there.
Writes: data/report/index.html (self-contained), data/report/roi.json (what the draft saves on the sheet of conf/roi),
        data/report/plots/*.csv (what its charts draw, for `dvc plots`).
Does:   renders, then enforces the gate: with gate.enforce=true a failed verdict ends the stage with exit code 1. A report
        that ends well joins the MLflow run of the pipeline; a store that does not answer costs a line.
"""

from __future__ import annotations

import csv
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from pipeline.adapters.report_page import render
from pipeline.core.artifacts import atomic_path, read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.report_page import Documents, plot_tables
from pipeline.core.roi import RoiConfig, roi
from pipeline.gate import GateConfig
from pipeline.stage import STORE_TIMEOUT_SECONDS, execute, input_path, output_path, read_provenance

STAGES = ("prepare", "generate", "distill", "evaluate", "gate", "register")
PLOT_COLUMNS = {
    "training": ("step", "tokens", "dev_token_acceptance"),
    "token_acceptance": ("domain", "token_acceptance", "lower", "upper"),
    "acceptance_by_domain": ("candidate", "domain", "metric", "value", "lower", "upper"),
    "acceptance_by_position": ("candidate", "position", "value", "lower", "upper"),
    "speedup": ("candidate", "domain", "speedup", "lower", "upper", "predicted_measured_cost"),
    "draft_lengths": ("draft_length", "predicted_speedup", "speedup"),
    "verify_cost": ("tokens", "seconds", "ratio"),
}


@dataclass
class Config:
    gate: GateConfig
    roi: RoiConfig


def run(config: Config) -> None:
    """Write the report.

    Raises `PipelineError` when an artifact is missing and, after the report exists, when an enforced gate failed.
    """
    began = time.time()
    documents = _read_documents(config.roi)
    plots = plot_tables(documents)
    with atomic_path(output_path("data/report")) as folder:
        (folder / "plots").mkdir(parents=True)
        for name, columns in PLOT_COLUMNS.items():
            _write_rows(folder / "plots" / f"{name}.csv", columns, plots[name])
        write_json(folder / "roi.json", "domain-draft/roi", 1, documents.roi)
        (folder / "index.html").write_text(render(documents, plots), encoding="utf-8")
    print(f"report {output_path('data/report/index.html')}")
    failed = [item for item in documents.verdict["checks"] if not item["passed"] and item["severity"] == "fail"]
    if config.gate.enforce and failed:
        names = ", ".join(f"{item['metric']} ({item['domain']})" for item in failed)
        remedy = "see the remedy of each check in data/report/index.html."
        raise PipelineError(f"The gate {documents.verdict['gate']!r} failed: {names}.", remedy)
    _log(config, documents.receipt, began)


def _log(config: Config, receipt: dict[str, Any], began: float) -> None:
    from pipeline.adapters.mlflow_tree import log_report

    page, text = output_path("data/report/index.html"), OmegaConf.to_yaml(OmegaConf.structured(config))
    try:
        log_report(receipt["tracking_uri"], STORE_TIMEOUT_SECONDS, receipt["run_id"], text, page, began, input_path(""))
    except Exception as error:  # whatever the client of the artifact store raises
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"the report is not logged in MLflow: {line}", file=sys.stderr)


def _read_documents(sheet: RoiConfig) -> Documents:
    metrics = read_json(input_path("data/eval/metrics.json"), "domain-draft/metrics", 1)
    return Documents(
        prompts=read_json(input_path("data/prompts/stats.json"), "domain-draft/prompts", 1),
        draft=read_json(input_path("data/draft/draft.json"), "domain-draft/draft", 1),
        history=_read_rows(input_path("data/distill/history.csv")),
        metrics=metrics,
        verdict=read_json(input_path("data/gate/verdict.json"), "domain-draft/verdict", 1),
        receipt=read_json(input_path("data/registry/receipt.json"), "domain-draft/receipt", 1),
        roi=roi(sheet, metrics),
        commits={name: commit for name in STAGES if (commit := (read_provenance(name) or {}).get("git_commit"))},
    )


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))
    except FileNotFoundError:
        raise PipelineError(f"{path} does not exist.", "run the stage that writes it: `dvc repro`.") from None


def _write_rows(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
