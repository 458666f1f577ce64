"""What a round costs and what it yields: measured curves, predicted speedups, the best draft length.

All times are of one pass at the batch size measured, on this hardware. Formulas: Leviathan et al. (2023), section 3.3;
`measured-cost` replaces the assumption that a verification costs as much as one plain step by its measured cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.core.cache import CachedModel
from pipeline.core.drafters import ModelDrafter, head_size
from pipeline.core.sampling import Sampling


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

    def document(self) -> dict[str, Any]:
        """As metrics.json keeps them; `target_pass_seconds` and `experts_touched` by the number of tokens in the pass."""
        return {
            "cost_ratio": self.cost_ratio,
            "draft_step_seconds": self.draft_step_seconds,
            "target_pass_seconds": {str(k + 1): seconds for k, seconds in self.target_pass_seconds.items()},
            "experts_touched": self.experts_touched
            and {str(count): experts for count, experts in self.experts_touched.items()},
        }


def measured_cost_speedup(tokens_per_round: float, k: int, costs: Costs) -> float:
    """tokens per round / (k c + v(k))"""
    return tokens_per_round / (k * costs.cost_ratio + costs.verify_cost(k))


def classic_speedup(token_acceptance: float, k: int, cost_ratio: float) -> float:
    """(1 - a^(k+1)) / ((1 - a)(k c + 1)), a = token acceptance; verification as cheap as a plain step."""
    if token_acceptance >= 1:
        return (k + 1) / (k * cost_ratio + 1)
    return (1 - token_acceptance ** (k + 1)) / ((1 - token_acceptance) * (k * cost_ratio + 1))


def simple_speedup(acceptance_rate: float, cost_ratio: float) -> float:
    """1 / (1 - a (1 - c)), a = acceptance rate: optimistic, never below 1; for managers, never gated."""
    return 1 / (1 - acceptance_rate * (1 - cost_ratio))


def tokens_per_round(by_position: list[float], k: int) -> float:
    """Expected tokens of a round at draft length k, from the acceptance by position of longer blocks."""
    return 1 + sum(by_position[:k])


def best_draft_length(by_position: list[float], lengths: list[int], costs: Costs) -> int:
    """The k among `lengths` with the highest measured-cost speedup."""
    return max(lengths, key=lambda k: measured_cost_speedup(tokens_per_round(by_position, k), k, costs))


@torch.inference_mode()
def measure_costs(
    target: PreTrainedModel, drafter: ModelDrafter, draft_lengths: list[int], context: int, repeats: int
) -> Costs:
    """Time single-row passes at `context` tokens of context, all shapes in turn, and take medians over `repeats`."""
    cached = CachedModel(target, rows=1)
    cached.reserve(context + max(draft_lengths) + 1)
    room = context + max(draft_lengths) + 1
    drafter.open(1, Sampling(), range(head_size(drafter.model)))
    drafter.begin(0, [[0] * context], room)
    seeds = torch.zeros(1, dtype=torch.long, device=cached.device)

    def target_pass(k: int) -> Callable[[], object]:
        token_ids = torch.zeros(1, k + 1, dtype=torch.long, device=cached.device)
        positions = torch.arange(context, context + k + 1, device=cached.device)[None]
        return lambda: cached.forward(0, token_ids, positions, context + k + 1)

    steps = max(draft_lengths)
    shapes = {k: target_pass(k) for k in [0, *draft_lengths]}
    shapes[-1] = lambda: drafter.propose([[0] * context], [steps], seeds)
    seconds: dict[int, list[float]] = {key: [] for key in shapes}
    for _ in range(repeats + 1):
        for key, run in shapes.items():
            started = time.perf_counter()
            run()
            if cached.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[key].append(time.perf_counter() - started)
    median = {key: statistics.median(times[1:]) for key, times in seconds.items()}
    return Costs(median.pop(-1) / steps, median)
