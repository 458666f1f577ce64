"""A drafter of a chosen token acceptance at a real draft's cost: what a better or worse draft would be worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.core.drafters import Batch, ModelDrafter
from pipeline.core.sampling import Proposal, Sampling, row_seed


@dataclass
class _Script:
    """What is drafted at each position after a prompt, int64 [room]."""

    prompt_length: int
    token_ids: Tensor


class ScriptedDrafter:
    """Runs `drafter` for its cost, but drafts each prompt's known greedy continuation, wrong at chosen positions.

    A share `token_acceptance` of the positions after a continuation's first, which is never drafted, is right, to the
    nearest position. Which ones depends on (seed, prompt) alone, and a higher share keeps the right positions of a lower
    one. Change `token_acceptance` or `continuations` between requests. Greedy decoding only. What is drafted lies on the
    device before a round begins.
    """

    wants_hidden_states = False

    def __init__(self, drafter: ModelDrafter, continuations: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        self.drafter = drafter
        self.continuations = continuations
        self.seed = seed
        self.token_acceptance = 1.0

    @property
    def max_positions(self) -> int | None:
        return self.drafter.max_positions

    def open(self, rows: int, sampling: Sampling, vocabulary: Sequence[int]) -> None:
        if not sampling.greedy:
            raise ValueError("a scripted drafter knows greedy continuations only: set the temperature to 0")
        self.drafter.open(rows, sampling, vocabulary)
        self._two_ids = (vocabulary[0], vocabulary[1])
        self._scripts: list[_Script | None] = [None] * rows

    def begin(self, first_row: int, prompts: list[list[int]], room: int) -> None:
        self.drafter.begin(first_row, prompts, room)
        for row, prompt in enumerate(prompts, start=first_row):
            self._scripts[row] = self._script(prompt, room)

    def propose(self, batch: Batch, lengths: list[int]) -> Proposal:
        real = self.drafter.propose(batch, lengths)
        width = real.token_ids.shape[1]
        blocks = []
        for tokens, script in zip(batch.committed, self._scripts, strict=False):
            start = len(tokens) - script.prompt_length
            blocks.append(script.token_ids[start : start + width])
        blocks += [blocks[-1]] * (len(batch.sizes) - len(blocks))
        return Proposal(token_ids=torch.stack(blocks), lengths=real.lengths)

    def move_row(self, source: int, destination: int) -> None:
        self.drafter.move_row(source, destination)
        self._scripts[destination] = self._scripts[source]

    def _script(self, prompt: list[int], room: int) -> _Script:
        known = self.continuations[tuple(prompt)]
        seed = row_seed(self.seed, hash(tuple(prompt)))
        right = [True, *right_positions(len(known) - 1, self.token_acceptance, seed)]
        first, second = self._two_ids
        drafted = [token if good else (second if token == first else first) for token, good in zip(known, right)]
        padded = drafted + [first] * (room - len(drafted))
        return _Script(len(prompt), torch.tensor(padded, device=self.drafter.model.device))


def right_positions(count: int, share: float, seed: int) -> list[bool]:
    """Which of `count` positions are right: `share` of them, at random places, nested for rising shares."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order < round(share * count)).tolist()
