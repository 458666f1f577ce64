"""Greedy rounds counted from agreement alone; test_objective.py holds them against the decoder."""

from __future__ import annotations

from pipeline.core.rounds import greedy_rounds


def test_greedy_rounds_follow_the_targets_text():
    """The first token is the prefill's; a round ends at the first miss, whose place the target's own token takes."""
    assert greedy_rounds([False, True, True, False, True, False, True], 2) == [(2, 2), (1, 2), (1, 1)]
    assert greedy_rounds([True], 4) == [] and greedy_rounds([True] * 6, 4) == [(4, 4)]
    assert greedy_rounds([True, False, True, True], 4) == [(0, 4), (2, 2)]
