"""How many tokens to draft in a round, decided token by token from measured costs and the draft's own confidence.

Drafting one more token after j pays when what it adds, the chance that all j + 1 are kept, exceeds what the time that it
takes, c + v(j + 1) - v(j) in units of a plain step, would yield otherwise. The yield of time is the row's own tokens per
plain step in the rounds that this policy decided: the marginal rule for the best long-run ratio of reward to cost (Dinkelbach, 1967).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.core.cost_model import Costs

MEMORY = 0.95  # weight of the past after each round: a row that turns to easier text is noticed in some 20 rounds
PRIOR_ROUNDS = 2.0  # weight of what is believed before a row has shown anything
PRIOR_ACCEPTANCE = 0.45


@dataclass
class _Row:
    """What a row has shown, older rounds counting less, and the draft in progress."""

    tokens: float = 0.0  # emitted
    cost: float = 0.0  # in plain steps
    tested: float = 0.0  # drafted tokens that the target reached
    kept: float = 0.0
    confidence: float = 0.0  # sum of the draft's over the tested
    survival: float = 1.0  # estimated chance that the whole draft in progress is kept
    confidences: list[float] = field(default_factory=list)


class AdaptiveDraftLength:
    """Decides for each row after each drafted token whether to draft another.

    A row's decisions depend on its own text and on `costs` alone, not on the clock or on other rows, so that seeds mean the
    same in every batch.
    """

    def __init__(self, costs: Costs) -> None:
        longest = max(costs.target_pass_seconds)
        if longest < 1 or sorted(costs.target_pass_seconds) != list(range(longest + 1)):
            measured = sorted(k for k in costs.target_pass_seconds if k)
            raise ValueError(f"an adaptive draft length needs costs at every k from 1 on, measured are k = {measured}")
        self.costs = costs
        self._rows: dict[int, _Row] = {}

    def begin(self, row: int) -> None:
        """A new text starts in this row."""
        self._rows[row] = _Row()

    def move_row(self, source: int, destination: int) -> None:
        self._rows[destination] = self._rows[source]

    def wants_more(self, row: int) -> bool:
        """Whether the row's draft in progress is worth another token."""
        state = self._rows[row]
        drafted = len(state.confidences)
        costs = self.costs
        if drafted + 1 not in costs.target_pass_seconds:
            return False
        price = costs.cost_ratio + costs.verify_cost(drafted + 1) - costs.verify_cost(drafted)
        acceptance = (state.kept + PRIOR_ROUNDS * PRIOR_ACCEPTANCE) / (state.tested + PRIOR_ROUNDS)
        tokens_per_cost = (state.tokens + PRIOR_ROUNDS) / (state.cost + PRIOR_ROUNDS)
        return state.survival * acceptance > tokens_per_cost * price

    def drafted(self, row: int, confidence: float) -> None:
        """The row's draft in progress has a token more, of which the draft was so sure (its highest probability)."""
        state = self._rows[row]
        state.confidences.append(confidence)
        calibration = (state.kept + PRIOR_ROUNDS) / (state.confidence + PRIOR_ROUNDS)
        state.survival *= min(1.0, confidence * calibration)

    def verified(self, row: int, kept: int) -> None:
        """The target has kept the first `kept` tokens of the draft in progress, which ends it."""
        state = self._rows[row]
        drafted = len(state.confidences)
        tested = min(kept + 1, drafted)
        cost = drafted * self.costs.cost_ratio + self.costs.verify_cost(drafted)
        state.tokens = MEMORY * state.tokens + kept + 1
        state.cost = MEMORY * state.cost + cost
        state.tested = MEMORY * state.tested + tested
        state.kept = MEMORY * state.kept + kept
        state.confidence = MEMORY * state.confidence + sum(state.confidences[:tested])
        state.survival, state.confidences = 1.0, []
