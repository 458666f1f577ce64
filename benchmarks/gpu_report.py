"""What the GPU benchmarks found: JSON that is written after every part, goals and printed tables."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_twins import HERE

from pipeline.core.artifacts import write_json


@dataclass
class Report:
    """The facts found so far, on disk after every part: a run that is cut short leaves what it measured."""

    path: Path
    schema: str
    found: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each part
    left_out: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        yield
        self.seconds[name] = time.perf_counter() - started
        print(f"   {name}: {self.seconds[name] / 60:.2f} minutes", flush=True)
        self.write()

    def leave_out(self, what: str, why: str = "the time for it is spent") -> None:
        self.left_out.append(f"{what}: {why}")
        print(f"left out: {self.left_out[-1]}", flush=True)

    def write(self) -> None:
        minutes = {name: seconds / 60 for name, seconds in self.seconds.items()}
        facts = {"minutes": minutes, "left_out": self.left_out, "elapsed_seconds": self.elapsed}
        write_json(self.path, self.schema, 1, {**self.found, **facts})


def results_path(arguments: argparse.Namespace, name: str) -> Path:
    """Where the figures go: `--output`, else results/; those of a tiny run never replace measured ones."""
    return arguments.output or HERE / "results" / (f"{name}_tiny.json" if arguments.tiny else f"{name}.json")


def goal(name: str, value: float | None, at_least: float, aim: float | None) -> dict[str, Any]:
    """A bound that must be reached and the aim beyond it; `met` is None where nothing was measured."""
    return {
        "goal": name,
        "value": value,
        "at_least": at_least,
        "aim": aim,
        "met": None if value is None else value >= at_least,
    }


def print_goals(goals: list[dict[str, Any]]) -> None:
    print()
    for row in goals:
        value = "not measured" if row["value"] is None else f"{row['value']:.2f}"
        word = {True: "met", False: "NOT MET", None: "-"}[row["met"]]
        aim = "" if row["aim"] is None else f" (aim {row['aim']})"
        print(f"{row['goal']:42} {value:>12}, needs >= {row['at_least']}{aim}: {word}")


def print_table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """`columns`: key -> format; None prints as a dash."""
    print(f"\n{title}")
    cells = [list(columns)]
    for row in rows:
        cells.append(["-" if row[key] is None else format(row[key], form) for key, form in columns.items()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    sys.stdout.flush()
