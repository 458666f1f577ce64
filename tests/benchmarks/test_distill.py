"""The distillation benchmark's tables run on the tiny model, keep each row, and go on where they were interrupted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from clone import checked
from script import load
from tiny_settings import distill_config


def table(clone: Path, name: str, *arguments: str) -> tuple[dict, str]:
    """The results and the printed text of one table."""
    printed = checked([sys.executable, "benchmarks/distill.py", name, *arguments], clone, PYTHONPATH=str(clone))
    return json.loads((clone / f"benchmarks/results/distill_{name}.json").read_text(encoding="utf-8")), printed


def test_recipes_are_measured_once_and_the_missing_ones_added(clone):
    (clone / "benchmarks/results/distill_recipes.json").unlink(missing_ok=True)
    first, printed = table(clone, "recipes", "--minutes", "0.02", "--only", "default")
    (row,) = first["rows"]
    assert row["name"] == "default" and row["tokens_per_second"] > 0 and "| default |" in printed
    assert 0 <= row["dev_token_acceptance"] <= 1 and row["dev_speedup"] > 0 and row["layers"] == [0, 3]
    both, _ = table(clone, "recipes", "--minutes", "0.02", "--only", "default", "loss: LK hybrid")
    assert both["rows"][0] == row
    assert both["rows"][1]["loss"] == "lk_hybrid"
    assert row["machine"] and "benchmarks/distill.py recipes" in first["command"]


def test_the_limits_say_what_the_gate_decided(clone):
    found, printed = table(clone, "limits")
    names = [row["name"] for row in found["rows"]]
    assert names[0] == "legal, temperature 0" and names[-1].startswith("creative") and len(names) == 6
    for row in found["rows"]:
        assert row["gate"] in ("passed", "refused") and (row["gate"] == "refused") == bool(row["failed_checks"])
        assert 0 <= row["token_acceptance"] <= 1 and row["draft_length"] >= 1


def test_a_domain_draft_stands_beside_a_generic_one(clone):
    answers = "data/answers/dev"  # any folder of answers
    found, _ = table(clone, "domains", "--minutes", "0.02", "--generic-answers", answers)
    assert [row["name"] for row in found["rows"]] == ["legal draft", "generic draft"]
    for row in found["rows"]:
        assert all(0 <= row[domain] <= 1 for domain in ("legal", "code", "conversation"))


def test_a_row_is_measured_again_only_when_what_it_depends_on_changed(tmp_path, monkeypatch):
    lab = load("distill_lab")
    monkeypatch.setattr(lab, "RESULTS", tmp_path)
    calls: list[str] = []

    def measure() -> dict:
        calls.append("measured")
        return {"value": len(calls)}

    assert lab.Results("x", {"minutes": 1}).row("a", {"rate": 1}, measure)["value"] == 1
    assert lab.Results("x", {"minutes": 1}).row("a", {"rate": 1}, measure)["value"] == 1
    assert lab.Results("x", {"minutes": 1}).row("a", {"rate": 2}, measure)["value"] == 2
    assert [row["value"] for row in lab.Results("x", {"minutes": 1}).rows.values()] == [2]
    assert lab.Results("x", {"minutes": 2}).row("a", {"rate": 2}, measure)["value"] == 3
    with pytest.raises(ZeroDivisionError):
        lab.Results("x", {"minutes": 1}).row("b", {}, lambda: 1 // 0)
    assert len(lab.Results("x", {"minutes": 2}).rows) == 1, "a row that failed leaves nothing"


@pytest.mark.parametrize(("constant", "slower", "long_runs"), [(0.5, 1.0, 1), (20.0, 1.0, 1), (20.0, 1.4, 3)])
def test_a_wall_clock_budget_is_kept(constant, slower, long_runs, monkeypatch):
    """However long the evaluations take beside the steps; `slower`: long runs are, by more than the probes tell."""
    lab, took = load("distill_lab"), []

    def run(_, settings, **options):
        seconds = constant + 0.3 * math.ceil(20 * settings.epochs)
        took.append(seconds * slower if seconds > 60 else seconds)
        return lab.Trained(None, [], [], took[-1])

    monkeypatch.setattr(lab.Lab, "run", run)
    monkeypatch.setattr(lab.Lab, "__init__", lambda self: setattr(self, "warm", True))
    assert lab.Lab().run_for(120, distill_config()).seconds == pytest.approx(120, rel=lab.TOLERANCE)
    assert [seconds > 60 for seconds in took].count(True) == long_runs
