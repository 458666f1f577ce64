"""Tags and card of a version."""

from __future__ import annotations

from promotion_evidence import KEY, entry, made_metrics, made_verdict

from pipeline.core.gating import Check, judge
from pipeline.core.model_card import Evidence, headline_tags, identity_tags, model_card

DRAFT = {"compatibility_key": KEY, "fingerprint": "ffff", "dtype": "bfloat16"}
SUMMARY = {"schema": "domain-draft/summary", "schema_version": 1, "speedup": 1.3, "machine": "a", "rate": None}


def test_tags_carry_key_and_headline():
    evidence = Evidence(DRAFT, made_metrics(speedup=1.23456), SUMMARY, made_verdict())
    assert headline_tags(evidence) == {
        "acceptance_rate": "0.5",
        "token_acceptance": "0.6",
        "speedup": "1.235",
        "speedup_lower": "1.215",
        "speedup_upper": "1.255",
        "dtype": "bfloat16",
    }
    tags = identity_tags(evidence)
    assert {f"compatibility.{name}": value for name, value in KEY.items()}.items() <= tags.items()
    assert (tags["fingerprint"], tags["domain"], tags["draft_length"], tags["verdict"]) == (
        "ffff",
        "legal",
        3,
        "passed",
    )
    assert evidence.numbers == {"speedup": 1.3}


def test_what_was_not_measured_says_so():
    metrics = made_metrics(acceptance=None)
    metrics["candidates"]["distilled"]["legal"]["speedup"] = entry(1.2, None)
    tags = headline_tags(Evidence(DRAFT, metrics, SUMMARY, made_verdict(passed=False)))
    assert (tags["acceptance_rate"], tags["speedup"], tags["speedup_lower"]) == ("not measured", "1.2", "not measured")


def test_the_card_says_what_for_and_how_good():
    verdict = judge(made_metrics(), [Check("speedup", "legal", "lower", ">=", 1.1, "fail")])
    card = model_card("tiny-legal-draft", Evidence(DRAFT, made_metrics(), SUMMARY, {**made_verdict(), **verdict}))
    for words in ("# tiny-legal-draft", "'legal'", "builtin:tiny", "| speedup | 1.3 |", "bfloat16", "- gate passed"):
        assert words in card
    assert "schema_version" not in card
