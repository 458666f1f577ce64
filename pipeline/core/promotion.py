"""Whether a candidate may take the champion's place, by what was recorded of both when each was evaluated.

Acceptance and speedup in the target domain decide. The candidate must be better in one of them and worse in neither, where
worse is a value below the lower end of the champion's 95 % interval. An acceptance rate falls as k grows, so that two
drafts served at different k are compared by token acceptance, which knows no k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.core.gating import CANDIDATE
from pipeline.core.metrics import no_data

CHAMPION, PREVIOUS = "champion", "previous"  # aliases of the version that is served, and of the one before it

# Where these differ between two evaluations, their figures compare loosely.
CONDITIONS = {
    "settings": ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "dtype", "device"),
    "prompts": ("golden_prompts",),
    "machine": ("processor", "threads", "accelerator"),
}


@dataclass(frozen=True)
class Recorded:
    """A registered version with its evidence."""

    version: str
    fingerprint: str  # of the weights
    metrics: dict[str, Any]  # domain-draft/metrics
    verdict: dict[str, Any]  # domain-draft/verdict


@dataclass(frozen=True)
class Comparison:
    """A figure of the candidate beside the champion's, both as in metrics.json."""

    metric: str
    candidate: dict[str, Any]
    champion: dict[str, Any]

    @property
    def better(self) -> bool:
        """Whether the candidate's value is higher; any value is better than none."""
        own, other = self.candidate["value"], self.champion["value"]
        return own is not None and (other is None or own > other)

    @property
    def worse(self) -> bool:
        """Whether the candidate's value is lower than the champion's interval; no value is worse than any."""
        own, other = self.candidate["value"], self.champion["value"]
        if other is None or own is None:
            return other is not None
        lowest = self.champion["interval"][0] if self.champion["interval"] else other
        return own < lowest

    def __str__(self) -> str:
        return f"{self.metric} {_text(self.candidate)} against {_text(self.champion)}"


def gate_failure(verdict: dict[str, Any]) -> str:
    """The gate and the checks that failed it, for a `verdict` that did not pass."""
    failed = [item["metric"] for item in verdict["checks"] if not item["passed"] and item["severity"] == "fail"]
    return f"the gate {verdict['gate']!r} failed: {', '.join(failed)}"


def comparisons(candidate: Recorded, champion: Recorded) -> list[Comparison]:
    """The figures that decide between two drafts of one target and domain."""
    same_k = candidate.metrics["settings"]["draft_length"] == champion.metrics["settings"]["draft_length"]
    acceptance = "acceptance_rate" if same_k else "token_acceptance_trimmed_head"
    return [
        Comparison(metric, figure(candidate.metrics, metric), figure(champion.metrics, metric))
        for metric in (acceptance, "speedup")
    ]


def objections(candidate: Recorded, champion: Recorded | None) -> list[str]:
    """Why `candidate` must not take the place of `champion`; empty when it may. Without a champion the gate decides."""
    found = [] if candidate.verdict["passed"] else [gate_failure(candidate.verdict)]
    if champion is None:
        return found
    other = _other_purpose(candidate.metrics, champion.metrics)
    if other:
        return found + other
    compared = comparisons(candidate, champion)
    place = f"version {champion.version}, the champion"
    if worse := [str(one) for one in compared if one.worse]:
        return [*found, f"it is worse than {place}: {', '.join(worse)}"]
    if not any(one.better for one in compared):
        return [*found, f"it is in nothing better than {place}: {', '.join(map(str, compared))}"]
    return found


def other_conditions(candidate: Recorded, champion: Recorded) -> list[str]:
    """How the evaluations of two drafts differed, apart from the drafts."""
    pairs = [
        (name, *(found.metrics.get(group, {}).get(name) for found in (candidate, champion)))
        for group, names in CONDITIONS.items()
        for name in names
    ]
    return [f"{name} {own!r} against {other!r}" for name, own, other in pairs if own != other]


def figure(metrics: dict[str, Any], metric: str) -> dict[str, Any]:
    """A measure of the distilled draft in its target domain."""
    by_domain = metrics["candidates"].get(CANDIDATE, {})
    return by_domain.get(metrics["domain"], {}).get(metric) or no_data("not measured")


def _other_purpose(own: dict[str, Any], champion: dict[str, Any]) -> list[str]:
    """Parts of the compatibility key, and the domain, in which two drafts differ."""
    theirs, ours = (
        {
            **{f"compatibility key's {name}": part for name, part in found["compatibility_key"].items()},
            "domain": found["domain"],
        }
        for found in (champion, own)
    )
    return [
        f"its {name} is {ours.get(name)!r}, the champion's {theirs.get(name)!r}"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]


def _text(measure: dict[str, Any]) -> str:
    if measure["value"] is None:
        return f"no value ({measure['reason']})"
    interval = measure["interval"]
    return f"{measure['value']:.4g}" + (f" ({interval[0]:.4g} to {interval[1]:.4g})" if interval else "")
