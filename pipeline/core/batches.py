"""Answers as teacher-forced batches: what the draft sees, and its logits before each answer token.

Rows of similar length share a batch, padded on the right: under causal attention no real token sees the padding, so no
mask is needed. Which positions count follows from lengths, never from token values. Widths and counts are rounded up, so
that batches have few distinct shapes: kernels that are made for a shape are made a few times, not for every batch.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.core.answers import Answer
from pipeline.core.errors import PipelineError

logger = logging.getLogger(__name__)

WIDTH_STEP = 16  # the length of a batch is a multiple of this many tokens
COUNT_STEP = 64  # the output head runs on a multiple of this many positions


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


class AnswerBatches(Dataset):
    """Answers grouped into batches of at most `tokens_per_forward` tokens, similar lengths together; no batch is wider than
    `max_positions`.

    The n scored tokens are the answers'; with `prompts` also those of the prompts after the first. Item i: input_ids
    [rows, length]; query [n], flat index of the position that predicts each scored token; labels [n], the scored tokens;
    target [n], the target's most probable token there; top_ids [n, top], the stored entries; top_index [n, top], column of
    each in the trimmed head or -1; top_logprobs [n, top]; index, the item's own number.
    """

    def __init__(
        self,
        answers: list[Answer],
        head_token_ids: list[int],
        tokens_per_forward: int,
        seed: int,
        prompts: bool = False,
        max_positions: int | None = None,
    ) -> None:
        self.prompts = prompts
        self.max_positions = max_positions
        answers = _fitting(answers, max_positions)
        rng = np.random.default_rng(seed)
        order = sorted(rng.permutation(len(answers)), key=lambda i: _length(answers[i]))
        self.groups: list[list[Answer]] = [[]]
        for index in order:
            answer = answers[index]
            width = _rounded_up(_length(answer), WIDTH_STEP)
            if self.groups[-1] and (len(self.groups[-1]) + 1) * width > tokens_per_forward:
                self.groups.append([])
            self.groups[-1].append(answer)
        stored = [ids for answer in answers for ids in (answer.top_ids, answer.prompt_top_ids) if ids.size]
        size = 1 + max(max(head_token_ids), *(int(ids.max()) for ids in stored))
        self.column = np.full(size, -1, dtype=np.int64)
        self.column[head_token_ids] = np.arange(len(head_token_ids))

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def padded_tokens(self) -> int:
        """Tokens of all batches together, padding included."""
        return sum(len(group) * self._width(group) for group in self.groups)

    def _width(self, group: list[Answer]) -> int:
        width = _rounded_up(max(map(_length, group)), WIDTH_STEP)
        return min(width, self.max_positions or width)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        group = self.groups[index]
        width = self._width(group)
        input_ids = np.zeros((len(group), width), dtype=np.int64)
        query, labels = [], []
        for row, answer in enumerate(group):
            ids = np.concatenate([answer.prompt_ids, answer.answer_ids])
            input_ids[row, : len(ids) - 1] = ids[:-1]
            first = 1 if self.prompts else len(answer.prompt_ids)
            labels.append(ids[first:])
            query.append(row * width + np.arange(first - 1, len(ids) - 1))
        top_ids = self._scored(group, "top_ids")
        scored = torch.from_numpy(np.concatenate(labels).astype(np.int64))
        return {
            "input_ids": torch.from_numpy(input_ids),
            "query": torch.from_numpy(np.concatenate(query)),
            "labels": scored,
            "shift_labels": scored,  # tells the Trainer that labels are aligned already, when it counts them
            "target": torch.from_numpy(top_ids[:, 0].astype(np.int64)),
            "top_ids": torch.from_numpy(top_ids.astype(np.int64)),
            "top_index": torch.from_numpy(self.column[top_ids]),
            "top_logprobs": torch.from_numpy(self._scored(group, "top_logprobs")),
            "index": torch.tensor(index),
        }

    def counts(self, index: int) -> list[int]:
        """Scored tokens of each answer of item `index`."""
        return [len(a.answer_ids) + (len(a.prompt_ids) - 1 if self.prompts else 0) for a in self.groups[index]]

    def prompt_ids(self, index: int, tokens: np.ndarray) -> list[str]:
        """The prompts to which the scored tokens number `tokens` of item `index` belong."""
        rows = np.searchsorted(np.cumsum(self.counts(index)), tokens, side="right")
        return [self.groups[index][row].prompt_id for row in np.unique(rows)]

    def _scored(self, group: list[Answer], name: str) -> np.ndarray:
        """The stored entries `name` of the scored tokens, [n, top]."""
        parts = (f"prompt_{name}", name) if self.prompts else (name,)
        return np.concatenate([getattr(answer, part) for answer in group for part in parts])


def _fitting(answers: list[Answer], max_positions: int | None) -> list[Answer]:
    """Those that the model has positions for; the others are counted in a warning."""
    fitting = [answer for answer in answers if max_positions is None or _length(answer) <= max_positions]
    if not fitting:
        raise PipelineError(
            f"None of {len(answers)} answers with its prompt fits into the draft's {max_positions} positions.",
            "choose a draft with a longer context, or lower generate.max_new_tokens.",
        )
    if len(fitting) < len(answers):
        logger.warning(
            "%d answers exceed the draft's %d positions: left out", len(answers) - len(fitting), max_positions
        )
    return fitting


def _length(answer: Answer) -> int:
    return len(answer.prompt_ids) + len(answer.answer_ids) - 1


def check_plain_head(config: PreTrainedConfig, role: str, remedy: str) -> None:
    """Raise `PipelineError` for a model that changes its logits after the output head (soft cap, scale); `role` names it."""
    text = config.get_text_config()
    changes = [
        name
        for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1))
        if getattr(text, name, neutral) not in (neutral, None)
    ]
    if changes:
        raise PipelineError(
            f"A {text.model_type} {role} changes its logits after the head ({', '.join(changes)}), which distillation"
            " does not reproduce.",
            remedy,
        )


def answer_hidden(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The last hidden states before each scored token, [n rounded up to a multiple of `COUNT_STEP`, width]."""
    known = batch["input_ids"].clamp(max=model.get_input_embeddings().num_embeddings - 1)
    hidden = model.get_decoder()(input_ids=known, use_cache=False).last_hidden_state
    count = len(batch["query"])
    query = F.pad(batch["query"], (0, _rounded_up(count, COUNT_STEP) - count))
    return hidden.reshape(-1, hidden.shape[-1])[query]


def answer_logits(model: PreTrainedModel, batch: dict[str, Tensor], head_token_ids: Tensor | None) -> Tensor:
    """The model's logits before each scored token, [n, head]; the whole head when `head_token_ids` is None."""
    count = len(batch["query"])
    hidden = answer_hidden(model, batch)
    head = model.get_output_embeddings()
    if head_token_ids is None:
        return head(hidden)[:count]
    bias = None if head.bias is None else head.bias[head_token_ids]
    return F.linear(hidden, head.weight[head_token_ids], bias)[:count]
