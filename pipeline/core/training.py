"""The settings of distillation."""

from __future__ import annotations

from dataclasses import dataclass

RANGES = (
    ("epochs", 1e-6, 1e6),
    ("learning_rate", 1e-9, 1.0),
    ("warmup_share", 0.0, 1.0),
    ("weight_decay", 0.0, 1.0),
    ("adam_beta2", 0.0, 1 - 1e-6),
    ("max_grad_norm", 1e-6, 1e6),
)


@dataclass
class DistillConfig:
    """How the draft is trained."""

    epochs: float  # passes over the train answers
    learning_rate: float  # peak; warm-up is linear, decay a cosine to 0
    warmup_share: float  # of all optimiser steps
    weight_decay: float
    adam_beta2: float
    max_grad_norm: float
    tokens_per_step: int  # tokens of an optimiser step, prompts and padding included
    tokens_per_forward: int  # tokens of one forward pass; gradients accumulate up to tokens_per_step
    evaluations: int  # times that dev token acceptance is measured; the best checkpoint is kept
    head_tokens: int  # size of the draft's trimmed head
    train_on_prompts: bool  # the prompts' tokens count like the answers'
    freeze_embeddings: bool  # keep the initial token embeddings (and the head, where it is tied to them)

    def __post_init__(self) -> None:
        for name, low, high in RANGES:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"distill.{name} must lie between {low:g} and {high:g}, got {getattr(self, name)}")
        for name in ("tokens_per_step", "tokens_per_forward", "evaluations", "head_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"distill.{name} must be >= 1, got {getattr(self, name)}")
