"""How well drafts, as they start, guess the target's stored answers: which to distil, or whether one needs to be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import DraftConfig, check_draft, initial_draft
from pipeline.adapters.targets import Target, check_same_target
from pipeline.core.answers import Answer
from pipeline.core.drafters import ModelDrafter
from pipeline.core.evaluation import agreement_metrics, teacher_forced
from pipeline.core.metrics import aggregate
from pipeline.core.models import cast_parameters, default_device, resolve_dtype
from pipeline.core.sampling import Sampling
from pipeline.core.vocabulary import domain_token_ids


@dataclass
class StoredAnswers:
    """The target and what it answered: `dev` to be guessed, `train` for the choice of the trimmed head."""

    target: Target
    train: list[Answer]
    dev: list[Answer]


def read_stored_answers(target: Target, folder: Path) -> StoredAnswers:
    """The splits of `folder`; raises `PipelineError` where they are missing or another target's."""
    check_same_target(read_facts(folder / "dev"), target)
    return StoredAnswers(target, read_answers(folder / "train"), read_answers(folder / "dev"))


def takes_weights_of_target(config: DraftConfig) -> bool:
    """Whether the draft starts from layers or embeddings of the target."""
    return config.init in ("pruned", "config")


def token_acceptance(
    config: DraftConfig,
    stored: StoredAnswers,
    root: Path,
    head_tokens: int,
    half_weights: bool,
    tokens_per_forward: int,
    bootstrap_samples: int,
) -> dict[str, dict[str, dict]]:
    """domain (and "all") -> the token acceptances of the draft before distillation, as measures.

    Greedy, so that the target's stored most probable tokens decide: its weights are loaded only where the draft starts
    from them (`takes_weights_of_target`). `head_tokens` and `half_weights` say how the draft is served. Where its
    layers are still to be chosen, it has the most that are tried.
    """
    target = stored.target
    shared = check_draft(config, target, root).shared_ids
    if config.layer_choice:
        depth = target.model_config.get_text_config().num_hidden_layers
        config = replace(config, keep_layers=config.most_layers(depth), layer_choice=None)
    draft = initial_draft(config, target, root)
    target.unload()
    cast_parameters(draft, resolve_dtype(config.dtype, default_device()))
    head = domain_token_ids(stored.train, head_tokens, target.eos_token_ids, shared)
    drafter = ModelDrafter(draft, head, half_weights)
    vocabulary = range(target.vocabulary_size)
    found = teacher_forced(drafter, None, stored.dev, vocabulary, Sampling(), tokens_per_forward)
    domains = aggregate(found, lambda row: row.domain)
    return {domain: agreement_metrics(rows, bootstrap_samples) for domain, rows in domains.items()}
