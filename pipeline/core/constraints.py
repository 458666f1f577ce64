"""What the target may emit at each position of a block: allowed ids, penalties, minimum length, bad words.

Every position of a block is judged after the tokens before it, the drafted ones included, so that a verified block means
exactly what plain decoding means, one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class AllowedTokens:
    """Keeps logits of ids that must not be emitted out of every distribution."""

    def __init__(self, allowed: Sequence[int], vocabulary: int, device: torch.device) -> None:
        ids = torch.tensor(sorted(set(allowed)), device=device)
        self.count = len(ids)
        self.is_prefix = bool(ids[-1] == self.count - 1)
        self.logits = self.count if self.is_prefix else vocabulary  # how many `restrict` leaves
        self.forbidden = torch.ones(vocabulary, dtype=torch.bool, device=device)
        self.forbidden[ids] = False

    def restrict(self, logits: Tensor) -> Tensor:
        """[..., vocab] logits with the forbidden ids cut off, or at minus infinity where they lie in between."""
        if self.is_prefix:
            return logits[..., : self.count]
        return logits.masked_fill(self.forbidden, -torch.inf)


class Constraints:
    """Rules that depend on the text so far, applied to the target's logits before temperature and filters.

    `vocabulary` is the number of logits that `apply` sees.

    repetition_penalty r: a logit of an id in the prompt or the answer is divided by r if positive, else multiplied by it
    (Keskar et al., "CTRL", 2019; as in transformers). frequency_penalty f: minus f times the id's count in the answer
    (as in the OpenAI API). min_new_tokens: no end-of-sequence id before so many. bad_words: id sequences that never occur.
    """

    def __init__(
        self,
        repetition_penalty: float,
        frequency_penalty: float,
        min_new_tokens: int,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.repetition_penalty = repetition_penalty
        self.frequency_penalty = frequency_penalty
        ends = [token for token in eos_token_ids if token < vocabulary]
        self.min_new_tokens = min_new_tokens if ends else 0
        self.eos = torch.tensor(ends, dtype=torch.long, device=device)
        self.bad_words = [
            (torch.tensor(word[:-1], dtype=torch.long, device=device), word[-1])
            for word in bad_words
            if word[-1] < vocabulary
        ]

    @property
    def active(self) -> bool:
        penalties = self.repetition_penalty != 1 or self.frequency_penalty != 0
        return bool(penalties or self.min_new_tokens or self.bad_words)

    def apply(self, logits: Tensor, history: Tensor, prompt_sizes: Tensor, sizes: Tensor, drafted: Tensor) -> Tensor:
        """Constrained logits, float32 [rows, width, vocab].

        `history` int64 [rows, length]: each row's committed tokens, then -1. `prompt_sizes`, `sizes` int64 [rows]: how many
        of them are prompt, and how many there are. `drafted` int64 [rows, width - 1].
        """
        logits = logits.to(torch.float32, copy=True)
        if self.repetition_penalty != 1 or self.frequency_penalty != 0:
            logits = self._penalise(logits, history, prompt_sizes, drafted)
        for prefix, last in self.bad_words:
            follows = self._follows(prefix, history, sizes, drafted)
            logits[..., last] = logits[..., last].masked_fill(follows, -torch.inf)
        if self.min_new_tokens:
            index = torch.arange(logits.shape[1], device=logits.device)
            early = (sizes - prompt_sizes)[:, None] + index < self.min_new_tokens
            logits[..., self.eos] = logits[..., self.eos].masked_fill(early[..., None], -torch.inf)
        return logits

    def _penalise(self, logits: Tensor, history: Tensor, prompt_sizes: Tensor, drafted: Tensor) -> Tensor:
        rows, width, vocab = logits.shape  # what has no logit is counted in one entry more
        ids = history.masked_fill((history < 0) | (history >= vocab), vocab)
        is_answer = torch.arange(history.shape[1], device=logits.device) >= prompt_sizes[:, None]
        nothing = logits.new_zeros(rows, vocab + 1)
        block = F.pad(drafted.clamp(max=vocab), (1, 0), value=vocab)
        before = logits.new_zeros(rows, width, vocab + 1).scatter_(2, block[..., None], 1.0)
        before = before.cumsum(dim=1)[..., :vocab]
        if self.repetition_penalty != 1:
            anywhere = nothing.scatter_add(1, ids, torch.ones_like(ids, dtype=logits.dtype))[:, None, :vocab] + before
            penalised = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(anywhere > 0, penalised, logits)
        answered = nothing.scatter_add(1, ids, is_answer.to(logits.dtype))[:, None, :vocab] + before
        return logits - self.frequency_penalty * answered

    @staticmethod
    def _follows(prefix: Tensor, history: Tensor, sizes: Tensor, drafted: Tensor) -> Tensor:
        """Whether the tokens before each position of the block end in `prefix`, [rows, width]."""
        length = len(prefix)
        index = sizes[:, None] - length + torch.arange(length, device=sizes.device)
        recent = history.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)
        context = torch.cat([recent, drafted], dim=1)
        if length == 0:
            return torch.ones(len(sizes), drafted.shape[1] + 1, dtype=torch.bool, device=sizes.device)
        return (context.unfold(1, length, 1) == prefix).all(dim=-1)
