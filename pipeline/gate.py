"""Stage gate: judge the measured draft by the thresholds of conf/gate/.

Reads:  data/eval/metrics.json, data/champion/metrics.json if any
Writes: data/gate/verdict.json (schema "domain-draft/verdict"), with the effective config inside
Does:   compares each check with its metric and prints one line per check. A failed gate is a result, not an error:
        the last stage of the pipeline enforces it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, List

import hydra
from omegaconf import DictConfig

from pipeline.core.artifacts import fingerprint_files, read_json, write_json
from pipeline.core.gating import Check, judge, verdict_lines
from pipeline.stage import execute, input_path, output_path, read_champion


@dataclass
class GateConfig:
    name: str  # recorded in the verdict, so that a verdict of a smoke gate is not taken for a real one
    model_name: str  # what a passed draft is registered as, recorded likewise
    enforce: bool  # true: the last stage exits 1 when the gate fails
    checks: List[Check]  # at least one


@dataclass
class Config:
    gate: GateConfig


def run(config: Config) -> None:
    """Judge data/eval/metrics.json and write the verdict.

    Raises `PipelineError` when the metrics are missing or the gate has no checks.
    """
    metrics = read_json(input_path("data/eval/metrics.json"), "domain-draft/metrics", 1)
    verdict = judge(metrics, config.gate.checks, _champion(config.gate.model_name))
    facts = {
        "gate": config.gate.name,
        "model_name": config.gate.model_name,
        "metrics_fingerprint": fingerprint_files([input_path("data/eval/metrics.json")]),
        **verdict,
        "config": asdict(config),
    }
    write_json(output_path("data/gate/verdict.json"), "domain-draft/verdict", 1, facts)
    print(f"gate {config.gate.name!r}")
    for line in verdict_lines(verdict):
        print(line)


def _champion(model_name: str) -> dict[str, Any] | None:
    """What promotion wrote about the present champion; None where there is none of this model."""
    champion = read_champion()
    return champion if champion and champion["model_name"] == model_name else None


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
