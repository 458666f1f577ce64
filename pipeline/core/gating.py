"""Gate rules: compare measured metrics with thresholds and say what would mend a failure."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.core.errors import PipelineError
from pipeline.core.metrics import METRICS, measure

CANDIDATE = "distilled"
LOSSLESS = "lossless"
PROMPTS = "prompts"  # golden prompts that were decoded: the count of the speedup
MEMORY = ("draft_share", "peak_bytes", "memory_efficiency")
VERSUS_CHAMPION = ("token_acceptance_difference", "acceptance_rate_difference", "speedup_ratio")
NO_RULES = "The gate has no checks, so it would pass any draft.", "list checks in conf/gate/."
NO_NUMBERS = (
    "cost_ratio",
    "verify_cost",
    "predicted_speedup",
    "acceptance_by_position",
)  # of METRICS: none of a domain
NO_INTERVAL = (LOSSLESS, PROMPTS, "draft_share", "peak_bytes")
EACH = "each"  # a check's domain that stands for every measured one

OPERATORS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
STATISTICS = ("point", "lower", "upper")
SEVERITIES = ("fail", "warn")

_BETTER_DRAFT = "generate more answers in this domain, train longer, or keep more layers in the draft"
_LONGER_GUESSES = f"{_BETTER_DRAFT}; a lower decode.draft_length raises the rate but shortens the rounds"
_MORE_SPEED = (
    "keep fewer layers in the draft, trim its head further, or set another decode.draft_length; "
    "if even a free draft would not pay, the target is too small for this hardware"
)
_LATENCY = "lower decode.draft_length, or make the draft cheaper (fewer layers, a smaller trimmed head)"

REMEDIES = {
    "token_acceptance_trimmed_head": f"{_BETTER_DRAFT}; if the full head does better, trim less of it",
    "token_acceptance_full_head": _BETTER_DRAFT,
    "token_acceptance_without_loops": f"{_BETTER_DRAFT}; drop answers that repeat themselves from the training set",
    "acceptance_rate": _LONGER_GUESSES,
    "mean_acceptance_length": f"{_BETTER_DRAFT}, or raise decode.draft_length",
    "acceptance_by_position": f"{_BETTER_DRAFT}, or lower decode.draft_length",
    "speedup": _MORE_SPEED,
    "ttft_seconds": "make the draft cheaper: its prefill delays the first token",
    "ttft_ratio": "make the draft cheaper: its prefill delays the first token",
    "itl_p95_seconds": _LATENCY,
    "smoothness": f"{_LATENCY}; {_BETTER_DRAFT}",
    PROMPTS: "raise evaluate.timed_prompts, and domain.prompts.golden if they are too few",
    "draft_share": "choose a smaller draft, or freeze and share fewer rows of its embeddings",
    "peak_bytes": "choose a smaller draft, or lower evaluate.tokens_per_forward if the evaluation itself took it",
    "memory_efficiency": f"choose a smaller draft, or {_BETTER_DRAFT}",
    "token_acceptance_difference": f"keep the champion; {_BETTER_DRAFT}",
    "acceptance_rate_difference": f"keep the champion; {_BETTER_DRAFT}",
    "speedup_ratio": f"keep the champion; {_MORE_SPEED}",
    LOSSLESS: (
        "do not serve this draft: the speculative tokens differ from the target's own. Report a bug with the "
        "departures listed in data/eval/metrics.json"
    ),
}
_ANY_REMEDY = f"{_BETTER_DRAFT}, or correct the threshold in conf/gate/"
_NO_DATA_REMEDY = (
    "check the metric and the domain named in conf/gate/, and evaluate again with enough golden prompts to measure it"
)


@dataclass
class Check:
    """One rule of a gate: `statistic` of `metric` in `domain` must satisfy `op` `threshold`.

    Raises `PipelineError` on an unknown statistic, operator or severity, and on a threshold that is not finite.
    """

    metric: str  # a metric of data/eval/metrics.json, "prompts", "lossless", or one of MEMORY or VERSUS_CHAMPION
    domain: str  # a domain of the golden set, "all", or "each" of them; lossless and MEMORY are measured once, over all
    statistic: str  # point | lower | upper: the value, or an end of its confidence interval
    op: str  # >= | > | <= | <
    threshold: float  # in the unit of the metric
    severity: str  # fail: decides the verdict; warn: is reported only

    def __post_init__(self) -> None:
        for field, allowed in (("statistic", STATISTICS), ("op", tuple(OPERATORS)), ("severity", SEVERITIES)):
            if getattr(self, field) not in allowed:
                raise PipelineError(
                    f"The gate's check of {self.metric} has {field} {getattr(self, field)!r}.",
                    f"use one of {', '.join(allowed)} in conf/gate/.",
                )
        if not math.isfinite(self.threshold):
            raise PipelineError(
                f"The gate's check of {self.metric} has threshold {self.threshold}.",
                "use a finite number in conf/gate/.",
            )


def judge(metrics: dict[str, Any], checks: Sequence[Check], champion: dict[str, Any] | None = None) -> dict[str, Any]:
    """Judge the distilled draft's `metrics` (the document data/eval/metrics.json) by `checks`.

    `champion` is what promotion wrote about the present one (data/champion/metrics.json), None before the first.

    Returns {passed, checks: [...]}. Each check carries its fields and `value`, `interval`, `compared` (the statistic
    that was compared), `passed`, `state` ("passed", "failed", "warned", "no data" or "not applicable"), `shortfall`
    (distance to the threshold in the metric's unit), `reason` (why there is no data) and `remedy`; what does not apply is
    None. A check without data never passes; one against a champion does not apply where there is none but this draft.
    The verdict passes when every check of severity "fail" does. Raises `PipelineError` when `checks` is empty.
    """
    if not checks:
        raise PipelineError(*NO_RULES)
    judged = [_judge_one(metrics, check, champion) for named in checks for check in _one_per_domain(metrics, named)]
    return {"passed": all(item["passed"] or item["severity"] == "warn" for item in judged), "checks": judged}


def check_rules(checks: Sequence[Check], domains: Sequence[str]) -> None:
    """Raise `PipelineError` for no rules at all, or one on a figure or a domain that no evaluation over `domains` has."""
    if not checks:
        raise PipelineError(*NO_RULES)
    metrics = sorted({*METRICS, PROMPTS} - {*NO_NUMBERS})
    for check in checks:
        for field, known in (("metric", metrics), ("domain", [*domains, "all", EACH])):
            if getattr(check, field) not in known:
                raise PipelineError(
                    f"The gate's check of {check.metric} has the {field} {getattr(check, field)!r}, which no evaluation measures.",
                    f"use one of {', '.join(known)} in conf/gate/.",
                )
        if check.metric in NO_INTERVAL and check.statistic != "point":
            raise PipelineError(
                f"The gate's check of {check.metric} asks for the {check.statistic} end of an interval, which it has not.",
                "use statistic: point in conf/gate/.",
            )


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """One line per check of a `verdict` from `judge`, then one line for the whole."""
    lines = [_check_line(item) for item in verdict["checks"]]
    return [*lines, f"gate {'passed' if verdict['passed'] else 'FAILED'}"]


def _one_per_domain(metrics: dict[str, Any], check: Check) -> list[Check]:
    measured = metrics["candidates"].get(CANDIDATE) or {}
    domains = sorted(name for name in measured if name != "all")
    return [replace(check, domain=name) for name in domains] if check.domain == EACH and domains else [check]


def _judge_one(metrics: dict[str, Any], check: Check, champion: dict[str, Any] | None) -> dict[str, Any]:
    alone = _no_other_champion(metrics, champion) if check.metric in VERSUS_CHAMPION else None
    entry, reason = ({}, alone) if alone else _find(metrics, check, champion)
    value = _finite(entry.get("value"))
    interval = _finite_interval(entry.get("interval"))
    compared = None
    if reason is None:
        compared, reason = _statistic(entry, value, interval, check.statistic)
    judged = {
        **asdict(check),
        "value": value,
        "interval": interval,
        "compared": compared,
        "passed": False,
        "state": "no data",
        "shortfall": None,
        "reason": reason,
        "remedy": _NO_DATA_REMEDY,
    }
    if alone:
        return {**judged, "passed": True, "state": "not applicable", "reason": alone, "remedy": None}
    if compared is None:
        return judged
    if OPERATORS[check.op](compared, check.threshold):
        return {**judged, "passed": True, "state": "passed", "remedy": None}
    return {
        **judged,
        "state": "warned" if check.severity == "warn" else "failed",
        "shortfall": abs(check.threshold - compared),
        "remedy": REMEDIES.get(check.metric, _ANY_REMEDY),
    }


def _no_other_champion(metrics: dict[str, Any], champion: dict[str, Any] | None) -> str | None:
    """Why there is no champion to compare with, if there is none."""
    if champion is None:
        return "no draft of this model was promoted yet"
    compared = metrics["champion"]
    if compared and compared["fingerprint"] == champion["fingerprint"] and not compared["comparable"]:
        return metrics["skipped"]["champion"]
    return None


def _find(metrics: dict[str, Any], check: Check, champion: dict[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """The metric's entry, or an empty one and the reason why there is none."""
    if check.metric == LOSSLESS:
        entry = metrics.get(LOSSLESS)
        return (entry, None) if entry is not None else ({}, "it was not measured")
    if check.metric in MEMORY:
        memory = metrics["memory"]
        value = {**memory, **memory["candidates"][CANDIDATE]}[check.metric]
        return (value if isinstance(value, dict) else measure(value)), None
    if check.metric in VERSUS_CHAMPION:
        return _find_versus_champion(metrics, check, champion)
    domains = metrics["candidates"].get(CANDIDATE)
    if not domains:
        return {}, f"the candidate {CANDIDATE!r} was not measured"
    if check.domain not in domains:
        return {}, f"the domain {check.domain!r} was not measured (measured: {', '.join(sorted(domains))})"
    if check.metric == PROMPTS:
        return measure(domains[check.domain].get("speedup", {"count": 0})["count"]), None
    entry = domains[check.domain].get(check.metric)
    return (entry, None) if entry is not None else ({}, "there is no such metric in the evaluation")


def _find_versus_champion(
    metrics: dict[str, Any], check: Check, champion: dict[str, Any] | None
) -> tuple[dict[str, Any], str | None]:
    compared = metrics["champion"]
    if champion and (compared is None or compared["fingerprint"] != champion["fingerprint"]):
        return {}, f"it was not evaluated beside the present champion, version {champion['version']}: run `dvc repro`"
    if metrics["versus_champion"] is None:
        return {}, f"the champion was skipped: {metrics['skipped'].get('champion', 'unknown reason')}"
    entry = metrics["versus_champion"].get(check.domain, {}).get(check.metric)
    return (entry, None) if entry is not None else ({}, f"the domain {check.domain!r} was not measured")


def _statistic(
    entry: dict[str, Any], value: float | None, interval: list[float] | None, statistic: str
) -> tuple[float | None, str | None]:
    """The number to compare, or None and the reason why there is none."""
    if value is None:
        return None, entry.get("reason") or "its value is missing or not a finite number"
    if statistic == "point":
        return value, None
    if interval is None:
        return None, entry.get("reason") or "it has no confidence interval"
    return interval[0 if statistic == "lower" else 1], None


def _finite(number: Any) -> float | None:
    return float(number) if isinstance(number, int | float) and math.isfinite(number) else None


def _finite_interval(interval: Any) -> list[float] | None:
    ends = [_finite(end) for end in interval or ()]
    return ends if len(ends) == 2 and None not in ends else None


def _check_line(item: dict[str, Any]) -> str:
    words = {"passed": "passed", "failed": "FAILED", "warned": "WARNED", "no data": "NO DATA"}
    words["not applicable"] = "not applicable:"
    head = f"{words[item['state']]} {item['metric']} ({item['domain']})"
    bound = "" if item["statistic"] == "point" else f" ({item['statistic']} bound of {_number(item['value'])})"
    needs = f"needs {item['op']} {_number(item['threshold'])}"
    if item["state"] == "no data":
        mild = ", a warning only" if item["severity"] == "warn" else ""
        return f"{head}: {item['reason']}; {needs}{mild}. Remedy: {item['remedy']}."
    if item["state"] == "not applicable":
        return f"{head}: {item['reason']}; {needs}"
    line = f"{head}: {_number(item['compared'])}{bound}, {needs}"
    if item["state"] == "passed":
        return line
    word = "short" if item["op"] in (">=", ">") else "over"
    return f"{line}, {word} by {_number(item['shortfall'])}. Remedy: {item['remedy']}."


def _number(value: float | None) -> str:
    return "no value" if value is None else f"{value:.4g}"
