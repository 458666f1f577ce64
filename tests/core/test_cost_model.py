"""Predictions from measured costs: the formulas' values, the best k, when speculation pays at all."""

from __future__ import annotations

import pytest
from tiny_models import tiny_llama

from pipeline.core.cost_measurement import measure_costs
from pipeline.core.cost_model import (
    Costs,
    best_draft_length,
    break_even_acceptance,
    classic_speedup,
    largest_paying_batch,
    measured_cost_speedup,
    simple_speedup,
    tokens_per_round,
)
from pipeline.core.drafters import ModelDrafter

COSTS = Costs(0.01, {k: 0.1 * (1 + 0.05 * k) for k in range(7)})  # c = 0.1, v(k) = 1 + 0.05 k


def test_formulas_by_hand():
    assert measured_cost_speedup(2.5, 4, COSTS) == pytest.approx(2.5 / (0.4 + 1.2))
    assert classic_speedup(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / (0.2 * 1.4))
    assert classic_speedup(1.0, 4, 0.1) == pytest.approx(5 / 1.4)
    assert simple_speedup(0.65, 0.1) == pytest.approx(1 / (1 - 0.65 * 0.9))
    assert simple_speedup(0.0, 0.9) == 1.0
    assert tokens_per_round([0.6, 0.4, 0.2], 2) == pytest.approx(2.0)


def test_the_best_draft_length_weighs_yield_against_cost():
    by_position = [0.6, 0.4, 0.2, 0.05, 0.01]
    speeds = {k: measured_cost_speedup(tokens_per_round(by_position, k), k, COSTS) for k in range(1, 6)}
    assert best_draft_length(by_position, list(range(1, 6)), COSTS) == max(speeds, key=speeds.get) == 2


@pytest.mark.parametrize("k", [1, 3, 6])
def test_at_break_even_acceptance_a_round_yields_what_it_costs(k):
    acceptance = break_even_acceptance(k, COSTS)
    expected_tokens = sum(acceptance**i for i in range(k + 1))
    assert measured_cost_speedup(expected_tokens, k, COSTS) == pytest.approx(1.0)
    assert classic_speedup(acceptance, k, 0.1) == pytest.approx(expected_tokens / (1 + 0.1 * k))


def test_a_draft_as_dear_as_the_target_never_breaks_even():
    assert break_even_acceptance(3, Costs(0.2, {0: 0.1, 3: 0.2})) is None


def test_the_largest_batch_that_pays_is_the_last_before_the_first_that_does_not():
    def at(verify: float) -> Costs:
        return Costs(0.05, {0: 1.0, 1: 1 + verify, 2: 1 + 2 * verify})

    costs = {1: at(0.05), 2: at(0.1), 4: at(0.3), 8: at(0.9), 16: at(0.05)}
    assert largest_paying_batch([0.6, 0.3], [1, 2], costs) == 4
    assert largest_paying_batch([0.0, 0.0], [1, 2], costs) is None


def test_costs_survive_being_written():
    assert Costs.from_document(COSTS.document()) == COSTS


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_measured_at_any_batch_size(rows):
    target = tiny_llama()
    costs = measure_costs(target, ModelDrafter(tiny_llama(seed=1)), [1, 4], context=20, repeats=2, rows=rows)
    assert set(costs.target_pass_seconds) == {0, 1, 4}
    assert costs.draft_step_seconds > 0 and min(costs.target_pass_seconds.values()) > 0
