"""How well drafts guess the target's stored answers: which to distil, or whether one needs to be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import DraftConfig, check_draft, initial_draft, load_draft
from pipeline.adapters.targets import Target, check_same_target
from pipeline.core.answers import Answer
from pipeline.core.drafters import ModelDrafter
from pipeline.core.evaluation import Agreement, agreement_metrics, lookup_agreement, teacher_forced
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


@dataclass
class Scoring:
    """How drafts are served, and how they are scored."""

    sampling: Sampling
    head_tokens: int  # of a draft that is not distilled yet
    half_weights: bool
    tokens_per_forward: int
    bootstrap_samples: int


def read_stored_answers(target: Target, folder: Path) -> StoredAnswers:
    """The splits of `folder`; raises `PipelineError` where they are missing or another target's."""
    check_same_target(read_facts(folder / "dev"), target)
    return StoredAnswers(target, read_answers(folder / "train"), read_answers(folder / "dev"))


def takes_weights_of_target(config: DraftConfig) -> bool:
    """Whether the draft starts from layers or embeddings of the target."""
    return config.init in ("pruned", "config")


def score_start(config: DraftConfig, stored: StoredAnswers, scoring: Scoring, root: Path) -> dict[str, dict[str, dict]]:
    """domain (and "all") -> the token acceptances of a draft before distillation, as measures.

    The target's stored probabilities stand for it: its weights are loaded only where the draft starts from them
    (`takes_weights_of_target`). Where its layers are still to be chosen, it has the most that are tried.
    """
    target = stored.target
    shared = check_draft(config, target, root).shared_ids
    if config.layer_choice:
        depth = target.model_config.get_text_config().num_hidden_layers
        config = replace(config, keep_layers=config.most_layers(depth), layer_choice=None)
    draft = initial_draft(config, target, root)
    target.unload()
    cast_parameters(draft, resolve_dtype(config.dtype, default_device()))
    head = domain_token_ids(stored.train, scoring.head_tokens, target.eos_token_ids, shared)
    return _score(draft, head, stored, scoring)


def score_distilled(folder: Path, stored: StoredAnswers, scoring: Scoring) -> dict[str, dict[str, dict]]:
    """As `score_start`, of the distilled draft in `folder` with its own trimmed head."""
    return _score(*load_draft(folder, stored.target), stored, scoring)


def score_lookup(stored: StoredAnswers, max_ngram: int, bootstrap_samples: int) -> dict[str, dict[str, dict]]:
    """As `score_start`, of prompt lookup, greedily."""
    return _by_domain(lookup_agreement(stored.dev, max_ngram, Sampling()), bootstrap_samples)


def _score(
    draft: PreTrainedModel, head: list[int], stored: StoredAnswers, scoring: Scoring
) -> dict[str, dict[str, dict]]:
    drafter = ModelDrafter(draft, head, scoring.half_weights)
    vocabulary = range(stored.target.vocabulary_size)
    found = teacher_forced(drafter, None, stored.dev, vocabulary, scoring.sampling, scoring.tokens_per_forward)
    return _by_domain(found, scoring.bootstrap_samples)


def _by_domain(found: list[Agreement], bootstrap_samples: int) -> dict[str, dict[str, dict]]:
    domains = aggregate(found, lambda row: row.domain)
    return {domain: agreement_metrics(rows, bootstrap_samples) for domain, rows in domains.items()}
