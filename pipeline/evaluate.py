"""evaluate: measure the draft in our decoder.

Reads:  data/draft, data/answers/{dev,golden}, the target.
Writes: data/eval/metrics.json (everything), summary.json (headline figures, the DVC metric), requests.parquet and
        rounds.parquet (raw counts).
Does:   token acceptance on all golden answers; the draft length chosen on dev; acceptance and speed of prompt lookup, the
        undistilled and the distilled draft on golden prompts, paired with plain decoding; losslessness in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import hydra

from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import DraftConfig, check_draft, initial_draft, load_draft, read_draft_facts
from pipeline.adapters.request_files import write_requests
from pipeline.adapters.targets import Target, check_same_target
from pipeline.core.artifacts import atomic_path, write_json
from pipeline.core.comparison import Contestants, DecodeSettings, EvaluateConfig, evaluate, summarise
from pipeline.core.models import ModelConfig, cast_parameters
from pipeline.stage import execute, input_path, output_path, write_effective_config


@dataclass
class Config:
    target: ModelConfig
    draft: DraftConfig
    decode: DecodeSettings
    evaluate: EvaluateConfig
    seed: int


def run(config: Config) -> None:
    root = input_path("")
    target = Target(config.target, root)
    made = read_draft_facts(input_path("data/draft"))
    start = config.draft.recorded(made)
    check_draft(start, target, root)
    facts = read_facts(input_path("data/answers/golden"))
    check_same_target(facts, target)
    distilled, head = load_draft(input_path("data/draft"), target)
    undistilled = cast_parameters(initial_draft(start, target, root, config.seed), distilled.dtype)
    vocabulary = range(target.vocabulary_size)
    half_weights = config.decode.draft_half_weights
    models = Contestants(target.model, undistilled, distilled, head, half_weights, vocabulary, facts["target_domain"])
    dev, golden = (read_answers(input_path(f"data/answers/{split}")) for split in ("dev", "golden"))
    outcome = evaluate(models, dev, golden, config.decode, config.evaluate, config.seed)
    identity = {"name": config.target.name, "id": config.target.id, "revision": config.target.revision}
    key = target.compatibility_key
    metrics = {
        "target": identity,
        "compatibility_key": key,
        "draft_fingerprint": made["fingerprint"],
        **outcome.metrics,
    }
    with atomic_path(output_path("data/eval")) as folder:
        folder.mkdir()
        write_json(folder / "metrics.json", "domain-draft/metrics", 1, metrics)
        write_json(folder / "summary.json", "domain-draft/summary", 1, summarise(metrics))
        write_requests(folder, outcome.requests)
        write_effective_config(folder, config)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg):
    execute(run, Config, cfg)


if __name__ == "__main__":
    main()
