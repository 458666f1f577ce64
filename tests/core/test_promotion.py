"""Who may become champion."""

from __future__ import annotations

import pytest
from promotion_evidence import KEY, made_metrics, made_verdict

from pipeline.core.promotion import Recorded, comparisons, figure, objections, other_conditions


def recorded(version: str = "2", passed: bool = True, **metrics) -> Recorded:
    return Recorded(version, "ffff", made_metrics(**metrics), made_verdict(passed))


CHAMPION = recorded("1", acceptance=0.5, speedup=1.3)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"acceptance": 0.52}, None),
        ({"speedup": 1.31}, None),
        ({"acceptance": 0.49, "speedup": 1.31}, None),  # lower, but within the champion's interval
        ({"acceptance": 0.47, "speedup": 1.6}, "worse than version 1, the champion: acceptance_rate 0.47"),
        ({"acceptance": 0.6, "speedup": 1.27}, "worse than version 1, the champion: speedup 1.27"),
        ({}, "in nothing better than version 1"),  # an equal draft
        ({"acceptance": 0.49, "speedup": 1.29}, "in nothing better"),
        ({"acceptance": None, "speedup": 1.6}, "acceptance_rate no value (too few prompts) against 0.5 (0.48 to 0.52)"),
        ({"domain": "code", "acceptance": 0.9}, "its domain is 'code', the champion's 'legal'"),
        ({"key": {**KEY, "tokenizer": "x"}, "acceptance": 0.9}, "compatibility key's tokenizer is 'x', the champion's"),
    ],
)
def test_against_the_champion(metrics, words):
    found = objections(recorded(**metrics), CHAMPION)
    assert found == [] if words is None else len(found) == 1 and words in found[0]


def test_the_gate_decides_alone_where_there_is_no_champion():
    assert objections(recorded(), None) == []
    assert objections(recorded(passed=False), None) == ["the gate 'default' failed: speedup"]
    assert len(objections(recorded(passed=False, speedup=1.0), CHAMPION)) == 2


def test_at_another_draft_length_token_acceptance_is_compared():
    """The acceptance rate falls as k grows: at k = 6 it says nothing against k = 3."""
    longer = recorded(k=6, acceptance=0.3, speedup=1.4, token_acceptance=0.61)
    assert [one.metric for one in comparisons(longer, CHAMPION)] == ["token_acceptance_trimmed_head", "speedup"]
    assert objections(longer, CHAMPION) == []
    assert "token_acceptance_trimmed_head 0.5" in objections(recorded(k=6, token_acceptance=0.5), CHAMPION)[0]


def test_a_champion_without_interval_or_value():
    bare = recorded("1", half_width=None)
    assert "worse" in objections(recorded(acceptance=0.499, speedup=1.4), bare)[0]
    assert objections(recorded(acceptance=0.5, speedup=1.4), bare) == []
    assert objections(recorded(), recorded("1", acceptance=None, speedup=None)) == []


def test_what_was_not_measured_has_no_value():
    metrics = made_metrics()
    assert figure(metrics, "ttft_seconds") == {"value": None, "interval": None, "count": 0, "reason": "not measured"}
    assert figure({**metrics, "candidates": {}}, "speedup")["value"] is None


def test_other_conditions_are_named():
    other = recorded(processor="b")
    other.metrics["settings"]["temperature"] = 0.7
    other.metrics["prompts"] = {"golden_prompts": "c0ffee"}
    assert other_conditions(other, CHAMPION) == [
        "temperature 0.7 against 0.0",
        "golden_prompts 'c0ffee' against 'abcdef'",
        "processor 'b' against 'a'",
    ]
    del other.metrics["machine"]
    assert "processor None against 'a'" in other_conditions(other, CHAMPION)
