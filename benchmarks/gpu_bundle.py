"""Everything that gpu_decoder.py and gpu_headline.py need where the pipeline's data is not: files that ship easily.

    python benchmarks/gpu_bundle.py

Reads data/draft, data/answers/{train,dev} and the target of conf/ (run `dvc repro distill` first). Writes benchmarks/bundle/,
which git ignores: target and draft in bfloat16 as safetensors shards, the ids of the draft's head, dev prompts with the
beginnings of their answers, and all train and dev prompts, as ids. Golden prompts play no part.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_twins import HEAD_FILE, HERE, PROMPTS_FILE, PROMPTS_SCHEMA, SPLITS_FILE, SPLITS_SCHEMA, SplitPrompts
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import load_draft, read_draft_facts
from pipeline.adapters.targets import Target
from pipeline.core.answers import Answer, is_looping
from pipeline.core.artifacts import atomic_path, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.generation import EncodedPrompt
from pipeline.core.models import ModelConfig, cast_parameters, quiet_transformers

BUNDLE = HERE / "bundle"
LARGEST_FILE = 60 << 20  # bytes
SHARD = "57MB"  # of tensors; the header comes on top
PROMPTS, PROMPT_TOKENS = 32, 200
NEEDED = ("pipeline/__init__.py", "pipeline/core", "pipeline/adapters", "conf", "benchmarks")


@dataclass
class Config:
    target: ModelConfig


def dev_prompts(answers: list[Answer], domain: str) -> list[list[int]]:
    """Texts of about `PROMPT_TOKENS` tokens whose continuation is the target's own: prompts followed by the first tokens of
    answers that the length limit cut. Answers that repeat themselves, which any draft guesses, come last."""
    cut = [answer for answer in answers if answer.domain == domain and answer.finish_reason == "length"]
    if not cut:
        raise PipelineError(
            f"No dev answer on {domain} reaches the length limit.",
            "raise the number of dev prompts and run `dvc repro`.",
        )
    texts = [[*answer.prompt_ids.tolist(), *answer.answer_ids.tolist()][:PROMPT_TOKENS] for answer in cut]
    order = sorted(range(len(cut)), key=lambda index: (is_looping(cut[index].answer_ids), -len(texts[index])))
    return [texts[index] for index in order[:PROMPTS]]


def split_prompts(splits: dict[str, list[Answer]], domain: str, target: Target) -> SplitPrompts:
    """The prompts of `splits`, "train" and "dev", as the target sees them."""
    rows = {
        split: [EncodedPrompt(a.prompt_id, a.domain, a.task, a.cluster, a.prompt_ids.tolist()) for a in answers]
        for split, answers in splits.items()
    }
    return SplitPrompts(domain, rows["train"], rows["dev"], range(target.vocabulary_size), target.eos_token_ids)


def _write_splits(path: Path, prompts: SplitPrompts) -> None:
    """Compact JSON: an indented file would give every id a line."""
    facts = {
        "schema": SPLITS_SCHEMA,
        "schema_version": 1,
        "domain": prompts.domain,
        "vocabulary_size": len(prompts.vocabulary),
        "eos_token_ids": list(prompts.eos_token_ids),
        "train": [vars(prompt) for prompt in prompts.train],
        "dev": [vars(prompt) for prompt in prompts.dev],
    }
    path.write_text(json.dumps(facts, separators=(",", ":")), encoding="utf-8")


def write_bundle(
    folder: Path,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    head_token_ids: list[int],
    prompt_ids: list[list[int]],
    splits: SplitPrompts,
) -> None:
    """Write the folder whole or not at all; the weights of both models are cast to bfloat16 in place."""
    with atomic_path(folder) as temporary, quiet_transformers():
        temporary.mkdir()
        for name, model in (("target", target), ("draft", draft)):
            cast_parameters(model, torch.bfloat16).save_pretrained(temporary / name, max_shard_size=SHARD)
        (temporary / HEAD_FILE).write_text(json.dumps(head_token_ids), encoding="utf-8")
        write_json(temporary / PROMPTS_FILE, PROMPTS_SCHEMA, 1, {"prompt_ids": prompt_ids})
        _write_splits(temporary / SPLITS_FILE, splits)
        for path in temporary.rglob("*"):
            if path.is_file() and path.stat().st_size > LARGEST_FILE:
                raise PipelineError(
                    f"{path.relative_to(temporary)} has {path.stat().st_size >> 20} MiB, more than the"
                    f" {LARGEST_FILE >> 20} MiB that ship easily.",
                    "choose a smaller target for this benchmark, or fewer prompts.",
                )


def main() -> int:
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        config = stage.typed_config(compose("config"), Config)
    try:
        read_draft_facts(stage.input_path("data/draft"))
        domain = read_facts(stage.input_path("data/answers/dev"))["target_domain"]
        answers = {split: read_answers(stage.input_path(f"data/answers/{split}")) for split in ("train", "dev")}
        prompts = dev_prompts(answers["dev"], domain)
        target = Target(config.target, stage.input_path(""))
        splits = split_prompts(answers, domain, target)
        draft, head_token_ids = load_draft(stage.input_path("data/draft"), target)
        write_bundle(BUNDLE, target.model, draft, head_token_ids, prompts, splits)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 1
    files = [path for path in BUNDLE.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    print(f"{BUNDLE}: {len(files)} files, {total / 2**20:.0f} MiB, {len(splits.train)} train prompts")
    print("To ship it with the code that it needs, from the project's folder:")
    print(f"    rsync -aR {' '.join(NEEDED)} MACHINE:FOLDER/")
    print("and in that folder, with torch, transformers and accelerate installed:")
    print("    PYTHONPATH=. python benchmarks/gpu_all.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
