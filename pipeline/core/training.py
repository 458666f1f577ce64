"""The settings of distillation."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.losses import NAMES, check_beta

RANGES = (
    ("epochs", 1e-6, 1e6),
    ("learning_rate", 1e-9, 1.0),
    ("warmup_share", 0.0, 1.0),
    ("weight_decay", 0.0, 1.0),
    ("adam_beta2", 0.0, 1 - 1e-6),
    ("max_grad_norm", 1e-6, 1e6),
    ("kl_temperature", 1e-3, 1e3),
    ("selected_share", 1e-3, 1.0),
)
COUNTS = ("tokens_per_step", "tokens_per_forward", "evaluations", "head_tokens", "chunk_tokens")
OPTIONAL_COUNTS = ("sampled_rows", "patience")
CHOICES = (("loss", NAMES), ("target", ("stored", "online")), ("optimizer", ("adamw", "adamw_8bit")))


ON_POLICY_RANGES = (
    ("steps", 0, 1e9),
    ("learning_rate", 1e-9, 1.0),
    ("sampling_temperature", 1e-2, 1e2),
    ("kl_temperature", 1e-2, 1e2),
    ("prompts_per_step", 1, 1e6),
    ("max_new_tokens", 1, 1e6),
)


@dataclass
class OnPolicyConfig:
    """A phase after offline training in which the draft answers the train prompts itself and the target scores them."""

    steps: int  # optimiser steps; 0: no such phase
    learning_rate: float  # at the first step; decays linearly to 0
    beta: float  # 0: KL(target || draft), 1: KL(draft || target), between: generalised Jensen-Shannon divergence
    sampling_temperature: float  # of the draft's answers
    kl_temperature: float  # of both distributions in the loss
    prompts_per_step: int
    max_new_tokens: int  # of an answer

    def __post_init__(self) -> None:
        for name, low, high in ON_POLICY_RANGES:
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"distill.on_policy.{name} must lie between {low:g} and {high:g}, got {getattr(self, name)}"
                )
        try:
            check_beta(self.beta)
        except ValueError as error:
            raise ValueError(f"distill.on_policy.{error}") from None


@dataclass
class DistillConfig:
    """How the draft is trained."""

    loss: str  # divergence of the draft from the target: one of pipeline.core.losses.NAMES
    jensen_shannon_beta: float  # loss=jensen_shannon: 0 is forward KL, 1 reverse KL
    kl_temperature: float  # of both distributions inside the loss; other than 1 needs target=online
    target: str  # stored: probabilities of data/answers; online: the target runs beside the draft
    sampled_rows: (
        int | None
    )  # rows of the head outside the trimmed one, drawn for each step; null, or target=online: all of them
    selected_share: float  # of a forward pass's tokens that are trained, those with most left to learn; 1: all
    reference_draft: str | None  # selected_share < 1: folder of a draft that shows what can be learnt
    epochs: float  # passes over the train answers
    learning_rate: float  # peak; warm-up is linear, decay a cosine to 0
    warmup_share: float  # of all optimiser steps
    weight_decay: float
    adam_beta2: float
    max_grad_norm: float
    optimizer: str  # adamw | adamw_8bit (bitsandbytes: a quarter of the optimiser's memory)
    tokens_per_step: int  # tokens of an optimiser step, prompts and padding included, over all processes
    tokens_per_forward: int  # tokens of one forward pass of a process; gradients accumulate up to tokens_per_step
    chunk_tokens: int  # tokens whose logits exist at one time
    evaluations: int  # times that dev token acceptance is measured; the best checkpoint is kept
    patience: int | None  # evaluations without a better dev token acceptance after which training ends; null: none
    head_tokens: int  # size of the draft's trimmed head
    train_on_prompts: bool  # the prompts' tokens count like the answers'
    freeze_embeddings: bool  # keep the initial token embeddings (and the head, where it is tied to them)
    on_policy: OnPolicyConfig

    @property
    def target_in_loop(self) -> bool:
        """Whether the target itself is needed beside the draft."""
        return self.target == "online" or self.on_policy.steps > 0

    def __post_init__(self) -> None:
        for name, low, high in RANGES:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"distill.{name} must lie between {low:g} and {high:g}, got {getattr(self, name)}")
        for name in (*COUNTS, *OPTIONAL_COUNTS):
            value = getattr(self, name)
            if value is None and name in OPTIONAL_COUNTS:
                continue
            least = 0 if name == "sampled_rows" else 1
            if value < least:
                raise ValueError(f"distill.{name} must be >= {least}, got {value}")
        for name, allowed in CHOICES:
            if getattr(self, name) not in allowed:
                raise ValueError(f"distill.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        try:
            check_beta(self.jensen_shannon_beta)
        except ValueError as error:
            raise ValueError(f"distill.jensen_shannon_{error}") from None
        if self.kl_temperature != 1 and self.target == "stored":
            raise ValueError(
                "distill.kl_temperature other than 1 needs distill.target=online: the stored top at temperature 1 does not"
                " say how much the rest weighs at another temperature"
            )
        if (self.selected_share < 1) != bool(self.reference_draft):
            raise ValueError(
                "distill.selected_share below 1 and distill.reference_draft, the folder of a distilled draft, need each other"
            )
