"""What the draft is worth in money: the sheet that a team fills in (conf/roi/), and what follows from it.

An instance decodes `plain_tokens_per_second` at the stated load, with the draft `speedup` times as many, for another
price per hour. Per month, H being the hours that it takes without the draft:

    H           = requests x tokens per request / plain tokens per second / 3600
    cost before = H x price before
    cost after  = H / speedup x price after + extra memory
    net saving  = cost before - cost after
    ROI         = months x net saving / engineering cost

Each figure rises or falls with the speedup throughout, so the ends of the speedup's 95 % interval give the figure's.
The sheet itself is taken as exact.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.core.gating import CANDIDATE
from pipeline.core.metrics import measure, no_data

SECONDS_PER_HOUR = 3600
MAY_BE_ZERO = ("engineering_cost", "extra_memory_cost_per_month")
NO_FIGURE = {
    "roi": "no engineering cost is stated",
    "break_even_months": "never: the draft costs at least as much as it saves",
    "break_even_speedup": "never: the extra memory alone costs as much as serving does now",
}


@dataclass
class RoiConfig:
    """The money sheet."""

    name: str  # of the sheet, shown with every result
    currency: str  # of all amounts
    price_per_hour_before: float  # of an instance that serves without the draft, > 0
    price_per_hour_after: float  # of an instance that serves with it, > 0
    batch: int  # requests decoded together, >= 1: the load at which the speedup is taken
    requests_per_month: float  # > 0
    tokens_per_request: float  # generated, mean, > 0
    plain_tokens_per_second: float  # of one instance without the draft at that load, all requests together, > 0
    engineering_cost: float  # once, >= 0
    extra_memory_cost_per_month: float  # beyond the instances' price, >= 0
    period_months: float  # over which the return is stated, > 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("name", "currency"):
                continue
            if not (0 < value < math.inf or (value == 0 and name in MAY_BE_ZERO)):
                raise ValueError(f"roi.{name} must be {'>= 0' if name in MAY_BE_ZERO else '> 0'}, got {value}")

    @property
    def gpu_hours_before(self) -> float:
        """Hours of an instance per month without the draft."""
        tokens = self.requests_per_month * self.tokens_per_request
        return tokens / self.plain_tokens_per_second / SECONDS_PER_HOUR

    @property
    def cost_before(self) -> float:
        """Cost per month without the draft."""
        return self.gpu_hours_before * self.price_per_hour_before

    @property
    def break_even_speedup(self) -> float | None:
        """The speedup above which a month costs less than before: the ratio of the prices where memory costs nothing
        extra; None: there is none."""
        left = self.cost_before - self.extra_memory_cost_per_month
        return self.gpu_hours_before * self.price_per_hour_after / left if left > 0 else None


@dataclass(frozen=True)
class Figure:
    """What a result means; `unit`: hours, money (in the sheet's currency), share, ratio or months."""

    label: str
    unit: str
    meaning: str


FIGURES = {
    "gpu_hours_before": Figure(
        "GPU hours per month without the draft", "hours", "requests x tokens per request / plain tokens per second"
    ),
    "gpu_hours_after": Figure("GPU hours per month with the draft", "hours", "hours without the draft / speedup"),
    "gpu_hours_saved": Figure("GPU hours saved per month", "hours", "hours without the draft - hours with it"),
    "cost_before": Figure("cost per month without the draft", "money", "hours without the draft x price before"),
    "cost_after": Figure("cost per month with the draft", "money", "hours with the draft x price after + extra memory"),
    "net_saving": Figure("net saving per month", "money", "cost without the draft - cost with it"),
    "net_saving_share": Figure("net saving as a share", "share", "net saving / cost without the draft"),
    "break_even_speedup": Figure(
        "speedup above which it saves", "ratio", "price after / price before; more where memory costs extra"
    ),
    "roi": Figure(
        "return on the engineering cost",
        "ratio",
        "(saved GPU time cost - extra memory cost) over the period / engineering cost; 1 earns it back",
    ),
    "break_even_months": Figure("engineering cost earned back after", "months", "engineering cost / net saving"),
}


def roi(sheet: RoiConfig, metrics: dict[str, Any]) -> dict[str, Any]:
    """The sheet, the speedup from `metrics` (the document data/eval/metrics.json), each of `FIGURES` as a measure."""
    speedup = speedup_at(metrics, sheet.batch)
    return {"sheet": asdict(sheet), "domain": metrics["domain"], "speedup": speedup, "figures": figures(sheet, speedup)}


def speedup_at(metrics: dict[str, Any], batch: int) -> dict[str, Any]:
    """The draft's speedup on the target domain with `batch` requests decoded together, never that at another load."""
    alone = metrics["candidates"][CANDIDATE].get(metrics["domain"], {}).get("speedup")
    rows = [*([{"batch": 1, "speedup": alone}] if alone else []), *metrics.get("by_batch", [])]
    found = {row["batch"]: row["speedup"] for row in rows}
    missing = f"the speedup at batch {batch} (roi.batch) was not measured"
    if batch not in found:
        return no_data(
            f"{missing}; batches measured: {', '.join(str(n) for n in sorted(found) if found[n]['value'] is not None) or 'none'}"
        )
    if found[batch]["value"] is None:
        return no_data(f"{missing}: {found[batch]['reason']}")
    return found[batch]


def figures(sheet: RoiConfig, speedup: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The measure of each of `FIGURES`; what follows from a speedup that was not measured has its reason."""
    given = {name: getattr(sheet, name) for name in ("gpu_hours_before", "cost_before", "break_even_speedup")}
    found = {name: _carried(name, value, [], 0) for name, value in given.items()}
    if speedup["value"] is None:
        return {name: found.get(name) or no_data(speedup["reason"]) for name in FIGURES}
    ends = [_figures_at(sheet, end) for end in speedup["interval"] or ()]
    for name, value in _figures_at(sheet, speedup["value"]).items():
        found[name] = _carried(name, value, [end[name] for end in ends], speedup["count"])
    return {name: found[name] for name in FIGURES}


def _figures_at(sheet: RoiConfig, speedup: float) -> dict[str, float | None]:
    """What follows from a speedup; None: there is no such figure."""
    hours = sheet.gpu_hours_before / speedup
    cost = hours * sheet.price_per_hour_after + sheet.extra_memory_cost_per_month
    saving = sheet.cost_before - cost
    engineering = sheet.engineering_cost
    return {
        "gpu_hours_after": hours,
        "gpu_hours_saved": sheet.gpu_hours_before - hours,
        "cost_after": cost,
        "net_saving": saving,
        "net_saving_share": saving / sheet.cost_before,
        "roi": sheet.period_months * saving / engineering if engineering else None,
        "break_even_months": engineering / saving if saving > 0 else None,
    }


def _carried(name: str, value: float | None, ends: list[float | None], count: int) -> dict[str, Any]:
    """A figure with what it is at the ends of the speedup's interval, in rising order."""
    if value is None:
        return no_data(NO_FIGURE[name])
    if None in ends:
        return measure(value, None, count, "never at the lower end of the interval")
    return measure(value, (min(ends), max(ends)) if ends else None, count)
