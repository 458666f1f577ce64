"""Drafts on disk and in memory: how one starts, how it is saved, and which target it is valid for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, List

from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.registered_drafts import RegisteredDraft, find_registered
from pipeline.adapters.targets import Target
from pipeline.core.architecture import copy_embeddings, for_vocabulary, has_width_of, random_draft
from pipeline.core.artifacts import fingerprint, read_json, write_json
from pipeline.core.batches import check_plain_head
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
from pipeline.core.pruning import check_layer_counts, check_layers, keep_layers, outer_layers
from pipeline.core.vocabulary import VocabularyMatch, match_vocabularies

SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/draft", 1
INITS = ("pruned", "pretrained", "config", "champion")
DRAFT = "data/draft"  # what the distill stage writes


@dataclass
class LayerChoice:
    """How the number of layers of a pruned draft is chosen: each is tried and the best predicted speedup wins."""

    layer_counts: List[int]  # tried: so many of the target's layers, the first and the last (pruning.outer_layers)
    epochs: float  # passes over the train answers by which each is distilled before it is judged
    draft_lengths: List[int]  # k of which each may have its best
    half_weights: bool  # a draft step is timed as it is served: decode.draft_half_weights

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise ValueError(f"draft.layer_choice.epochs must be > 0, got {self.epochs}")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise ValueError(f"draft.layer_choice.draft_lengths must be numbers >= 1, got {self.draft_lengths}")


@dataclass
class DraftConfig:
    """How the draft starts."""

    name: str  # short name, used in reports
    init: str  # pruned: layers of the target; pretrained: a smaller sibling; config: an architecture; champion: the last one
    keep_layers: List[int] = field(default_factory=list)  # init=pruned: the target's layers kept, from 0
    layer_choice: LayerChoice | None = None  # init=pruned, instead of keep_layers: they are chosen
    # pretrained: hub id or local folder; config: also a JSON file; champion: models:/NAME@ALIAS or models:/NAME/VERSION
    id: str | None = None
    revision: str | None = None  # init=pretrained, config: hub revision
    dtype: str = "auto"  # of the saved weights: auto | bfloat16 | float16 | float32
    tracking_uri: str | None = None  # init=champion: as registry.tracking_uri
    timeout_seconds: float = 10.0  # init=champion: to wait for the store's answer

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise PipelineError(f"draft.init={self.init!r} is unknown.", f"use {', '.join(INITS)}.")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise PipelineError(f"draft.dtype={self.dtype!r} is unknown.", f"use auto or {', '.join(DTYPES)}.")
        if self.init == "pruned" and bool(self.keep_layers) == bool(self.layer_choice):
            raise PipelineError(
                "draft.init=pruned takes the layers from draft.keep_layers or lets draft.layer_choice find them, and"
                f" {'both are' if self.keep_layers else 'neither is'} given.",
                "name layers, or take draft=pruned_chosen with draft.keep_layers=[].",
            )

    @property
    def origin(self) -> str:
        """What the draft starts from, in words."""
        if self.init != "pruned":
            return self.id or "nothing"
        if self.layer_choice:
            return f"the best of {self.layer_choice.layer_counts} layers of the target"
        return f"layers {self.keep_layers} of the target"

    def most_layers(self, depth: int) -> list[int]:
        """init=pruned: the layers kept, or the most that are tried, of a target of `depth` layers."""
        return outer_layers(max(self.layer_choice.layer_counts), depth) if self.layer_choice else self.keep_layers

    def registered(self, project_root: Path) -> RegisteredDraft:
        """init=champion: the version that `id` names now."""
        return find_registered(self.id, self.tracking_uri, self.timeout_seconds, project_root)

    def pinned(self, project_root: Path) -> DraftConfig:
        """The same start with an alias replaced by the version that it names now: it may move while the draft trains."""
        return replace(self, id=self.registered(project_root).uri) if self.init == "champion" else self

    @property
    def start(self) -> dict[str, Any]:
        """The fields that say what the draft starts from, for draft.json."""
        names = {"pruned": ("keep_layers",), "champion": ("id",)}.get(self.init, ("id", "revision"))
        return {name: getattr(self, name) for name in ("init", *names)}

    def recorded(self, facts: dict[str, Any]) -> DraftConfig:
        """The start of the draft that `facts` (of its draft.json) are about, with what was chosen for it."""
        return replace(self, layer_choice=None, **facts["start"])


def off_the_shelf(name: str, id: str, revision: str | None) -> DraftConfig:
    """The start of a draft that stays as it comes."""
    return DraftConfig(name=name, init="pretrained", id=id, revision=revision)


def check_draft(config: DraftConfig, target: Target, project_root: Path) -> VocabularyMatch:
    """Everything about the pair that needs no weights; raises `PipelineError` when the draft cannot serve the target."""
    if config.init == "pruned":
        _check_pruning(config, target)
        return VocabularyMatch(range(target.vocabulary_size))
    if config.init == "champion":
        registered = config.registered(project_root)
        _check_same_key(
            f"{config.id} (version {registered.version})",
            registered.facts,
            target,
            "configure the target that it was made for, or start this target's first draft with another draft.init.",
        )
        rows = registered.config.get_text_config().vocab_size
        return VocabularyMatch(range(min(rows, target.vocabulary_size)))
    model_config = draft_architecture(config, target, project_root)
    layer_types(model_config)
    if config.init == "config":
        return VocabularyMatch(range(target.vocabulary_size))
    return match_vocabularies(
        target.tokenizer,
        load_tokenizer(resolve_model(config.id, project_root), config.revision),
        target.model_config.get_text_config().vocab_size,
        model_config.get_text_config().vocab_size,
    )


def _check_pruning(config: DraftConfig, target: Target) -> None:
    if target.config.quantization != "none":
        raise PipelineError(
            f"draft.init=pruned cannot cut layers out of a target with quantization={target.config.quantization}.",
            "choose draft.init=pretrained, or target.quantization=none.",
        )
    depth = target.model_config.get_text_config().num_hidden_layers
    if config.layer_choice:
        check_layer_counts(config.layer_choice.layer_counts, depth)
    else:
        check_layers(config.keep_layers, depth)


def check_frozen_embeddings(config: DraftConfig, target: Target, project_root: Path) -> None:
    """Raise `PipelineError` when training is to keep embeddings that are random."""
    if config.init != "config":
        return
    model_config = draft_architecture(config, target, project_root)
    if not has_width_of(model_config, target.model_config):
        own, other = (found.get_text_config().hidden_size for found in (model_config, target.model_config))
        raise PipelineError(
            f"distill.freeze_embeddings=true would keep random embeddings: this draft is {own} wide, so that the target's,"
            f" {other} wide, do not fit.",
            "set distill.freeze_embeddings=false, or give the draft's configuration the target's hidden_size.",
        )


def check_reference_draft(folder: str | None, project_root: Path) -> None:
    """Raise `PipelineError` unless `folder`, distill.reference_draft, names a draft that is there when the stage runs."""
    if folder is None:
        return
    path = project_root / folder
    if path.resolve() == (project_root / DRAFT).resolve():
        raise PipelineError(
            f"distill.reference_draft={folder} is what the stage itself writes: DVC removes it before the stage runs.",
            f"keep a copy: `cp -rL {DRAFT} .cache/reference`, and set distill.reference_draft=.cache/reference.",
        )
    if not (path / "draft.json").is_file():
        raise PipelineError(
            f"distill.reference_draft={folder} is no distilled draft: it holds no draft.json.",
            f"name a copy of a {DRAFT} that the distill stage wrote.",
        )
    read_draft_facts(path)


def check_distillable(config: DraftConfig, target: Target, project_root: Path, target_in_loop: bool) -> None:
    """Raise `PipelineError` for a model of which distillation computes other logits than its own; needs no weights."""
    own = target.model_config if config.init == "pruned" else draft_architecture(config, target, project_root)
    check_plain_head(own, "draft", "choose a draft of another family.")
    if target_in_loop:
        remedy = (
            "set distill.target=stored and distill.on_policy.steps=0: stored probabilities are those of its own logits."
        )
        check_plain_head(target.model_config, "target", remedy)


def draft_architecture(config: DraftConfig, target: Target, project_root: Path) -> PreTrainedConfig:
    """The draft's model config, for any `init` but pruned."""
    if config.init == "champion":
        return config.registered(project_root).config
    path = project_root / (config.id or "")
    is_file = config.init == "config" and path.is_file()
    found = load_config(str(path) if is_file else resolve_model(config.id, project_root), config.revision)
    return for_vocabulary(found, target.model_config) if config.init == "config" else found


def start_fingerprint(config: DraftConfig, target: Target, project_root: Path) -> str | None:
    """What identifies the weights that the draft starts from, beyond its config and the target; None: nothing does."""
    if config.init == "pruned":
        return None
    if config.init == "champion":
        return config.registered(project_root).facts["fingerprint"]
    model_config = draft_architecture(config, target, project_root)
    if config.init == "config":
        return fingerprint(model_config.to_json_string(use_diff=False))
    return weights_fingerprint(resolve_model(config.id, project_root), model_config, config.revision)


def initial_draft(config: DraftConfig, target: Target, project_root: Path, seed: int = 0) -> PreTrainedModel:
    """The draft before distillation, in float32; `seed` is that of random weights (init=config)."""
    if config.init == "pruned":
        return keep_layers(target.model, config.keep_layers).float()
    if config.init == "config":
        model_config = draft_architecture(config, target, project_root)
        draft = random_draft(model_config, seed)
        if has_width_of(model_config, target.model_config):
            copy_embeddings(draft, target.model)
        return draft.to(default_device())
    if config.init == "champion":
        location = str(config.registered(project_root).folder(project_root))
    else:
        location = resolve_model(config.id, project_root)
    return load_model(location, ModelConfig(name=config.name, id=config.id, revision=config.revision, dtype="float32"))


def save_draft(
    folder: Path,
    draft: PreTrainedModel,
    target: Target,
    head_token_ids: list[int],
    config: DraftConfig,
    layer_choice: list[dict] | None = None,
) -> None:
    """Write a standard transformers folder with the target's tokenizer, and beside it what our decoder needs to know.

    `config` says what the draft started from, pinned and with its layers; `layer_choice` what they were chosen from
    (`pipeline.adapters.layer_choice`), None where nothing was chosen.
    """
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
        "start": config.start,
        "layer_choice": layer_choice,
    }
    write_json(folder / "draft.json", SCHEMA_NAME, SCHEMA_VERSION, facts)


def read_draft_facts(folder: Path) -> dict[str, Any]:
    return read_json(folder / "draft.json", SCHEMA_NAME, SCHEMA_VERSION)


def check_made_for(folder: Path, target: Target) -> dict[str, Any]:
    """The facts of the draft in `folder`; raises `PipelineError` if it was made for another target or template."""
    facts = read_draft_facts(folder)
    if facts["template"] != target.template:
        raise PipelineError(
            f"The draft in {folder} was distilled on answers under another chat template.",
            "run `dvc repro`, so that answers and draft are made under the target's present one.",
        )
    _check_same_key(f"The draft in {folder}", facts, target, "run `dvc repro distill` for this target.")
    return facts


def load_draft(folder: Path, target: Target) -> tuple[PreTrainedModel, list[int]]:
    """The distilled draft and its trimmed head; raises `PipelineError` if it was made for another target or template."""
    facts = check_made_for(folder, target)
    try:
        head = json.loads((folder / "head_token_ids.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        head = None
    if not head:
        raise PipelineError(f"{folder}/head_token_ids.json is missing, broken or empty.", "run `dvc repro distill`.")
    return load_model(str(folder), ModelConfig(name=facts["name"], id=str(folder), dtype=facts["dtype"])), head


def _check_same_key(what: str, facts: dict[str, Any], target: Target, remedy: str) -> None:
    """Raise `PipelineError` with the parts that differ when the draft of `facts` is not one of `target`."""
    theirs, ours = facts["compatibility_key"], target.compatibility_key
    differing = [
        f"{name} {theirs.get(name)!r}, now {value!r}" for name, value in ours.items() if theirs.get(name) != value
    ]
    if differing:
        raise PipelineError(f"{what} was distilled for another target ({'; '.join(differing)}).", remedy)
