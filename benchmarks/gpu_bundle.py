"""Everything that gpu_decoder.py needs on a machine without the pipeline's data, in one folder of files that ship easily.

    python benchmarks/gpu_bundle.py

Reads data/draft, data/answers/dev and the target of conf/ (run `dvc repro distill` first). Writes benchmarks/bundle/, which
git ignores: target and draft in bfloat16 as safetensors shards, the ids of the draft's head, and prompts as ids. Golden
prompts play no part.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import load_draft, read_draft_facts
from pipeline.adapters.targets import Target
from pipeline.core.answers import Answer, is_looping
from pipeline.core.artifacts import atomic_path, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig, cast_parameters, quiet_transformers

BUNDLE = Path(__file__).resolve().parent / "bundle"
LARGEST_FILE = 60 << 20  # bytes
SHARD = "57MB"  # of tensors; the header comes on top
PROMPTS, PROMPT_TOKENS = 32, 200


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


def write_bundle(
    folder: Path,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    head_token_ids: list[int],
    prompt_ids: list[list[int]],
) -> None:
    """Write the folder whole or not at all; the weights of both models are cast to bfloat16 in place."""
    with atomic_path(folder) as temporary, quiet_transformers():
        temporary.mkdir()
        for name, model in (("target", target), ("draft", draft)):
            cast_parameters(model, torch.bfloat16).save_pretrained(temporary / name, max_shard_size=SHARD)
        (temporary / "head_token_ids.json").write_text(json.dumps(head_token_ids), encoding="utf-8")
        write_json(temporary / "prompts.json", "domain-draft/gpu-bundle", 1, {"prompt_ids": prompt_ids})
        for path in temporary.rglob("*"):
            if path.is_file() and path.stat().st_size > LARGEST_FILE:
                raise PipelineError(
                    f"{path.relative_to(temporary)} has {path.stat().st_size >> 20} MiB: a tensor of the model exceeds"
                    f" {LARGEST_FILE >> 20} MiB.",
                    "choose a smaller target for this benchmark.",
                )


def main() -> int:
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        config = stage.typed_config(compose("config"), Config)
    try:
        read_draft_facts(stage.input_path("data/draft"))
        answers = stage.input_path("data/answers/dev")
        prompts = dev_prompts(read_answers(answers), read_facts(answers)["target_domain"])
        target = Target(config.target, stage.input_path(""))
        draft, head_token_ids = load_draft(stage.input_path("data/draft"), target)
        write_bundle(BUNDLE, target.model, draft, head_token_ids, prompts)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 1
    files = [path for path in BUNDLE.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    print(f"{BUNDLE}: {len(files)} files, {total / 2**20:.0f} MiB, {len(prompts)} prompts")
    print("To ship it with the code that it needs, from the project's folder:")
    print(
        "    rsync -aR pipeline/__init__.py pipeline/core benchmarks/gpu_decoder.py benchmarks/bundle MACHINE:FOLDER/"
    )
    print("and in that folder, with torch and transformers installed:")
    print("    PYTHONPATH=. python benchmarks/gpu_decoder.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
