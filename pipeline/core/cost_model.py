"""What a round costs and what it yields: measured curves, predicted speedups, the best draft length.

All times are of one pass at the batch size measured, on this hardware. Formulas: Leviathan et al. (2023), section 3.3;
`measured-cost` replaces the assumption that a verification costs as much as one plain step by its measured cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Costs:
    """Seconds of one draft step and of a target pass over k + 1 tokens, k = 0, 1, ...; medians.

    For a mixture of experts also the mean number of distinct experts per layer that so many tokens touch.
    """

    draft_step_seconds: float
    target_pass_seconds: dict[int, float]
    experts_touched: dict[int, float] | None = None  # by the number of tokens in the pass; None: not a mixture

    @property
    def cost_ratio(self) -> float:
        """c: one draft step / one plain target step."""
        return self.draft_step_seconds / self.target_pass_seconds[0]

    def verify_cost(self, k: int) -> float:
        """v(k): a target pass over k + 1 tokens / over 1 token."""
        return self.target_pass_seconds[k] / self.target_pass_seconds[0]

    def round_cost(self, k: int) -> float:
        """k c + v(k): a round at draft length k / a plain step."""
        return k * self.cost_ratio + self.verify_cost(k)

    def document(self) -> dict[str, Any]:
        """As metrics.json keeps them; `target_pass_seconds` and `experts_touched` by the number of tokens in the pass."""
        return {
            "cost_ratio": self.cost_ratio,
            "draft_step_seconds": self.draft_step_seconds,
            "target_pass_seconds": {str(k + 1): seconds for k, seconds in self.target_pass_seconds.items()},
            "experts_touched": self.experts_touched
            and {str(count): experts for count, experts in self.experts_touched.items()},
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Costs:
        """The inverse of `document`, for costs read from metrics.json."""
        passes = {int(tokens) - 1: seconds for tokens, seconds in document["target_pass_seconds"].items()}
        experts = document["experts_touched"] and {int(n): mean for n, mean in document["experts_touched"].items()}
        return cls(document["draft_step_seconds"], passes, experts)


def measured_cost_speedup(tokens_per_round: float, k: int, costs: Costs) -> float:
    """tokens per round / (k c + v(k))"""
    return tokens_per_round / costs.round_cost(k)


def classic_speedup(token_acceptance: float, k: int, cost_ratio: float) -> float:
    """(1 - a^(k+1)) / ((1 - a)(k c + 1)), a = token acceptance; verification as cheap as a plain step."""
    if token_acceptance >= 1:
        return (k + 1) / (k * cost_ratio + 1)
    return (1 - token_acceptance ** (k + 1)) / ((1 - token_acceptance) * (k * cost_ratio + 1))


def simple_speedup(acceptance_rate: float, cost_ratio: float) -> float | None:
    """1 / (1 - a (1 - c)), a = acceptance rate: optimistic, never below 1 while c <= 1; shown, never gated. None where it
    knows no limit: free drafts that are always accepted."""
    left = 1 - acceptance_rate * (1 - cost_ratio)
    return 1 / left if left else None


def tokens_per_round(by_position: list[float], k: int) -> float:
    """Expected tokens of a round at draft length k, from the acceptance by position of longer blocks."""
    return 1 + sum(by_position[:k])


def acceptance_rate(by_position: list[float], k: int) -> float:
    """Expected share of drafted tokens that is accepted at draft length k."""
    return sum(by_position[:k]) / k


def best_draft_length(by_position: list[float], lengths: list[int], costs: Costs) -> int:
    """The k among `lengths` with the highest measured-cost speedup."""
    return max(lengths, key=lambda k: measured_cost_speedup(tokens_per_round(by_position, k), k, costs))


def break_even_acceptance(k: int, costs: Costs) -> float | None:
    """The chance per drafted token, the same at every position, from which on drafting k tokens is no slower than plain
    decoding; None where it never pays. Solves (1 - a^(k+1)) / (1 - a) = k c + v(k)."""
    needed = costs.round_cost(k)
    if needed > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < needed else (low, middle)
    return high


def largest_paying_batch(by_position: list[float], lengths: list[int], costs: dict[int, Costs]) -> int | None:
    """The largest batch size measured up to which, at the best k for each, speculation is predicted to pay; None: none.

    `costs` by batch size; `by_position` is the acceptance by position of a draft of at least max(lengths) tokens.
    """
    largest = None
    for batch, measured in sorted(costs.items()):
        k = best_draft_length(by_position, lengths, measured)
        if measured_cost_speedup(tokens_per_round(by_position, k), k, measured) <= 1:
            break
        largest = batch
    return largest
