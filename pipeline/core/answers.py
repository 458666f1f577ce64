"""The target's answers with its probabilities: what crosses from generation to distillation, as ids and arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling

MASS_ROUNDING = 5e-3  # of a sum of probabilities that were stored in half precision
ROUNDING = 1e-3  # a log-probability may come out this much above 0


@dataclass
class GenerateConfig:
    """How the target answers the prompts."""

    max_new_tokens: int  # longest answer, tokens
    sampled_share: float  # of train prompts answered by sampling, in [0, 1]
    sampling: Sampling  # how those are sampled
    top_logprobs: int  # alternatives stored per token of prompt and answer
    batch_size: int  # rows decoded together
    shard_rows: int  # answers per Parquet shard

    def __post_init__(self) -> None:
        if not 0 <= self.sampled_share <= 1:
            raise ValueError(f"generate.sampled_share must be in [0, 1], got {self.sampled_share}")
        if self.sampled_share and self.sampling.greedy:
            raise ValueError("generate.sampling.temperature must be > 0 where generate.sampled_share is")
        for name in ("max_new_tokens", "top_logprobs", "batch_size", "shard_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"generate.{name} must be >= 1, got {getattr(self, name)}")

    @property
    def facts(self) -> dict:
        """The settings that decide what the answers are, as JSON values; the others decide how fast they come."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "sampled_share": self.sampled_share,
            "sampling": vars(self.sampling),
            "top_logprobs": self.top_logprobs,
        }


@dataclass
class Answer:
    """One answered prompt.

    prompt_ids [m] and answer_ids [n] int32; logprobs [n] float32, the target's log-probability of each answer token;
    top_ids [n, top] int32 and top_logprobs [n, top] float32, most probable first; prompt_top_ids and prompt_top_logprobs
    [m - 1, top], the same for the prompt's tokens after the first; `sampling` and `seed` say how
    the answer was drawn. Log-probabilities are log-softmax of the raw logits at
    temperature 1 over real token ids.
    """

    prompt_id: str
    domain: str
    task: str
    cluster: str
    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    finish_reason: str
    sampling: Sampling
    seed: int
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    prompt_top_ids: np.ndarray
    prompt_top_logprobs: np.ndarray

    def __post_init__(self) -> None:
        length = len(self.answer_ids)
        answer_fits = (
            len(self.logprobs) == len(self.top_ids) == length and self.top_ids.shape == self.top_logprobs.shape
        )
        prompt_fits = (
            self.prompt_top_ids.shape
            == self.prompt_top_logprobs.shape
            == (
                len(self.prompt_ids) - 1,
                self.top_ids.shape[-1],
            )
        )
        if not answer_fits or not prompt_fits:
            raise ValueError(f"{self.prompt_id}: log-probabilities are not aligned with the ids")


def check_same_settings(facts: dict, settings: GenerateConfig) -> None:
    """Raise `PipelineError` when answers with these facts were generated with other settings than the configured ones."""
    differing = [
        f"{name} was {facts.get(name)}, is {value}"
        for name, value in settings.facts.items()
        if facts.get(name) != value
    ]
    if differing:
        raise PipelineError(
            f"data/answers were generated with other settings (generate.{'; generate.'.join(differing)}).",
            "repeat the overrides of that run, or run `make repro` with those you want now.",
        )


def check_entries(answer: Answer, vocabulary_size: int) -> None:
    """Raise `PipelineError` unless each token's stored entries are distinct real ids with finite log-probabilities."""
    for ids, logprobs in (
        (answer.top_ids, answer.top_logprobs),
        (answer.prompt_top_ids, answer.prompt_top_logprobs),
    ):
        ordered = np.sort(ids, axis=-1)
        if ((ordered < 0) | (ordered >= vocabulary_size)).any():
            fault = f"ids outside 0 to {vocabulary_size - 1}"
        elif (ordered[:, 1:] == ordered[:, :-1]).any():
            fault = "an id twice for one token"
        elif not (np.isfinite(logprobs) & (logprobs < ROUNDING)).all():
            fault = "log-probabilities that are above 0 or not finite"
        elif (np.exp(logprobs).sum(axis=-1) > 1 + MASS_ROUNDING).any():
            fault = "more probability than 1"
        elif (logprobs[:, 1:] > logprobs[:, :-1]).any():
            fault = "a more probable entry after a less probable one"
        else:
            continue
        raise PipelineError(
            f"The stored top of prompt {answer.prompt_id} has {fault}.",
            "delete data/answers and run `dvc repro`; if it comes again, the target's logits are broken: try another"
            " target.dtype.",
        )


def is_looping(answer_ids: np.ndarray, ngram: int = 4, share: float = 0.5) -> bool:
    """Whether more than `share` of the answer's n-grams have occurred in it before: the text repeats itself."""
    grams = [tuple(answer_ids[i : i + ngram]) for i in range(len(answer_ids) - ngram + 1)]
    return len(grams) > 0 and 1 - len(set(grams)) / len(grams) > share
