"""The report in headless Chromium: complete, self-contained, without errors, and fitting a desk and a phone."""

from __future__ import annotations

import re

import pytest
from browser import looked_at, print_to_pdf
from test_report import config, page_of, sample_metrics, write_artifacts

from pipeline import report, stage

A4_PIXELS = 680
SECTIONS = [
    "Draft for tiny on legal", "Checks of the gate default", "Acceptance by domain", "Speed", "Latency", "Memory", "Money", "Cost model",
    "Acceptance by position", "Lossless", "Training", "Data", "What the numbers mean", "Settings and machine",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "PROJECT_ROOT", root)
        patch.setattr(report, "_log", lambda *_: None)
        write_artifacts(root, sample_metrics())
        report.run(config())
        return page_of(root)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_whole_and_fits(page, width):
    found = looked_at(page, width)
    assert found["sections"] == SECTIONS and found["empty"] == 0
    assert width - 20 <= found["width"] <= width, "but for a scroll bar"
    assert found["content"] <= found["width"], "nothing is wider than the view: tables scroll on their own"
    assert found["errors"] == [] and found["fetched"] == [] and found["scripts"] == 0


@pytest.mark.parametrize(
    "broken",
    ["<script>no_such_function()</script>", "<script>=</script>", '<img src="none.png" onerror="no_such_function()">'],
    ids=["script", "syntax", "handler"],
)
def test_errors_while_a_page_loads_are_seen(page, broken):
    (error,) = looked_at(page.replace("</main>", f"{broken}</main>"), 800)["errors"]
    assert "SyntaxError" in error or "no_such_function is not defined" in error


def test_the_page_prints(page, tmp_path):
    """Nothing sticks out of a sheet of A4 (18 cm between its margins at 96 dots per inch), in light colours also from a dark desk;
    a browser makes a document of several such sheets of it."""
    printed = page.replace("@media print", "@media all")
    light, dark = (looked_at(printed, A4_PIXELS, dark) for dark in (False, True))
    assert light["content"] <= light["width"] and light["background"] == dark["background"] == "rgb(255, 255, 255)"
    pdf = print_to_pdf(page, tmp_path)
    assert pdf.startswith(b"%PDF-") and 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20


def test_the_page_follows_the_colour_scheme(page):
    light, dark = (looked_at(page, 800, dark)["background"] for dark in (False, True))
    assert light != dark
