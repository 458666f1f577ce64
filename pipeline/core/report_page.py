"""What the report and the closing summary say, without their layout: numbers as text, and the rows behind every chart.

A missing number is shown as its reason. Nothing here computes a metric; see `pipeline.core.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.cost_model import Costs
from pipeline.core.gating import CANDIDATE
from pipeline.core.metrics import no_data, scaled

TOKEN_ACCEPTANCE = "token_acceptance_trimmed_head"
SHARES = (TOKEN_ACCEPTANCE, "token_acceptance_full_head", "token_acceptance_without_loops", "acceptance_rate")


@dataclass(frozen=True)
class Unit:
    """How numbers of one unit are written: `scale` times the number, rounded, then the suffix."""

    scale: float
    decimals: int
    suffix: str


UNITS = {
    "share": Unit(100, 1, " %"),
    "ratio": Unit(1, 2, "×"),
    "tokens/s": Unit(1, 1, " tokens/s"),
    "tokens per round": Unit(1, 2, " per round"),
    "s": Unit(1000, 1, " ms"),
    "tokens": Unit(1, 0, ""),
    "MiB": Unit(1, 1, " MiB"),
    "bytes": Unit(1 / (1 << 20), 1, " MiB"),
    "hours": Unit(1, 1, " h"),
    "months": Unit(1, 1, " months"),
    "money": Unit(1, 0, ""),
}
PLAIN_NUMBER = Unit(1, 3, "")


@dataclass(frozen=True)
class Documents:
    """The artifacts of the earlier stages, as they were read, and what they are worth in money."""

    prompts: dict[str, Any]
    draft: dict[str, Any]
    history: list[dict[str, str]]  # rows of history.csv, every cell a text
    metrics: dict[str, Any]
    verdict: dict[str, Any]
    receipt: dict[str, Any]
    roi: dict[str, Any]  # see `pipeline.core.roi.roi`
    commits: dict[str, str]  # stage -> git commit of the code that it ran, as far as that is known


def quantity(value: float, unit: str) -> str:
    """`value` rounded for reading, with its unit."""
    how = UNITS.get(unit, PLAIN_NUMBER)
    return f"{how.scale * value:,.{how.decimals}f}{how.suffix}"


def exact(value: float, unit: str) -> str:
    """`value` as it was configured, with its unit."""
    how = UNITS.get(unit, PLAIN_NUMBER)
    return f"{how.scale * value:g}{how.suffix}"


def span(interval: Sequence[float] | None, unit: str) -> str:
    """A 95 % interval for reading; empty when there is none."""
    if interval is None:
        return ""
    how = UNITS.get(unit, PLAIN_NUMBER)
    low, high = (f"{how.scale * end:,.{how.decimals}f}" for end in interval)
    return f"{low}–{high}{how.suffix}"


def measured(entry: dict[str, Any], unit: str) -> str:
    """A measure of metrics.json on one line: value and interval, or why there is none."""
    if entry["value"] is None:
        return f"no value: {entry['reason']}"
    interval = span(entry["interval"], unit)
    return quantity(entry["value"], unit) + (f" ({interval})" if interval else "")


def candidates(metrics: dict[str, Any]) -> list[str]:
    """The distilled draft, then what it is compared with, the simplest last."""
    return sorted(reversed(list(metrics["candidates"])), key=lambda name: name != CANDIDATE)


def domains(metrics: dict[str, Any]) -> list[str]:
    """The target domain, the others, and "all" when there is more than one."""
    names = [name for name in metrics["candidates"][CANDIDATE] if name not in (metrics["domain"], "all")]
    return [metrics["domain"], *names, *(["all"] if names else [])]


def found(metrics: dict[str, Any], candidate: str, domain: str, metric: str) -> dict[str, Any]:
    """The measure, or an empty one with the reason; "all" stands only for a metric that every domain has."""
    by_domain = metrics["candidates"][candidate]
    if domain == "all" and any(metric not in measures for measures in by_domain.values()):
        return no_data("not measured in every domain")
    return by_domain.get(domain, {}).get(metric) or no_data("not measured in this domain")


def predicted(metrics: dict[str, Any], candidate: str, domain: str, name: str) -> float | None:
    """A predicted speedup; None for a candidate without predictions and where what it needs was not measured."""
    return metrics["candidates"][candidate].get(domain, {}).get("predicted_speedup", {}).get(name)


def registration(receipt: dict[str, Any]) -> str:
    """What became of the draft in the model registry."""
    if not receipt["registered"]:
        return f"not registered: {receipt['reason']}"
    return f"registered as {receipt['model_name']} version {receipt['version']} (@{receipt['alias']})"


def money(roi: dict[str, Any]) -> str:
    """What the draft saves or costs a month and when it has paid for itself, on one line."""
    figures, currency = roi["figures"], roi["sheet"]["currency"]
    saving, share, months = (figures[name] for name in ("net_saving", "net_saving_share", "break_even_months"))
    if saving["value"] is None:
        return f"no value: {saving['reason']}"
    if saving["value"] <= 0:
        enough = figures["break_even_speedup"]
        above = f"above a speedup of {quantity(enough['value'], 'ratio')}" if enough["value"] else "at no speedup"
        return f"costs {measured(scaled(saving, -1), 'money')} {currency} a month more than it saves; it pays {above}"
    unsure = f", {months['reason']}" if months["reason"] else ""
    return (
        f"saves {measured(saving, 'money')} {currency} a month, {measured(share, 'share')} of the cost; paid back after"
        f" {measured(months, 'months')}{unsure}"
    )


def words(name: str) -> str:
    """An identifier as words."""
    return name.replace("_", " ")


def plot_tables(documents: Documents) -> dict[str, list[dict[str, Any]]]:
    """The rows of plots/*.csv by file name; what has no value has no row, or an empty cell beside one that has.

    What dvc.yaml plots is never an empty cell, which DVC's charts would draw as 0.
    """
    metrics = documents.metrics
    pairs = [(candidate, domain) for candidate in candidates(metrics) for domain in domains(metrics)]
    return {
        "training": [
            {name: row[name] for name in ("step", "tokens", "dev_token_acceptance")}
            for row in documents.history
            if row["dev_token_acceptance"]
        ],
        "token_acceptance": [
            {"domain": domain, "token_acceptance": entry["value"], **_ends(entry)}
            for domain in domains(metrics)
            if (entry := found(metrics, CANDIDATE, domain, TOKEN_ACCEPTANCE))["value"] is not None
        ],
        "acceptance_by_domain": [
            {"candidate": candidate, "domain": domain, "metric": metric, "value": entry["value"], **_ends(entry)}
            for candidate, domain in pairs
            for metric in SHARES
            if (entry := found(metrics, candidate, domain, metric))["value"] is not None
        ],
        "acceptance_by_position": [
            {"candidate": candidate, "position": position, **row}
            for candidate in candidates(metrics)
            for position, row in enumerate(_by_position(metrics, candidate), start=1)
        ],
        "speedup": [
            {
                "candidate": candidate,
                "domain": domain,
                "speedup": entry["value"],
                **_ends(entry),
                "predicted_measured_cost": predicted(metrics, candidate, domain, "measured-cost"),
            }
            for candidate, domain in pairs
            if (entry := found(metrics, candidate, domain, "speedup"))["value"] is not None
        ],
        "draft_lengths": [
            {**{name: row[name] for name in ("draft_length", "predicted_speedup")}, "speedup": row["speedup"]["value"]}
            for row in metrics["by_draft_length"]
        ],
        "verify_cost": _verify_cost_rows(Costs.from_document(metrics["costs"])),
    }


def _by_position(metrics: dict[str, Any], candidate: str) -> list[dict[str, float | None]]:
    """Acceptance by position on the target domain; empty where the candidate was not decoded."""
    entry = found(metrics, candidate, metrics["domain"], "acceptance_by_position")
    shares = entry["value"] or []
    intervals = entry["interval"] or [None] * len(shares)
    return [
        {"value": share, **_ends({"interval": interval})} for share, interval in zip(shares, intervals, strict=True)
    ]


def _ends(entry: dict[str, Any]) -> dict[str, float | None]:
    lower, upper = entry["interval"] or (None, None)
    return {"lower": lower, "upper": upper}


def _verify_cost_rows(costs: Costs) -> list[dict[str, Any]]:
    return [
        {"tokens": k + 1, "seconds": seconds, "ratio": costs.verify_cost(k)}
        for k, seconds in sorted(costs.target_pass_seconds.items())
    ]
