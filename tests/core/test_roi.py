"""Money: the reference story's right value, losses called losses, intervals carried, and no load but the stated one."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pipeline.core.artifacts import read_json, write_json
from pipeline.core.metrics import measure, no_data
from pipeline.core.roi import FIGURES, RoiConfig, figures, roi, speedup_at

SHEET = RoiConfig(
    name="legal service", currency="USD", price_per_hour_before=4.0, price_per_hour_after=7.0, batch=8,
    requests_per_month=1_440_000, tokens_per_request=500, plain_tokens_per_second=200, engineering_cost=15_000,
    extra_memory_cost_per_month=0, period_months=12,
)  # fmt: skip


def with_(**changes) -> RoiConfig:
    return dataclasses.replace(SHEET, **changes)


def at(speedup: float, interval=None, sheet: RoiConfig = SHEET) -> dict:
    return figures(sheet, measure(speedup, interval, 24))


def values(found: dict) -> dict:
    return {name: entry["value"] for name, entry in found.items()}


def metrics(alone=None, **by_batch) -> dict:
    own = {} if alone is None else {"speedup": alone}
    rows = [{"batch": int(name[1:]), "draft_length": 3, "speedup": entry} for name, entry in by_batch.items()]
    return {"domain": "legal", "candidates": {"distilled": {"legal": own, "all": {}}}, "by_batch": rows}


def test_two_and_a_half_times_faster_at_a_price_ratio_of_1_75_saves_30_percent():
    found = at(2.5)
    assert list(found) == list(FIGURES)
    assert values(found) == pytest.approx(
        {
            "gpu_hours_before": 1000.0,
            "gpu_hours_after": 400.0,
            "gpu_hours_saved": 600.0,
            "cost_before": 4000.0,
            "cost_after": 2800.0,
            "net_saving": 1200.0,
            "net_saving_share": 0.30,
            "break_even_speedup": 1.75,
            "roi": 12 * 1200 / 15_000,
            "break_even_months": 12.5,
        }
    )


def test_a_speedup_below_the_price_ratio_loses_money():
    found = at(1.4)
    assert found["net_saving"]["value"] == pytest.approx(4000 - 7000 / 1.4)
    assert found["net_saving_share"]["value"] == pytest.approx(-0.25)
    assert found["roi"]["value"] < 0
    assert found["break_even_months"]["value"] is None
    assert found["break_even_months"]["reason"].startswith("never")


def test_at_the_break_even_speedup_nothing_is_saved():
    sheet = with_(extra_memory_cost_per_month=500)
    assert sheet.break_even_speedup == pytest.approx(7000 / 3500)
    assert at(sheet.break_even_speedup, sheet=sheet)["net_saving"]["value"] == pytest.approx(0, abs=1e-9)
    assert at(2.5, sheet=sheet)["net_saving"]["value"] == pytest.approx(1200 - 500)
    assert at(2.5, sheet=with_(extra_memory_cost_per_month=4000))["break_even_speedup"]["value"] is None


def test_the_interval_of_the_speedup_is_carried_through():
    found = at(2.5, (2.0, 2.8))
    assert found["net_saving_share"]["interval"] == pytest.approx([1 - 1.75 / 2.0, 1 - 1.75 / 2.8])
    assert found["cost_after"]["interval"] == pytest.approx([2500, 3500])
    assert found["break_even_months"]["interval"] == pytest.approx([15_000 / 1500, 15_000 / 500])
    assert found["cost_before"]["interval"] is None
    assert found["net_saving"]["count"] == 24


def test_an_interval_that_reaches_into_loss_has_no_end_of_months():
    found = at(2.0, (1.6, 2.4))
    assert found["net_saving"]["interval"][0] < 0 < found["net_saving"]["interval"][1]
    months = found["break_even_months"]
    assert (months["value"], months["interval"]) == (pytest.approx(30), None)
    assert "lower end" in months["reason"]


def test_without_engineering_cost_there_is_no_return_to_state():
    found = at(2.5, sheet=with_(engineering_cost=0))
    assert (found["roi"]["value"], found["break_even_months"]["value"]) == (None, 0)
    assert found["roi"]["reason"] == "no engineering cost is stated"
    assert at(1.4, sheet=with_(engineering_cost=0))["break_even_months"]["value"] is None


def test_the_speedup_is_that_of_the_stated_load():
    measured = metrics(measure(2.9), b4=measure(2.2), b8=measure(1.5, (1.4, 1.6), 16))
    assert speedup_at(measured, 8) == measure(1.5, (1.4, 1.6), 16)
    assert speedup_at(measured, 1)["value"] == 2.9
    assert roi(SHEET, measured)["figures"]["gpu_hours_after"]["value"] == pytest.approx(1000 / 1.5)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (metrics(measure(2.9), b4=measure(2.2)), "batch 8 (roi.batch) was not measured; batches measured: 1, 4"),
        (metrics(measure(2.9), b8=no_data("not timed")), "batch 8 (roi.batch) was not measured: not timed"),
        (metrics(), "batches measured: none"),
    ],
)
def test_a_load_that_was_not_measured_is_named_and_batch_1_does_not_stand_in(found, words):
    document = roi(SHEET, found)
    assert document["speedup"]["value"] is None and words in document["speedup"]["reason"]
    known = {"gpu_hours_before", "cost_before", "break_even_speedup"}
    for name, entry in document["figures"].items():
        assert (entry["value"] is not None) == (name in known)
        assert name in known or words in entry["reason"]


def test_the_document_is_strict_json(tmp_path):
    document = roi(SHEET, metrics(b8=measure(1.75, (1.0, 2.0), 3)))
    write_json(tmp_path / "roi.json", "domain-draft/roi", 1, document)
    read = read_json(tmp_path / "roi.json", "domain-draft/roi", 1)
    assert read["sheet"] == dataclasses.asdict(SHEET) and read["figures"] == document["figures"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("price_per_hour_before", 0.0),
        ("plain_tokens_per_second", -1.0),
        ("requests_per_month", math.inf),
        ("tokens_per_request", math.nan),
        ("engineering_cost", -1.0),
        ("batch", 0),
    ],
)
def test_a_sheet_of_impossible_figures_is_refused(name, value):
    with pytest.raises(ValueError, match=f"roi.{name} must be"):
        with_(**{name: value})
