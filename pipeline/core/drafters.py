"""What guesses the next tokens: a draft model, a copy from the row's own text, or the one and else the other.

A drafter sees the rows in flight (their committed tokens, prompt and answer so far) and returns drafted ids with the exact
distributions they were drawn from. Rollback, counting and stopping belong to the decoding loop.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from pipeline.core.cache import CachedModel, input_device
from pipeline.core.errors import PipelineError
from pipeline.core.linear import is_dispatched
from pipeline.core.replay import Replayed
from pipeline.core.sampling import PURPOSE_DRAFT, PURPOSES, Proposal, Sampling, draw, probabilities, uniforms


@dataclass
class Batch:
    """The rows in flight, as the host and as the device know them; the device may hold idle rows after them.

    committed      the tokens of each row, prompt and answer so far
    sizes          int64 [rows], how many they are
    tail           int64 [rows, 2], the last two of them
    seeds          int64 [rows]
    hidden_states  [rows, hidden], what the target's output head was given to choose the last token of each row; None
                   unless the drafter asks for it
    """

    committed: list[list[int]]
    sizes: Tensor
    tail: Tensor
    seeds: Tensor
    hidden_states: Tensor | None = None


class Drafter(Protocol):
    """Rows are numbered as in the decoder: row i of every call is slot i of the batch."""

    max_positions: int | None  # it cannot draft well, or at all, beyond so many tokens of text; None: it always can
    wants_hidden_states: bool  # whether `Batch.hidden_states` is filled, for heads such as Medusa's

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        """Make ready for a batch of at most `rows` rows; only ids in `vocabulary` may be drafted.

        A drafter serves one decoder at a time: opening it again ends what it knew.
        """

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        """New rows start at `first_row` with these prompts; each will need `room` positions at most."""

    def propose(self, batch: Batch, lengths: list[int]) -> Proposal:
        """Draft up to `lengths[i]` tokens after the text of row i. The proposal has as many rows as `batch.sizes`."""

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` now has the number `destination`."""


class DraftLengthPolicy(Protocol):
    """Decides how long each row's drafts are while they are made; see `pipeline.core.draft_length`."""

    def begin(self, row: int) -> None:
        """A new text starts in this row."""

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` now has the number `destination`."""

    def wants_more(self, row: int) -> bool:
        """Whether the row's draft in progress should get another token."""

    def drafted(self, row: int, confidence: float) -> None:
        """It got one, the draft's most probable having had this probability."""

    def verified(self, row: int, kept: int) -> None:
        """The target kept the first `kept` tokens of it; it is no longer in progress."""


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


@dataclass
class _DraftedRow:
    """What a draft model knows of a row (counts of tokens)."""

    in_cache: int  # committed tokens that its cache holds
    began: int = 0  # committed tokens when its last draft began
    drafted: int | None = None  # of the draft that awaits verification; None: there is none


class ModelDrafter:
    """A causal language model drafts token by token, from its own distribution over `head_token_ids`.

    The distribution is renormalised over those ids, so any choice of them keeps decoding lossless; the fewer they are,
    the cheaper a draft step is. `half_weights` makes it cheaper too: on a CPU, weights are streamed in half as many bytes.
    A token of the target that the draft has no embedding for is shown to it as the last one that it has.

    Without `adaptive` all steps of a round run as one function of the device. With it the host looks at the draft's
    confidence after every step, and a row stops where its next token would not be worth its cost.
    """

    wants_hidden_states = False

    def __init__(
        self,
        model: PreTrainedModel,
        head_token_ids: Sequence[int] | None = None,
        half_weights: bool = False,
        adaptive: DraftLengthPolicy | None = None,
    ) -> None:
        self.model = model
        self.head_token_ids = head_token_ids
        self.half_weights = half_weights
        self.adaptive = adaptive

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
        self._loop = Replayed(self._run, self.cached.device, self.cached.is_whole)
        self._rows = [_DraftedRow(0) for _ in range(rows)]
        self._lengths: list[int] = []  # as last proposed; most rounds propose the same again

    @property
    def max_positions(self) -> int | None:
        return self.cached.max_positions

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        """A prompt that is longer than the draft's context is cut there: such a row is never drafted for."""
        limit = self.max_positions or room
        if self.cached.reserve(min(room, limit)):
            self._loop.clear()
        prompts = [prompt[:limit] for prompt in prompts]
        longest = max(map(len, prompts))
        token_ids, positions = pad_right(prompts, longest, self.cached.device)
        visible = self.cached.visible(longest)
        self.cached.forward(first_row, token_ids.clamp(max=self.last_known), positions, visible, logits_to_keep=1)
        for row, prompt in enumerate(prompts, start=first_row):
            self._rows[row] = _DraftedRow(len(prompt))
            if self.adaptive:
                self.adaptive.begin(row)

    def observe(self, committed: list[list[int]]) -> list[int]:
        """Take note of what became of the last drafts; returns how many committed tokens each row's cache lacks.

        The cache holds every drafted token but the last; those that were kept are committed now.
        """
        for row, (tokens, state) in enumerate(zip(committed, self._rows, strict=False)):
            if state.drafted is not None:
                kept = len(tokens) - state.began - 1
                state.in_cache += max(0, min(kept, state.drafted - 1))
                state.drafted = None
                if self.adaptive:
                    self.adaptive.verified(row, kept)
        return [len(tokens) - state.in_cache for tokens, state in zip(committed, self._rows, strict=False)]

    def propose(self, batch: Batch, lengths: list[int]) -> Proposal:
        """The first step feeds the tokens that the cache lacks, at least the last two: writing one again is harmless.

        Near the end of the draft's context a row gets fewer tokens, and none beyond it.
        """
        missing = self.observe(batch.committed)
        if limit := self.max_positions:
            room = [max(0, limit + 1 - len(tokens)) for tokens in batch.committed]
            lengths = [min(pair) for pair in zip(lengths, room, strict=True)]
        if not any(lengths):
            return certain_proposal([[]] * len(batch.sizes), self.cached.device)
        most = lengths
        largest = max(gap for gap, length in zip(missing, most, strict=True) if length)
        width = 2 if largest <= 2 else 1 << (largest - 1).bit_length()
        last = batch.tail if width == 2 else self._last_tokens(batch, width)
        if self.adaptive:
            drafted, distributions, lengths = self._draft_adaptively(batch, last, most)
        else:
            drafted, distributions, _ = self._steps(batch, last, 0, max(most))
        for state, tokens, gap, length, done in zip(self._rows, batch.committed, missing, most, lengths, strict=False):
            state.began, state.drafted = len(tokens), done if length else None
            if drafted.shape[1] and gap <= width:
                state.in_cache = len(tokens)
        lengths = [*lengths, *[0] * (len(batch.sizes) - len(lengths))]
        if lengths != self._lengths:
            self._lengths, self._lengths_on_device = lengths, torch.tensor(lengths, device=drafted.device)
        return Proposal(drafted, self._lengths_on_device, distributions, self.support)

    def withdraw(self, row: int) -> None:
        """The draft just proposed for this row is not used."""
        self._rows[row].drafted = None

    def move_row(self, source: int, destination: int) -> None:
        self.cached.move_row(source, destination)
        self._rows[destination] = self._rows[source]
        if self.adaptive:
            self.adaptive.move_row(source, destination)

    def _last_tokens(self, batch: Batch, width: int) -> Tensor:
        """The last `width` committed tokens of each row, [rows, width]; 0 before the first.

        Those zeros are written at the cache's last position, which no text has reached, and overwritten if one does.
        """
        rows = [([0] * width + tokens)[-width:] for tokens in batch.committed]
        rows += [[0] * width] * (len(batch.sizes) - len(rows))
        return torch.tensor(rows, device=self.cached.device)

    def _draft_adaptively(
        self, batch: Batch, tokens: Tensor, most: list[int]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Draft step by step until no row wants more; returns ids, distributions and each row's length."""
        lengths = [0] * len(most)
        found: list[tuple[Tensor, Tensor | None]] = []
        while True:
            rows = [
                row
                for row, length in enumerate(lengths)
                if length == len(found) < most[row] and self.adaptive.wants_more(row)
            ]
            if not rows:
                break
            drafted, distributions, confidence = self._steps(batch, tokens, len(found), 1)
            tokens = drafted.clone()
            found.append((tokens, distributions if distributions is None else distributions.clone()))
            sure = confidence[:, 0].tolist()
            for row in rows:
                lengths[row] += 1
                self.adaptive.drafted(row, sure[row])
        ids = torch.cat([batch.tail[:, :0], *[ids for ids, _ in found]], dim=1)
        sampled = bool(found) and not self.sampling.greedy
        return ids, torch.cat([part for _, part in found], dim=1) if sampled else None, lengths

    def _steps(
        self, batch: Batch, tokens: Tensor, done: int, steps: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`_run` for `steps` more drafted tokens after `done`, of which `tokens` are the last."""
        visible = self.cached.visible(max(map(len, batch.committed)) + done + steps - 1)
        return self._loop((steps, visible), tokens, batch.sizes, batch.seeds, batch.sizes.new_full((1,), done))

    def _run(
        self, steps: int, visible: int, tokens: Tensor, sizes: Tensor, seeds: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draft `steps` tokens after `tokens` [rows, width], the last of texts of `sizes` [rows] tokens and `done` [1] more
        drafted ones.

        Every draft draws anew: a position that is drafted again after a rejection gets another uniform, so that whatever
        the draft length is decided from, the old draft included, says nothing about the new one.

        Returns ids [rows, steps], the distributions that they were drawn from [rows, steps, support] (None: greedy) and the
        draft's highest probability at each step [rows, steps] (None: nobody asks).
        """
        ids, distributions, confidences = [], [], []
        for step in range(steps):
            width = tokens.shape[1]
            positions = (sizes + done + step)[:, None] + torch.arange(-width, 0, device=sizes.device)
            positions = positions.masked_fill(
                positions < 0, self.cached.capacity - 1
            )  # before the text: see `_last_tokens`
            known = tokens.clamp(max=self.last_known)
            logits = self.cached.forward(0, known, positions, visible, logits_to_keep=1)[:, -1]
            if self.sampling.greedy:
                choice = logits.argmax(dim=-1)
            else:
                distributions.append(probabilities(logits, self.sampling))
                purpose = PURPOSE_DRAFT + PURPOSES * (done + step)
                chance = uniforms(seeds, (sizes + done + step)[:, None], purpose)[:, 0]
                choice = draw(distributions[-1], chance)
            if self.adaptive:
                confidences.append(logits.float().softmax(dim=-1).amax(dim=-1))
            tokens = self.support[choice][:, None]
            ids.append(tokens)
        return (
            torch.cat(ids, dim=1),
            torch.stack(distributions, dim=1) if distributions else None,
            torch.stack(confidences, dim=1) if confidences else None,
        )


class NgramIndex:
    """Where each n-gram of a growing text last occurred before its end."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._indexed = 1

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """`tokens` is the text so far, longer at every call. Returns the length of the longest n-gram that ends it and
        occurs earlier, and the index of what followed its last occurrence; (0, 0) without one."""
        for start in range(self._indexed, len(tokens)):
            for size in range(1, min(self.max_ngram, start) + 1):
                self._next[size - 1][tuple(tokens[start - size : start])] = start
        self._indexed = max(self._indexed, len(tokens))
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            following = self._next[size - 1].get(tuple(tokens[-size:]))
            if following is not None:
                return size, following
        return 0, 0


class PromptLookupDrafter:
    """Copies what followed the last occurrence of the row's final n-gram (Saxena, "Prompt Lookup Decoding", 2023).

    The longest n-gram from `max_ngram` down to `min_ngram` that occurs earlier in the row decides; without one, nothing is
    drafted.
    """

    max_positions = None
    wants_hidden_states = False

    def __init__(self, max_ngram: int, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        self.vocabulary = vocabulary if isinstance(vocabulary, range) else frozenset(vocabulary)
        self._indexes: dict[int, NgramIndex] = {}

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        for row in range(first_row, first_row + len(prompts)):
            self._indexes[row] = NgramIndex(self.max_ngram)

    def propose(self, batch: Batch, lengths: list[int]) -> Proposal:
        found = [self.copied(row, tokens, length) for row, (tokens, length) in enumerate(zip(batch.committed, lengths))]
        found += [[]] * (len(batch.sizes) - len(found))
        return certain_proposal(found, batch.sizes.device)

    def copied(self, row: int, tokens: list[int], length: int) -> list[int]:
        """Up to `length` tokens to draft after `tokens`, the text of this row."""
        size, following = self._indexes[row].match(tokens)
        if size < self.min_ngram:
            return []
        copied = tokens[following : following + length]
        legal = [token in self.vocabulary for token in copied] + [False]
        return copied[: legal.index(False)]

    def move_row(self, source: int, destination: int) -> None:
        self._indexes[destination] = self._indexes[source]


class LookupThenModelDrafter:
    """Copies from the row's own text where a long enough n-gram repeats, and asks a draft model elsewhere.

    Copies cost no pass of the draft model; in a round where every row copies, it does not run at all and catches up with
    the text when it is next asked.
    """

    wants_hidden_states = False

    def __init__(self, lookup: PromptLookupDrafter, model: ModelDrafter) -> None:
        self.lookup = lookup
        self.model = model

    @property
    def max_positions(self) -> int | None:
        return self.model.max_positions

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        self.lookup.open(rows, sampling, vocabulary)
        self.model.open(rows, sampling, vocabulary)

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        self.lookup.begin(first_row, prompts, room)
        self.model.begin(first_row, prompts, room)

    def propose(self, batch: Batch, lengths: list[int]) -> Proposal:
        self.model.observe(batch.committed)
        copies = [self.lookup.copied(row, batch.committed[row], length) for row, length in enumerate(lengths)]
        asked = [0 if copy else length for copy, length in zip(copies, lengths, strict=True)]
        copies += [[]] * (len(batch.sizes) - len(copies))
        copied = certain_proposal(copies, batch.sizes.device)
        if not any(asked):
            return copied
        return _either(copied, self.model.propose(batch, asked))

    def move_row(self, source: int, destination: int) -> None:
        self.lookup.move_row(source, destination)
        self.model.move_row(source, destination)


def certain_proposal(drafts: list[list[int]], device: torch.device) -> Proposal:
    """Drafts of any lengths whose tokens were not drawn but are certain: q is one-hot."""
    width = max(map(len, drafts))
    padded = [tokens + [0] * (width - len(tokens)) for tokens in drafts]
    return Proposal(
        token_ids=torch.tensor(padded, dtype=torch.long, device=device).reshape(len(drafts), width),
        lengths=torch.tensor([len(tokens) for tokens in drafts], device=device),
    )


def _either(certain: Proposal, drawn: Proposal) -> Proposal:
    """Row by row the first where it has tokens, else the second."""
    first = certain.lengths > 0
    width = max(certain.token_ids.shape[1], drawn.token_ids.shape[1])
    ids = [F.pad(part.token_ids, (0, width - part.token_ids.shape[1])) for part in (certain, drawn)]
    q = drawn.probabilities
    return Proposal(
        token_ids=torch.where(first[:, None], *ids),
        lengths=torch.where(first, certain.lengths, drawn.lengths),
        probabilities=None if q is None else F.pad(q, (0, 0, 0, width - q.shape[1])),
        support=drawn.support,
        certain=None if q is None else first,
    )


def pad_right(rows: list[list[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [rows, width] padded with 0, and positions [rows, width] counting from 0.

    What the padding writes into the cache lies beyond the row's end and is overwritten before it can be seen.
    """
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    positions = torch.arange(width, device=device).expand(len(rows), width)
    return token_ids, positions
