"""What an evaluation compares, and how much of it is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List

from transformers import PreTrainedModel

from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling

PLAIN, LOOKUP, UNDISTILLED, DISTILLED, CHAMPION = "plain", "prompt_lookup", "undistilled", "distilled", "champion"
NAMES = (PLAIN, LOOKUP, UNDISTILLED, DISTILLED, CHAMPION)
MAY_BE_ZERO = (
    "timed_prompts_other", "baseline_prompts", "reference_prompts", "near_tie_gap", "sweep_prompts", "batch_prompts",
    "temperature_prompts", "condition_prompts_other",
)  # fmt: skip

LEAST = {
    "max_new_tokens": 2,  # the first token comes from the prefill
    "lossless_new_tokens": 2,
    "bootstrap_samples": 100,  # ends of 95 % intervals are among the outermost few
}


@dataclass
class DecodeSettings(Sampling):
    """How the draft is served: the sampling, and the tokens drafted per round."""

    draft_length: int | None = None  # k; null: chosen on dev
    draft_half_weights: bool = False  # on a CPU, stream the draft's weights in half as many bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_length is not None and self.draft_length < 1:
            raise ValueError(f"decode.draft_length must be >= 1 or null, got {self.draft_length}")

    @property
    def sampling(self) -> Sampling:
        """Without the rest."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass
class Sibling:
    """A smaller model of the target's family that is used as it comes."""

    name: str  # in tables
    id: str  # hub id or local folder
    revision: str | None = None  # hub revision


@dataclass
class EvaluateConfig:
    """How much is measured."""

    siblings: List[Sibling]  # candidates off the shelf
    max_new_tokens: int  # tokens decoded per timed prompt, EOS ignored
    timed_prompts: int  # golden prompts of the target domain, for the distilled draft and the champion
    timed_prompts_other: int  # golden prompts of each other domain
    baseline_prompts: int  # of those of the target domain, for all other candidates
    repeats: int  # times that each timed prompt is decoded; its run of median time counts
    reference_prompts: int  # of those of the target domain, for transformers' own plain decoding
    dev_prompts: int  # dev prompts of the target domain, for the choice of the draft length
    draft_lengths: List[int]  # candidates for k
    sweep_prompts: int  # of the dev prompts, timed at every k; 0: speedups by k are predicted only
    batch_sizes: List[int]  # prompts decoded together, beyond one
    batch_prompts: int  # golden prompts of the target domain decoded at each batch size
    temperatures: List[float]  # beside the serving one
    temperature_prompts: int  # golden prompts of the target domain decoded at each temperature
    condition_prompts_other: int  # dev or golden prompts of each other domain at every k, batch size and temperature; 0: the target domain alone
    baselines_everywhere: bool  # all candidates in every domain and at every k, batch size and temperature that is timed, not the distilled alone
    lookup_ngram: int  # longest n-gram that prompt lookup matches
    lossless_prompts: int  # golden prompts decoded in float32 when the timed runs are not
    lossless_new_tokens: int  # tokens of each
    near_tie_gap: float  # half precision: largest float32 logit gap at which a departure from plain decoding is legal
    bootstrap_samples: int  # resamples behind a 95 % interval
    tokens_per_forward: int  # tokens of one teacher-forced pass

    def __post_init__(self) -> None:
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise ValueError(f"evaluate.draft_lengths must be numbers >= 1, got {self.draft_lengths}")
        if any(size < 2 for size in self.batch_sizes):
            raise ValueError(
                f"evaluate.batch_sizes must be numbers >= 2 (1 is always measured), got {self.batch_sizes}"
            )
        for temperature in self.temperatures:
            try:
                Sampling(temperature=temperature)
            except ValueError as error:
                raise ValueError(f"evaluate.temperatures: {error}, got {self.temperatures}") from None
        taken = [sibling.name for sibling in self.siblings]
        if len({*taken, *NAMES}) < len(taken) + len(NAMES):
            raise ValueError(f"evaluate.siblings need names of their own, other than {', '.join(NAMES)}; got {taken}")
        for name, value in vars(self).items():
            if isinstance(value, list | bool):
                continue
            least = LEAST.get(name, 0 if name in MAY_BE_ZERO else 1)
            if not least <= value < float("inf"):
                raise ValueError(f"evaluate.{name} must be >= {least}, got {value}")


def check_draft_lengths(decode: DecodeSettings, config: EvaluateConfig) -> list[int]:
    """All k of which costs are measured, in order; raises `PipelineError` for one beyond the tokens that are decoded."""
    lengths = sorted({*config.draft_lengths, *([decode.draft_length] if decode.draft_length else [])})
    if lengths[-1] > config.max_new_tokens:
        raise PipelineError(
            f"A draft length of {lengths[-1]} exceeds the {config.max_new_tokens} tokens decoded per prompt.",
            "lower decode.draft_length or evaluate.draft_lengths, or raise evaluate.max_new_tokens.",
        )
    return lengths


@dataclass
class Draft:
    """A candidate's model, and the only ids that it guesses: those of the domain that both tokenizers share, or all shared."""

    model: PreTrainedModel
    token_ids: list[int]
    draft_length: int | None = None  # k at which it is served already; None: still to be chosen


@dataclass
class Contestants:
    """The models of an evaluation, the ids that the target may emit, and the target domain."""

    target: PreTrainedModel
    drafts: dict[str, Draft]  # `DISTILLED` among them
    half_weights: bool  # on a CPU, the drafts' weights are streamed in half as many bytes
    vocabulary: range
    domain: str
    skipped: dict[str, str] = field(default_factory=dict)  # candidates that do not take part, and why
    comparable: bool = True  # a champion that does not take part is another draft for the same target and template

    def drafter(self, name: str = DISTILLED) -> ModelDrafter:
        """One of the drafts as it is served."""
        draft = self.drafts[name]
        return ModelDrafter(draft.model, draft.token_ids, self.half_weights)
