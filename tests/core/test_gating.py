"""Gate rules: thresholds, missing data, and what the user is told."""

from __future__ import annotations

import json
import math

import pytest

from pipeline.core.errors import PipelineError
from pipeline.core.gating import REMEDIES, Check, check_rules, judge, verdict_lines


def entry(value, interval=None, reason=None):
    return {"value": value, "interval": interval, "count": 72, "reason": reason}


def metrics(**legal):
    return {
        "candidates": {"distilled": {"legal": legal, "all": {}}},
        "lossless": entry(1.0),
        "draft_fingerprint": "new",
        "champion": None,
        "versus_champion": None,
        "skipped": {},
        "memory": {
            "peak_bytes": 1000,
            "candidates": {"distilled": {"draft_share": 0.2, "memory_efficiency": entry(3.0, [2.0, 4.0])}},
        },
    }


def check(metric="speedup", statistic="point", op=">=", threshold=1.1, severity="fail", domain="legal"):
    return Check(metric=metric, domain=domain, statistic=statistic, op=op, threshold=threshold, severity=severity)


@pytest.mark.parametrize(
    ("op", "value", "passed"),
    [(">=", 1.1, True), (">", 1.1, False), (">", 1.2, True), ("<=", 1.1, True), ("<", 1.1, False), ("<", 1.0, True)],
)
def test_operators_at_the_threshold(op, value, passed):
    verdict = judge(metrics(speedup=entry(value)), [check(op=op)])
    assert verdict["passed"] is passed
    assert verdict["checks"][0]["state"] == ("passed" if passed else "failed")


@pytest.mark.parametrize(("statistic", "compared"), [("point", 1.2), ("lower", 1.05), ("upper", 1.4)])
def test_the_statistic_chooses_the_number(statistic, compared):
    item = judge(metrics(speedup=entry(1.2, [1.05, 1.4])), [check(statistic=statistic)])["checks"][0]
    assert item["compared"] == compared
    assert item["passed"] is (compared >= 1.1)
    assert (item["value"], item["interval"]) == (1.2, [1.05, 1.4])


def test_a_failure_says_by_how_much_and_what_to_do():
    verdict = judge(metrics(speedup=entry(1.2, [1.04, 1.3])), [check(statistic="lower", op=">")])
    item = verdict["checks"][0]
    assert item["shortfall"] == pytest.approx(0.06)
    assert item["remedy"] == REMEDIES["speedup"]
    line = verdict_lines(verdict)[0]
    assert line.startswith("FAILED speedup (legal): 1.04 (lower bound of 1.2), needs > 1.1, short by 0.06. Remedy: ")


def test_over_the_limit_is_worded_so():
    verdict = judge(metrics(cost_ratio=entry(0.5)), [check("cost_ratio", op="<", threshold=0.2)])
    assert "needs < 0.2, over by 0.3." in verdict_lines(verdict)[0]


def test_a_warning_does_not_decide():
    verdict = judge(metrics(acceptance_rate=entry(0.3)), [check("acceptance_rate", threshold=0.4, severity="warn")])
    assert verdict["passed"]
    assert verdict["checks"][0]["state"] == "warned"
    assert not verdict["checks"][0]["passed"]
    assert verdict_lines(verdict)[0].startswith("WARNED acceptance_rate (legal): 0.3")


@pytest.mark.parametrize(
    ("document", "rule", "reason"),
    [
        (metrics(speedup=entry(None, reason="only 1 prompt")), check(), "only 1 prompt"),
        (metrics(speedup=entry(1.5)), check(statistic="lower"), "it has no confidence interval"),
        (metrics(speedup=entry(1.5, [None, None])), check(statistic="upper"), "it has no confidence interval"),
        (metrics(speedup=entry(math.nan)), check(), "its value is missing or not a finite number"),
        (metrics(speedup=entry(math.inf)), check(), "its value is missing or not a finite number"),
        (metrics(speedup=entry(1.5, [math.nan, 2.0])), check(statistic="lower"), "it has no confidence interval"),
        (metrics(), check(), "there is no such metric in the evaluation"),
        (metrics(), check(domain="code"), "the domain 'code' was not measured (measured: all, legal)"),
        ({"candidates": {}, "lossless": entry(1.0)}, check(), "the candidate 'distilled' was not measured"),
        ({"candidates": {}, "lossless": None}, check("lossless"), "it was not measured"),
    ],
)
def test_no_data_never_passes(document, rule, reason):
    verdict = judge(document, [rule])
    item = verdict["checks"][0]
    assert not verdict["passed"]
    assert (item["state"], item["passed"], item["reason"]) == ("no data", False, reason)
    assert item["remedy"] and item["shortfall"] is None
    assert verdict_lines(verdict)[0].startswith(f"NO DATA {rule.metric}")
    json.dumps(verdict, allow_nan=False)


@pytest.mark.parametrize("op", [">=", ">", "<=", "<"])
def test_nan_passes_no_operator(op):
    assert not judge(metrics(speedup=entry(math.nan)), [check(op=op)])["passed"]


def test_a_warning_without_data_only_warns():
    verdict = judge(metrics(), [check(severity="warn")])
    assert verdict["passed"]
    assert verdict["checks"][0]["state"] == "no data"
    assert "a warning only" in verdict_lines(verdict)[0]


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_lossless_is_read_from_the_top_of_the_document(value):
    document = {"candidates": {}, "lossless": entry(value)}
    verdict = judge(document, [check("lossless", domain="all", threshold=1.0)])
    assert verdict["passed"] is (value == 1.0)
    if not verdict["passed"]:
        assert "departures" in verdict["checks"][0]["remedy"]


@pytest.mark.parametrize(
    ("field", "value"), [("statistic", "mean"), ("op", "=="), ("severity", "error"), ("threshold", math.nan)]
)
def test_an_invalid_check_is_refused_at_once(field, value):
    with pytest.raises(PipelineError, match=field):
        check(**{field: value})


def test_a_gate_without_checks_is_refused():
    with pytest.raises(PipelineError, match="no checks"):
        judge(metrics(), [])


def test_a_draft_as_good_as_the_target_and_as_slow_passes_acceptance_and_fails_speed():
    found = metrics(token_acceptance_trimmed_head=entry(1.0), speedup=entry(0.72, [0.70, 0.74]))
    checks = [check("token_acceptance_trimmed_head", threshold=0.45), check(statistic="lower")]
    verdict = judge(found, checks)
    assert [item["state"] for item in verdict["checks"]] == ["passed", "failed"] and not verdict["passed"]


def test_too_few_prompts_and_too_much_memory_fail():
    found = metrics(speedup=entry(1.5))
    found["candidates"]["distilled"]["code"] = {}
    states = [
        judge(found, [rule])["checks"][0]["state"]
        for rule in (
            check("prompts", threshold=72),
            check("prompts", threshold=73),
            check("prompts", threshold=1, domain="code"),
            check("draft_share", op="<=", threshold=0.2),
            check("draft_share", op="<=", threshold=0.19),
            check("memory_efficiency", statistic="lower", threshold=2.5),
        )
    ]
    assert states == ["passed", "failed", "failed", "passed", "failed", "failed"]


CHAMPION = {"fingerprint": "old", "version": "3", "comparable": True}


def against(champion, compared, versus=None, skipped=None):
    """The states of a rule for each domain that compares with the champion."""
    found = {**metrics(), "champion": compared, "versus_champion": versus, "skipped": skipped or {}}
    found["candidates"]["distilled"]["code"] = {}
    verdict = judge(found, [check("token_acceptance_difference", domain="each", threshold=-0.03)], champion)
    return {item["domain"]: item["state"] for item in verdict["checks"]}, verdict


def test_every_domain_is_compared_with_the_champion():
    versus = {
        "legal": {"token_acceptance_difference": entry(0.1)},
        "code": {"token_acceptance_difference": entry(-0.04)},
    }
    states, verdict = against(CHAMPION, CHAMPION, versus)
    assert states == {"legal": "passed", "code": "failed"} and not verdict["passed"]


def test_without_another_champion_the_comparison_does_not_apply():
    states, verdict = against(None, None)
    assert set(states.values()) == {"not applicable"} and verdict["passed"]
    assert verdict_lines(verdict)[0] == (
        "not applicable: token_acceptance_difference (code): no draft of this model was promoted yet; needs >= -0.03"
    )
    for reason in ("the champion is this very draft", "the champion drafts for another target"):
        states, verdict = against(CHAMPION, {**CHAMPION, "comparable": False}, skipped={"champion": reason})
        assert set(states.values()) == {"not applicable"} and verdict["passed"]
        assert verdict["checks"][0]["reason"] == reason


@pytest.mark.parametrize(
    ("compared", "skipped", "reason"),
    [({"fingerprint": "older", "version": "2", "comparable": True}, {}, "present champion, version 3"), (None, {}, "run `dvc repro`"),
     (CHAMPION, {"champion": "the store does not answer"}, "the store does not answer")],
)  # fmt: skip
def test_a_champion_that_was_not_compared_with_is_no_data(compared, skipped, reason):
    states, verdict = against(CHAMPION, compared, None, skipped)
    assert set(states.values()) == {"no data"} and not verdict["passed"]
    assert reason in verdict["checks"][0]["reason"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "speed"}, "has the metric 'speed'"),
        ({"metric": "predicted_speedup"}, "has the metric 'predicted_speedup'"),
        ({"metric": "acceptance_by_position"}, "has the metric 'acceptance_by_position'"),
        ({"metric": "lossless", "statistic": "lower"}, "lossless asks for the lower end of an interval"),
        ({"domain": "leagl"}, "has the domain 'leagl'.*use one of legal, code, all, each"),
    ],
)
def test_rules_that_no_evaluation_can_answer_are_refused_before_it(changes, words):
    check_rules(
        [check(), check("prompts"), check("lossless", domain="all"), check("draft_share", domain="each")], ["legal"]
    )
    with pytest.raises(PipelineError, match=words):
        check_rules([check(), check(**changes)], ["legal", "code"])
    with pytest.raises(PipelineError, match="no checks"):
        check_rules([], ["legal"])
