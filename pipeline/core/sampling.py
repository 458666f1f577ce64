"""From logits to tokens: filtered distributions, reproducible randomness, and lossless verification.

p is the target's distribution, q the draft's. Verification follows Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding" (2023), Algorithm 1: a drafted token d is kept with probability min(1, p(d) / q(d)); at the
first rejection the next token comes from the residual max(p - q, 0), normalised; after a full block from p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_NEXT, PURPOSES = 1, 2, 3, 4  # and multiples of PURPOSES more for later steps

_MIX_A = -7046029254386353131  # the constants of splitmix64, as signed 64-bit integers
_MIX_B = -4658895280553007687
_MIX_C = -7723592293110705685


@dataclass
class Sampling:
    """How a distribution is shaped before a token is drawn, in the order of the fields. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; relative to the most probable token

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3):
            raise ValueError(f"temperature must be 0 (greedy) or between 0.001 and 1000, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 is off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from, float32 [..., vocab], for a temperature above 0."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        mass_before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        dropped = (mass_before >= sampling.top_p).scatter(-1, order, mass_before >= sampling.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    result = scores.softmax(dim=-1)
    if sampling.min_p > 0:
        result = result.masked_fill(result < sampling.min_p * result.amax(dim=-1, keepdim=True), 0.0)
        result = result / result.sum(dim=-1, keepdim=True)
    return result


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors: every input bit changes every output bit."""
    value = (value ^ _shift_right(value, 30)) * _MIX_B
    value = (value ^ _shift_right(value, 27)) * _MIX_C
    return value ^ _shift_right(value, 31)


def uniforms(seeds: Tensor, positions: Tensor, purpose: int | Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 [rows, n], a pure function of (row seed, position, purpose).

    `seeds` int64 [rows]; `positions` int64 [rows, n]; `purpose` a number, or int64 [1] on the device.
    """
    state = _mix(_mix(seeds * _MIX_A + purpose)[:, None] + positions * _MIX_A)
    return _shift_right(state, 11).double() * 2.0**-53


def wrap_seed(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    return (int(seed) + 2**63) % 2**64 - 2**63


def row_seed(seed: int, row: int) -> int:
    """The seed of row `row` in a call seeded with `seed`, a signed 64-bit integer."""
    return int(_mix(_mix(torch.tensor([wrap_seed(seed)])) + torch.tensor([row]) * _MIX_A)[0])


def draw(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution [..., vocab] at `uniform` [...]: token indices [...], never one of mass 0."""
    cumulative = distribution.double().cumsum(dim=-1)
    threshold = (uniform * cumulative[..., -1])[..., None]
    index = (cumulative <= threshold).sum(dim=-1)
    last_possible = distribution.shape[-1] - 1 - (distribution > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last_possible)


@dataclass
class Proposal:
    """What a drafter offers in a round.

    token_ids      int64 [rows, k]
    lengths        int64 [rows], how many of the k each row really proposes
    probabilities  float32 [rows, k, support], the exact distributions the tokens were drawn from; None: each is certain
    support        int64 [support], the token id of each entry of `probabilities`; None: entry i is token i
    certain        bool [rows], rows whose tokens were not drawn from `probabilities` but are certain; None: none
    """

    token_ids: Tensor
    lengths: Tensor
    probabilities: Tensor | None = None
    support: Tensor | None = None
    certain: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields in order, as a function of tensors takes them."""
        return self.token_ids, self.lengths, self.probabilities, self.support, self.certain


def leading_run(kept: Tensor) -> Tensor:
    """Length of the leading run of True along the last dimension, int64 [...]."""
    return kept.long().cumprod(dim=-1).sum(dim=-1)


def verify(
    logits: Tensor, proposal: Proposal, sampling: Sampling, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Decide how many drafted tokens stay, and the token after them.

    `logits` [rows, k + 1, vocab] are the target's before each drafted token and after the last; `positions` int64
    [rows, k + 1] are the positions those tokens take. Returns (accepted int64 [rows], next token int64 [rows]).
    """
    rows, width, _ = logits.shape
    drafted = proposal.token_ids
    proposed = torch.arange(width - 1, device=logits.device) < proposal.lengths[:, None]
    row = torch.arange(rows, device=logits.device)
    if sampling.greedy:
        best = logits.argmax(dim=-1)
        accepted = leading_run((best[:, :-1] == drafted) & proposed)
        return accepted, best[row, accepted]
    target = probabilities(logits, sampling)
    target_mass = target[:, :-1].gather(-1, drafted[..., None])[..., 0]
    draft_mass = _draft_mass(proposal)
    chance = uniforms(seeds, positions[:, :-1], PURPOSE_ACCEPT)
    accepted = leading_run((chance * draft_mass < target_mass) & proposed)
    residual = target[row, accepted] - _rejected_distribution(proposal, accepted, target.shape[-1])
    residual = residual.clamp(min=0)
    empty = residual.sum(dim=-1, keepdim=True) <= 0
    residual = torch.where(empty, target[row, accepted], residual)
    chance = uniforms(seeds, positions.gather(1, accepted[:, None]), PURPOSE_NEXT)[:, 0]
    return accepted, draw(residual, chance)


def _draft_mass(proposal: Proposal) -> Tensor:
    """q of each drafted token, float32 [rows, k]."""
    if proposal.probabilities is None:
        return torch.ones_like(proposal.token_ids, dtype=torch.float32)
    index = proposal.token_ids
    if proposal.support is not None:
        index = torch.searchsorted(proposal.support, index).clamp(max=len(proposal.support) - 1)
    mass = proposal.probabilities.gather(-1, index[..., None])[..., 0]
    return mass if proposal.certain is None else mass.masked_fill(proposal.certain[:, None], 1.0)


def _rejected_distribution(proposal: Proposal, accepted: Tensor, vocab: int) -> Tensor:
    """q at the first rejected position over the target's vocabulary, [rows, vocab]; 0 where nothing was rejected."""
    rows, width = proposal.token_ids.shape
    result = torch.zeros(rows, vocab, device=accepted.device)
    if width == 0:
        return result
    rejected = accepted < proposal.lengths
    at = accepted.clamp(max=width - 1)
    row = torch.arange(rows, device=accepted.device)
    copied = result.scatter(1, proposal.token_ids[row, at][:, None], 1.0)
    if proposal.probabilities is None:
        return copied * rejected[:, None]
    drawn = proposal.probabilities[row, at]
    if proposal.support is None:
        result[:, : drawn.shape[-1]] = drawn
    else:
        result[:, proposal.support] = drawn
    if proposal.certain is not None:
        result = torch.where(proposal.certain[:, None], copied, result)
    return result * rejected[:, None]
