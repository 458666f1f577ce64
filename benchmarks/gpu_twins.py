"""What the GPU benchmarks share: the bundle's models and prompts, cost twins grown from them, and arguments.

Needs torch, transformers and pipeline.core. A cost twin computes what a small model computes, at the cost of a large one
(pipeline.core.cost_twin).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.core.artifacts import read_json
from pipeline.core.cost_twin import grow, shape_near, widened_shape
from pipeline.core.errors import PipelineError
from pipeline.core.footprint import active_parameters, weight_bytes
from pipeline.core.generation import EncodedPrompt
from pipeline.core.models import ModelConfig, load_model
from pipeline.core.pruning import keep_layers
from pipeline.core.tiny import build_tiny_target

HERE = Path(__file__).resolve().parent
HEAD_FILE, PROMPTS_FILE, SPLITS_FILE = "head_token_ids.json", "prompts.json", "split_prompts.json"
PROMPTS_SCHEMA, SPLITS_SCHEMA = "domain-draft/gpu-bundle", "domain-draft/gpu-bundle-splits"
DRAFT_SHARE = 0.016  # of the target's weights that a pass reads: a 1.1B draft of a 70B target


@dataclass(frozen=True)
class TwinSize:
    """The large model whose cost a twin has."""

    hidden_size: int
    intermediate_size: int
    parameters: int


LLAMA_3_8B = TwinSize(hidden_size=4096, intermediate_size=14336, parameters=8_030_261_248)
TINY_TWIN = TwinSize(hidden_size=128, intermediate_size=256, parameters=900_000)


@dataclass
class SplitPrompts:
    """Prompts as ids, the ids that the target may emit, and those that end its answers."""

    domain: str  # the target domain
    train: list[EncodedPrompt]
    dev: list[EncodedPrompt]  # of all domains
    vocabulary: range
    eos_token_ids: tuple[int, ...]


def load_target(folder: Path) -> PreTrainedModel:
    """The small target in bfloat16."""
    _check_bundle(folder, "target")
    return load_model(str(folder / "target"), ModelConfig(dtype="bfloat16"))


def load_bundle(folder: Path) -> tuple[PreTrainedModel, PreTrainedModel, list[int], list[list[int]]]:
    """Small target and draft in bfloat16, the draft's head and the prompts."""
    _check_bundle(folder, "target", "draft", HEAD_FILE, PROMPTS_FILE)
    draft = load_model(str(folder / "draft"), ModelConfig(dtype="bfloat16"))
    head_token_ids = json.loads((folder / HEAD_FILE).read_text(encoding="utf-8"))
    return load_target(folder), draft, head_token_ids, read_json(folder / PROMPTS_FILE, PROMPTS_SCHEMA, 1)["prompt_ids"]


def load_splits(folder: Path) -> SplitPrompts:
    """The train and dev prompts of the bundle."""
    _check_bundle(folder, SPLITS_FILE)
    facts = read_json(folder / SPLITS_FILE, SPLITS_SCHEMA, 1)
    train, dev = ([EncodedPrompt(**row) for row in facts[split]] for split in ("train", "dev"))
    return SplitPrompts(facts["domain"], train, dev, range(facts["vocabulary_size"]), tuple(facts["eos_token_ids"]))


def _check_bundle(folder: Path, *names: str) -> None:
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise PipelineError(
            f"{folder} holds no {', '.join(missing)}.",
            "run `python benchmarks/gpu_bundle.py` where the pipeline has run, and copy its folder here.",
        )


def build_tiny() -> tuple[PreTrainedModel, PreTrainedModel, list[int], list[list[int]]]:
    """A tiny target, two of its layers as a draft, a head and random prompts."""
    target = build_tiny_target()
    return target, keep_layers(target, [0, 3]), list(range(200)), _random_prompts(4)


def build_tiny_splits() -> SplitPrompts:
    """Random prompts for the tiny target."""
    rows = [EncodedPrompt(f"p{i}", "legal", "continuation", f"c{i}", ids) for i, ids in enumerate(_random_prompts(24))]
    return SplitPrompts("legal", rows[:16], rows[16:], range(259), (0, 2))


def _random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 259, (count, 20), generator=generator).tolist()


def grow_target(small: PreTrainedModel, size: TwinSize) -> PreTrainedModel:
    """The twin of `small` whose cost is that of a model of `size`, in its type and on its device."""
    shape = shape_near(small.config, size.hidden_size, size.intermediate_size, size.parameters)
    return grow(small, shape, small.dtype, small.device)


def grow_draft(draft: PreTrainedModel, target: PreTrainedModel, head_tokens: int) -> PreTrainedModel:
    """The twin of `draft` whose step reads `DRAFT_SHARE` of the weights that a pass of `target` reads."""
    weights = round(DRAFT_SHARE * active_parameters(target))
    return grow(draft, widened_shape(draft.config, weights, head_tokens), draft.dtype, draft.device)


@torch.inference_mode()
def argmax_agreement(small: PreTrainedModel, twin: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Share of prompt positions at which the twin's most probable token is the small target's."""
    equal = total = 0
    for prompt in prompts:
        ids = torch.tensor([prompt], device=twin.device)
        best = [model(ids, use_cache=False).logits.argmax(dim=-1) for model in (small, twin)]
        equal += (best[0] == best[1]).sum().item()
        total += len(prompt)
    return equal / total


def describe(target: PreTrainedModel, drafts: dict[str, PreTrainedModel], head_tokens: int) -> dict[str, Any]:
    """Shapes and bytes of what decodes, printed."""

    def shapes(model: PreTrainedModel) -> dict[str, Any]:
        config = model.config
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        return {**{name: getattr(config, name) for name in names}, "bytes": weight_bytes(model, model.dtype)}

    whole = active_parameters(target)
    found = {"target": {**shapes(target), "dtype": str(target.dtype).removeprefix("torch.")}}
    for name, draft in drafts.items():
        share = active_parameters(draft, head_tokens) / whole
        found[name] = {**shapes(draft), "share_of_target_weights_read": share}
    for name, facts in found.items():
        values = ", ".join(
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in facts.items()
        )
        print(f"{name}: {values}")
    return {**found, "head_tokens": head_tokens}


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all GPU benchmarks take."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--bundle", type=Path, default=HERE / "bundle", help="folder that gpu_bundle.py wrote")
    found.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    found.add_argument("--tiny", action="store_true", help="a tiny model built in code, in float32")
    return found


def check_device(arguments: argparse.Namespace) -> torch.device:
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise PipelineError("There is no CUDA GPU here.", "run it on one, or try `--device cpu --tiny`.")
    if arguments.device == "cpu" and not arguments.tiny:
        raise PipelineError("A model of 16 GB is not measured on a CPU.", "add --tiny.")
    return torch.device(arguments.device)
