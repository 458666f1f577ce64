"""Which recipe gives the most dev token acceptance per minute? Equal training time for every variant, one after the other.

    python benchmarks/recipes.py --minutes 3

Reads data/answers/{train,dev} (run `dvc repro generate` first) and the values of conf/; trains each variant for about the
given time, prints a table and writes benchmarks/results/recipes.json. Golden answers play no part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.targets import Target
from pipeline.adapters.trainer import distill
from pipeline.core.batches import AnswerBatches, answer_logits
from pipeline.core.comparison import machine
from pipeline.core.losses import forward_kl_top
from pipeline.core.pruning import keep_layers
from pipeline.core.vocabulary import domain_token_ids
from pipeline.distill import Config

VARIANTS = {
    "default": {},
    "embeddings trained too": {"freeze_embeddings": False},
    "half the learning rate": {"learning_rate": 1e-3},
    "twice the learning rate": {"learning_rate": 4e-3},
    "steps of 4096 tokens": {"tokens_per_step": 4096},
    "2 layers: 0, 29": {"keep_layers": [0, 29]},
    "3 layers: 0, 1, 29": {"keep_layers": [0, 1, 29]},
    "head of 4096 tokens": {"head_tokens": 4096},
}


def tokens_per_second(draft, batches: AnswerBatches, head: torch.Tensor, seconds: float) -> float:
    """Tokens through a forward and backward pass per second, measured on throw-away gradients."""
    tokens, count, started = 0, 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        batch = batches[count % len(batches)]
        losses = forward_kl_top(answer_logits(draft, batch, head), batch["top_index"], batch["top_logprobs"])
        losses.mean().backward()
        tokens += batch["input_ids"].numel()
        count += 1
    draft.zero_grad()
    return tokens / (time.perf_counter() - started)


def run_variant(config: Config, changes: dict, minutes: float, target: Target, train: list, dev: list) -> dict:
    """Train one variant for about `minutes` and return what it reached on dev."""
    layers = changes.get("keep_layers", config.draft.keep_layers)
    settings = dataclasses.replace(config.distill, **{k: v for k, v in changes.items() if k != "keep_layers"})
    head = domain_token_ids(train, settings.head_tokens, target.eos_token_ids, range(target.vocabulary_size))
    draft = keep_layers(target.model, layers).float()
    batches = AnswerBatches(train, head, settings.tokens_per_forward, config.seed)
    rate = tokens_per_second(draft, batches, torch.tensor(head), seconds=8)
    total = sum(batches[index]["input_ids"].numel() for index in range(len(batches)))
    settings = dataclasses.replace(settings, epochs=rate * minutes * 60 / total, evaluations=2)
    folder = Path(tempfile.mkdtemp())
    started = time.perf_counter()
    try:
        history = distill(draft, train, dev, head, settings, config.seed, folder / "checkpoints")
    finally:
        shutil.rmtree(folder)
    best = max(row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row)
    return {
        "layers": list(layers),
        "learning_rate": settings.learning_rate,
        "tokens_per_step": settings.tokens_per_step,
        "head_tokens": len(head),
        "epochs": settings.epochs,
        "seconds": time.perf_counter() - started,
        "dev_token_acceptance": best,
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
    print(f"{'variant':32} {'dev acceptance':>14} {'epochs':>7} {'seconds':>8}")
    for name in arguments.only or VARIANTS:
        row = {"variant": name, **run_variant(config, VARIANTS[name], arguments.minutes, target, train, dev)}
        rows.append(row)
        print(f"{name:32} {row['dev_token_acceptance']:14.3f} {row['epochs']:7.2f} {row['seconds']:8.0f}", flush=True)
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
