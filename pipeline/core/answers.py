"""The target's answers with its probabilities: what crosses from generation to distillation, as ids and arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.core.sampling import Sampling


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


def is_looping(answer_ids: np.ndarray, ngram: int = 4, share: float = 0.5) -> bool:
    """Whether more than `share` of the answer's n-grams have occurred in it before: the text repeats itself."""
    grams = [tuple(answer_ids[i : i + ngram]) for i in range(len(answer_ids) - ngram + 1)]
    return len(grams) > 0 and 1 - len(set(grams)) / len(grams) > share
