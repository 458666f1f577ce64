"""Drafts on disk and in memory: how one starts, how it is saved, and which target it is valid for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List

from transformers import PreTrainedModel

from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.targets import Target
from pipeline.core.artifacts import read_json, write_json
from pipeline.core.cache import layer_types
from pipeline.core.errors import PipelineError
from pipeline.core.models import (
    DTYPES,
    ModelConfig,
    cast_parameters,
    default_device,
    load_config,
    load_model,
    load_tokenizer,
    quiet_transformers,
    resolve_dtype,
    weights_fingerprint,
)
from pipeline.core.pruning import check_layers, keep_layers
from pipeline.core.vocabulary import VocabularyMatch, match_vocabularies

SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/draft", 1


@dataclass
class DraftConfig:
    """How the draft starts."""

    name: str  # short name, used in reports
    init: str  # pruned: some layers of the target; pretrained: a smaller sibling
    keep_layers: List[int] = field(default_factory=list)  # init=pruned: the target's layers kept, from 0
    id: str | None = None  # init=pretrained: hub id or local folder
    revision: str | None = None  # init=pretrained: hub revision
    dtype: str = "auto"  # of the saved weights: auto | bfloat16 | float16 | float32

    def __post_init__(self) -> None:
        if self.init not in ("pruned", "pretrained"):
            raise PipelineError(f"draft.init={self.init!r} is unknown.", "use pruned or pretrained.")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise PipelineError(f"draft.dtype={self.dtype!r} is unknown.", f"use auto or {', '.join(DTYPES)}.")

    @property
    def model(self) -> ModelConfig:
        """What to load for init=pretrained; training works in float32."""
        return ModelConfig(name=self.name, id=self.id, revision=self.revision, dtype="float32")


def check_draft(config: DraftConfig, target: Target, project_root: Path) -> VocabularyMatch:
    """Everything about the pair that needs no weights; raises `PipelineError` when the draft cannot serve the target."""
    if config.init == "pruned":
        if target.config.quantization != "none":
            raise PipelineError(
                f"draft.init=pruned cannot cut layers out of a target with quantization={target.config.quantization}.",
                "choose draft.init=pretrained, or target.quantization=none.",
            )
        check_layers(config.keep_layers, target.model_config.get_text_config().num_hidden_layers)
        return VocabularyMatch(range(target.vocabulary_size))
    location = resolve_model(config.id, project_root)
    model_config = load_config(location, config.revision)
    layer_types(model_config)
    return match_vocabularies(
        target.tokenizer,
        load_tokenizer(location, config.revision),
        target.model_config.get_text_config().vocab_size,
        model_config.get_text_config().vocab_size,
    )


def initial_draft(config: DraftConfig, target: Target, project_root: Path) -> PreTrainedModel:
    """The draft before distillation, in float32."""
    if config.init == "pruned":
        return keep_layers(target.model, config.keep_layers).float()
    return load_model(resolve_model(config.id, project_root), config.model)


def save_draft(
    folder: Path, draft: PreTrainedModel, target: Target, head_token_ids: list[int], config: DraftConfig
) -> None:
    """Write a standard transformers folder with the target's tokenizer, and beside it what our decoder needs to know."""
    cast_parameters(draft, resolve_dtype(config.dtype, default_device()))
    draft.generation_config = target.generation_config
    with quiet_transformers():
        draft.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    (folder / "head_token_ids.json").write_text(json.dumps(head_token_ids), encoding="utf-8")
    text = draft.config.get_text_config()
    facts = {
        "name": config.name,
        "fingerprint": weights_fingerprint(str(folder), draft.config, None),
        "compatibility_key": target.compatibility_key,
        "template": target.template,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "layers": text.num_hidden_layers,
        "parameters": draft.num_parameters(),
        "head_tokens": len(head_token_ids),
    }
    write_json(folder / "draft.json", SCHEMA_NAME, SCHEMA_VERSION, facts)


def read_draft_facts(folder: Path) -> dict[str, Any]:
    return read_json(folder / "draft.json", SCHEMA_NAME, SCHEMA_VERSION)


def load_draft(folder: Path, target: Target) -> tuple[PreTrainedModel, list[int]]:
    """The distilled draft and its trimmed head; raises `PipelineError` if it was made for another target or template."""
    facts = read_draft_facts(folder)
    if facts["template"] != target.template:
        raise PipelineError(
            f"The draft in {folder} was distilled on answers under another chat template.",
            "run `dvc repro`, so that answers and draft are made under the target's present one.",
        )
    if facts["compatibility_key"] != target.compatibility_key:
        differing = [
            name for name, value in target.compatibility_key.items() if facts["compatibility_key"].get(name) != value
        ]
        raise PipelineError(
            f"The draft in {folder} was distilled for another target (differs in {', '.join(differing)}).",
            "run `dvc repro distill` for this target.",
        )
    try:
        head = json.loads((folder / "head_token_ids.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        head = None
    if not head:
        raise PipelineError(f"{folder}/head_token_ids.json is missing, broken or empty.", "run `dvc repro distill`.")
    return load_model(str(folder), ModelConfig(name=facts["name"], id=str(folder), dtype=facts["dtype"])), head
