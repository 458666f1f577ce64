"""What guesses the next tokens: a draft model, or a copy from the row's own text.

A drafter sees the committed tokens of each row (prompt and answer so far) and returns drafted ids with the exact
distributions they were drawn from. Rollback, counting and stopping belong to the decoding loop.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.core.cache import CachedModel, input_device
from pipeline.core.errors import PipelineError
from pipeline.core.linear import is_dispatched
from pipeline.core.sampling import PURPOSE_DRAFT, Proposal, Sampling, draw, probabilities, uniforms


class Drafter(Protocol):
    """Rows are numbered as in the decoder: row i of every call is slot i of the batch."""

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        """Make ready for a batch of at most `rows` rows; only ids in `vocabulary` may be drafted."""

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        """New rows start at `first_row` with these prompts; each will need `room` positions at most."""

    def propose(self, committed: list[list[int]], lengths: list[int], seeds: Tensor) -> Proposal:
        """Draft up to `lengths[i]` tokens after `committed[i]` for rows 0, 1, ..."""

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` now has the number `destination`."""


def head_size(model: PreTrainedModel) -> int:
    """Number of logits, padding included."""
    return model.get_output_embeddings().out_features


def with_trimmed_head(model: PreTrainedModel, token_ids: Tensor) -> PreTrainedModel:
    """A view of `model` whose output head holds only the rows of `token_ids`; logit i then belongs to token_ids[i]."""
    head = model.get_output_embeddings()
    if is_dispatched(model) or is_dispatched(head):
        raise PipelineError(
            f"The head of the draft {model.config.name_or_path} cannot be trimmed: its layers are spread over devices.",
            "load the draft whole on one device, without device_map and tp_plan.",
        )
    trimmed = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    index = token_ids.to(head.weight.device)
    trimmed.weight = nn.Parameter(head.weight.detach()[index], requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[index], requires_grad=False)
    view = copy.copy(model)
    view._modules = dict(model._modules)
    view.set_output_embeddings(trimmed)
    return view


class ModelDrafter:
    """A causal language model drafts token by token, from its own distribution over `head_token_ids`.

    The distribution is renormalised over those ids, so any choice of them keeps decoding lossless; the fewer they are,
    the cheaper a draft step is. `half_weights` makes it cheaper too: on a CPU, weights are streamed in half as many bytes.
    A token of the target that the draft has no embedding for is shown to it as the last one that it has.
    """

    def __init__(
        self, model: PreTrainedModel, head_token_ids: Sequence[int] | None = None, half_weights: bool = False
    ) -> None:
        self.model = model
        self.head_token_ids = head_token_ids
        self.half_weights = half_weights

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        head_rows = head_size(self.model)
        allowed = sorted({token for token in vocabulary if token < head_rows})
        if self.head_token_ids is not None:
            allowed = sorted(set(allowed).intersection(self.head_token_ids))
        if not allowed:
            raise ValueError("the draft's head and the allowed tokens have no token in common")
        self.sampling = sampling
        self.support = torch.tensor(allowed, device=input_device(self.model))
        whole = len(allowed) == head_rows
        head = self.model if whole else with_trimmed_head(self.model, self.support)
        self.cached = CachedModel(head, rows, self.half_weights)
        self.last_known = self.model.get_input_embeddings().weight.shape[0] - 1

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        self.cached.reserve(room)
        longest = max(map(len, prompts))
        token_ids, positions = pad_right(prompts, longest, self.cached.device)
        self.cached.forward(first_row, token_ids.clamp(max=self.last_known), positions, longest, logits_to_keep=1)

    @property
    def max_positions(self) -> int | None:
        return self.cached.max_positions

    def propose(self, committed: list[list[int]], lengths: list[int], seeds: Tensor) -> Proposal:
        """The first step feeds the last two committed tokens: the cache may lack the one before the last, when the whole
        block was accepted, and writing it again is harmless."""
        device = self.cached.device
        steps = max(lengths)
        size = torch.tensor([len(tokens) for tokens in committed], device=device)
        longest = max(map(len, committed))
        token_ids = torch.tensor([tokens[-2:] for tokens in committed], device=device).clamp(max=self.last_known)
        positions = size[:, None] + torch.tensor([-2, -1], device=device)
        drafted, distributions = [], []
        for step in range(steps):
            logits = self.cached.forward(0, token_ids, positions, longest + step, logits_to_keep=1)[:, -1]
            if self.sampling.greedy:
                choice = logits.argmax(dim=-1)
            else:
                distribution = probabilities(logits, self.sampling)
                chance = uniforms(seeds, (size + step)[:, None], PURPOSE_DRAFT)[:, 0]
                choice = draw(distribution, chance)
                distributions.append(distribution)
            token_ids = self.support[choice][:, None]
            positions = (size + step)[:, None]
            drafted.append(token_ids)
        return Proposal(
            token_ids=torch.cat(drafted, dim=1),
            lengths=torch.tensor(lengths, device=device),
            probabilities=torch.stack(distributions, dim=1) if distributions else None,
            support=self.support,
        )

    def move_row(self, source: int, destination: int) -> None:
        self.cached.move_row(source, destination)


class PromptLookupDrafter:
    """Copies what followed the last occurrence of the row's final n-gram (Saxena, "Prompt Lookup Decoding", 2023).

    The longest n-gram from `max_ngram` down to 1 that occurs earlier in the row decides; without one, nothing is drafted.
    """

    max_positions = None

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        self.vocabulary = vocabulary if isinstance(vocabulary, range) else frozenset(vocabulary)

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        pass

    def propose(self, committed: list[list[int]], lengths: list[int], seeds: Tensor) -> Proposal:
        found = [self._continuation(tokens, length) for tokens, length in zip(committed, lengths, strict=True)]
        width = max(map(len, found))
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        return Proposal(
            token_ids=torch.tensor(padded, dtype=torch.long, device=seeds.device).reshape(len(found), width),
            lengths=torch.tensor([len(tokens) for tokens in found], device=seeds.device),
        )

    def move_row(self, source: int, destination: int) -> None:
        pass

    def _continuation(self, tokens: list[int], length: int) -> list[int]:
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            tail = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tail:
                    copied = tokens[start + size : start + size + length]
                    legal = [token in self.vocabulary for token in copied] + [False]
                    return copied[: legal.index(False)]
        return []


def pad_right(rows: list[list[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [rows, width] padded with 0, and positions [rows, width] counting from 0.

    What the padding writes into the cache lies beyond the row's end and is overwritten before it can be seen.
    """
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    positions = torch.arange(width, device=device).expand(len(rows), width)
    return token_ids, positions
