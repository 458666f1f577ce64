"""Which recipe gives the most dev token acceptance per minute? Equal training time for every variant, one after the other.

    python benchmarks/recipes.py --minutes 3

Reads data/answers/{train,dev} (run `dvc repro generate` first) and the values of conf/; trains each variant for about the
given time, prints a table and writes benchmarks/results/recipes.json. Golden answers play no part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from hydra import compose, initialize_config_dir

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.targets import Target
from pipeline.adapters.trainer import distill
from pipeline.core.comparison import machine
from pipeline.core.pruning import keep_layers
from pipeline.core.vocabulary import domain_token_ids
from pipeline.distill import Config

PROBE_EPOCHS = 0.15  # trained twice to learn a variant's speed
VARIANTS = {
    "default": {},
    "2 layers: 0, 29": {"keep_layers": [0, 29]},
    "4 layers: 0, 1, 28, 29": {"keep_layers": [0, 1, 28, 29]},
    "embeddings trained too": {"freeze_embeddings": False},
    "half the learning rate": {"learning_rate": 1e-3},
}


def run_variant(config: Config, changes: dict, minutes: float, target: Target, train: list, dev: list) -> dict:
    """Train one variant for about `minutes` and return what it reached on dev."""
    layers = changes.get("keep_layers", config.draft.keep_layers)
    settings = dataclasses.replace(config.distill, **{k: v for k, v in changes.items() if k != "keep_layers"})
    head = domain_token_ids(train, settings.head_tokens, target.eos_token_ids, range(target.vocabulary_size))

    def trained(epochs: float, evaluations: int, dev: list) -> tuple[list[dict], float]:
        draft = keep_layers(target.model, layers).float()
        chosen = dataclasses.replace(settings, epochs=epochs, evaluations=evaluations)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            history = distill(draft, train, dev, head, chosen, config.seed, Path(folder) / "checkpoints")
        return history, time.perf_counter() - started

    trained(PROBE_EPOCHS, 1, dev[:1])  # kernels are made for new shapes
    _, seconds = trained(PROBE_EPOCHS, 1, dev[:1])
    history, seconds = trained(PROBE_EPOCHS * minutes * 60 / seconds, 2, dev)
    return {
        "layers": list(layers),
        "learning_rate": settings.learning_rate,
        "tokens_per_step": settings.tokens_per_step,
        "head_tokens": len(head),
        "freeze_embeddings": settings.freeze_embeddings,
        "train_on_prompts": settings.train_on_prompts,
        "trained_tokens": history[-1]["tokens"],
        "seconds": seconds,
        "dev_token_acceptance": max(row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="training time of each variant")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="variants to run; default: all")
    arguments = parser.parse_args()
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        config = stage.typed_config(compose("config"), Config)
    facts = read_facts(stage.input_path("data/answers/train"))
    train = read_answers(stage.input_path("data/answers/train"))
    dev = [a for a in read_answers(stage.input_path("data/answers/dev")) if a.domain == facts["target_domain"]]
    target = Target(config.target, stage.input_path(""))
    rows = []
    print(f"{'variant':32} {'dev acceptance':>14} {'tokens':>9} {'seconds':>8}")
    for name in arguments.only or VARIANTS:
        row = {"variant": name, **run_variant(config, VARIANTS[name], arguments.minutes, target, train, dev)}
        rows.append(row)
        print(
            f"{name:32} {row['dev_token_acceptance']:14.3f} {row['trained_tokens']:9,} {row['seconds']:8.0f}",
            flush=True,
        )
    result = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "train_answer_tokens": sum(len(answer.answer_ids) for answer in train),
        "dev_answer_tokens": sum(len(answer.answer_ids) for answer in dev),
        "variants": rows,
    }
    path = Path(__file__).parent / "results" / "recipes.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
