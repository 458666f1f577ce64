"""The parts that the report's page is made of, as the template draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.core.report_page import quantity, span


@dataclass(frozen=True)
class Cell:
    """`note` stands in small type under the text, line by line; `kind`: "", "number", "limit", "missing", or a check's state."""

    text: str
    note: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Bar:
    """A horizontal bar; `length` and the ends of the interval are percentages of its frame."""

    label: str
    series: int
    text: str
    length: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Bars:
    groups: list[tuple[str, list[Bar]]]  # a heading and its bars
    reference: float | None  # where a ratio of 1 lies, a percentage of the frame


@dataclass(frozen=True)
class Line:
    """A line through `points`, percentages of the frame from its lower left corner, each with its value as text."""

    label: str
    series: int
    points: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Lines:
    """Ticks are pairs of a percentage of the frame and a text."""

    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    x_label: str


def measure_cell(entry: dict[str, Any], unit: str, note: str = "") -> Cell:
    """A measure of metrics.json: its value with the interval and `note` under it, or why there is none."""
    if entry["value"] is None:
        return Cell(entry["reason"], kind="missing")
    under = [text for text in (span(entry["interval"], unit), note) if text]
    return Cell(quantity(entry["value"], unit), "\n".join(under), "number")


def number_cell(value: float, unit: str) -> Cell:
    """A plain number."""
    return Cell(quantity(value, unit), kind="number")


def number_or_reason(value: float | None, unit: str, reason: str) -> Cell:
    """A plain number, or `reason` where there is none."""
    return Cell(reason, kind="missing") if value is None else number_cell(value, unit)
