"""The report stage: what the page and its CSV files say, and how an enforced gate ends the pipeline."""

from __future__ import annotations

import copy
import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from dependencies import ROOT
from tiny_projects import fresh_registry

from pipeline import report, stage
from pipeline.core.artifacts import read_json, write_json
from pipeline.core.errors import PipelineError
from pipeline.core.gating import Check, judge
from pipeline.core.roi import RoiConfig
from pipeline.gate import GateConfig

SHEET = {
    "name": "legal service", "currency": "EUR", "price_per_hour_before": 4.0, "price_per_hour_after": 7.0, "batch": 8,
    "requests_per_month": 1_440_000, "tokens_per_request": 500, "plain_tokens_per_second": 200,
    "engineering_cost": 14_400, "extra_memory_cost_per_month": 0, "period_months": 12,
}  # fmt: skip
KEY = {"target": "builtin:tiny", "target_fingerprint": "ab12", "tokenizer": "cd34", "quantization": "none"}


def entry(value, half_width=0.02, count=24, **more):
    interval = [value - half_width, value + half_width]
    return {"value": value, "interval": interval, "count": count, "reason": None, **more}


def missing(reason):
    return {"value": None, "interval": None, "count": 0, "reason": reason}


def teacher_forced(value, full_head):
    shares = {"token_acceptance_trimmed_head": value, "token_acceptance_without_loops": value - 0.03}
    full = missing("this candidate has no output head") if full_head is None else entry(full_head)
    others = ("token_acceptance_full_head", "token_acceptance_greedy_draft", "token_acceptance_exact_match")
    return {**{name: entry(share, count=72) for name, share in shares.items()}, **dict.fromkeys(others, full)}


def served(rate, speedup, positions):
    return {
        "acceptance_rate": entry(rate, draft_length=len(positions)),
        "mean_acceptance_length": entry(1 + sum(positions), 0.1),
        "acceptance_by_position": {
            "value": positions,
            "interval": [[share - 0.05, share + 0.04] for share in positions],
            "count": 24,
            "reason": None,
        },
        "speedup": entry(speedup, 0.06),
        "tokens_per_second": entry(22.5 * speedup, 0.8),
        "plain_tokens_per_second": entry(22.5, 0.4),
        "ttft_seconds": entry(0.081, 0.004),
        "ttft_ratio": entry(1.12, 0.05),
        "latency_seconds": entry(1.93, 0.05),
        **{f"plain_{name}": flat(value) for name, value in (("ttft_seconds", 0.07), ("latency_seconds", 2.7))},
        "target_passes_saved": entry(0.41, 0.03),
        **{f"itl_p{percent}_seconds": flat(0.0012 * percent) for percent in (50, 95, 99)},
        "itl_jitter_seconds": entry(0.031, 0.004),
        "smoothness": flat(1.21),
    }


def flat(value):
    return {"value": value, "interval": None, "count": 24, "reason": None}


def conditions(found):
    """The rows and tables beside the headline; `found` are the distilled draft's measures by domain."""
    both = {f"{name}, continuation": measures for name, measures in found.items() if name != "all"}
    row = {**served(0.5, 1.27, [0.6, 0.4]), **teacher_forced(0.55, 0.54), "others": {}}
    lookup = {"draft_length": 6, **row, "speedup": entry(1.33), "predicted_speedup": {"measured-cost": 1.38}}
    taken = {
        "weight_bytes": 74 << 20,
        "cache_bytes": 1 << 20,
        "draft_share": 0.21,
        "memory_efficiency": entry(5.6, 0.4),
    }
    untimed = {**row, "speedup": missing("not timed")}
    return {
        "by_task": {"distilled": {**both, "all": found["all"]}},
        "by_prompt_length": {"distilled": {"under 1k": found["all"], "all": found["all"]}},
        "by_draft_length": [
            {"draft_length": k, "expected_acceptance_rate": 0.7, "predicted_speedup": 1.2 + k / 10, **row} for k in (1, 2)
        ],
        "by_batch": [{"batch": 8, "draft_length": 3, "predicted_speedup": {"measured-cost": 2.4}, **row, "speedup": entry(2.5, 0.1, 16), "others": {"prompt_lookup": lookup}}, {"batch": 16, "draft_length": None, **untimed}],
        "by_temperature": [{"temperature": 0.7, "draft_length": 4, **row}],
        "other_domains": {},
        "versus_champion": None,
        "champion": None,
        "skipped": {"champion": "no draft was promoted yet"},
        "dev": teacher_forced(0.64, 0.63),
        "memory": {
            "target_weight_bytes": 269 << 20, "target_cache_bytes": 9 << 20, "cache_positions": 224, "peak_bytes": 1500 << 20,
            "candidates": {
                **dict.fromkeys(("distilled", "undistilled", "champion", "small sibling"), taken),
                "prompt_lookup": {**taken, "weight_bytes": 0, "memory_efficiency": missing("it takes no memory")},
            },
        },
    }  # fmt: skip


def sample_candidates(domain):
    predictions = {"measured-cost": 1.49, "classic": 1.83, "simple": 2.05}
    distilled = {
        domain: {
            **teacher_forced(0.6213, 0.6170),
            **served(0.52, 1.4132, [0.71, 0.55, 0.43, 0.35]),
            "predicted_speedup": predictions,
        },
        "code": {
            **teacher_forced(0.312, 0.3330),
            **served(0.24, 1.02, [0.36, 0.25, 0.17, 0.12]),
            "predicted_speedup": {**predictions, "simple": None},
        },
        "all": {
            **teacher_forced(0.507, 0.51),
            **served(0.49, 1.31, [0.68, 0.52, 0.4, 0.31]),
            "predicted_speedup": predictions,
        },
    }
    undistilled = {
        domain: {**teacher_forced(0.071, 0.069), **served(0.03, 0.6214, [0.08, 0.02])},
        "code": teacher_forced(0.052, 0.054),
        "all": {**teacher_forced(0.062, 0.064), **served(0.03, 0.6214, [0.08, 0.02, 0.01, 0.0])},
    }
    lookup = {
        domain: {
            **teacher_forced(0.214, None),
            **served(0.19, 1.1027, [0.26, 0.2, 0.16, 0.13]),
            "predicted_speedup": {**predictions, "classic": 1.07},
        },
        "code": teacher_forced(0.193, None),
        "all": teacher_forced(0.207, None),
    }
    return {"prompt_lookup": lookup, "undistilled": undistilled, "distilled": distilled}


def sample_metrics(domain="legal"):
    seconds = {"1": 0.0440, "2": 0.0452, "3": 0.0463, "4": 0.0481, "5": 0.0497, "7": 0.0522}
    return {
        "target": {"name": "tiny", "id": "builtin:tiny"},
        "compatibility_key": KEY,
        "domain": domain,
        "settings": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "draft_length": 4,
            "draft_length_chosen_on": "dev",
            "max_new_tokens": 64,
            "head_tokens": 12000,
            "dtype": "bfloat16",
            "device": "cpu",
        },
        "draft_lengths": {"prompt_lookup": 6, "undistilled": 1, "distilled": 4, "champion": 3, "small sibling": 2},
        "cost_ratios": {
            "prompt_lookup": 0.0,
            "undistilled": 0.152,
            "distilled": 0.152,
            "champion": 0.2,
            "small sibling": 0.4,
        },
        "prompts": {"dev_prompts": "de00", "golden_prompts": "90de"},
        "candidates": sample_candidates(domain),
        **conditions(sample_candidates(domain)["distilled"]),
        "lossless": {
            "value": 1.0,
            "interval": None,
            "count": 8,
            "reason": None,
            "departures": [],
            "near_tie_gap": 0.5,
            "half_precision_departures": [
                {"prompt_id": "p7", "candidate": "distilled", "token_index": 30, "float32_gap": 0.0213, "legal": True}
            ],
        },
        "reference": {"transformers_plain_tokens_per_second": 19.24, "our_plain_tokens_per_second": 23.11},
        "costs": {
            "cost_ratio": 0.152,
            "draft_step_seconds": 0.0067,
            "target_pass_seconds": seconds,
            "experts_touched": None,
        },
        "served_gap": {"predicted_first_drafted_token": 0.62, "first_drafted_token": 0.71, "gap": 0.09},
        "warnings": ["served acceptance of the first drafted token on legal is 0.71, token acceptance is 0.62"],
        "machine": {"processor": "Some CPU (AVX512)", "threads": 2, "accelerator": None, "torch": "2.11.0"},
    }


def sample_prompts(domain="legal"):
    return {
        "target_domain": domain,
        "prompts": {
            "train": {domain: {"continuation": 819, "instruction": 281}},
            "dev": {domain: {"continuation": 41, "instruction": 7}, "code": {"instruction": 2, "continuation": 6}},
            "golden": {domain: {"continuation": 58, "instruction": 14}, "code": {"continuation": 17}},
        },
        "prompts_wanted": {"train": {domain: 1100}, "dev": {domain: 48, "code": 8}, "golden": {domain: 72, "code": 24}},
        "documents": {domain: 2024, "code": 168},
        "clusters": {domain: 1408, "code": 166},
        "near_duplicate_share": {domain: 0.3043, "code": 0.0119},
        "dropped_by_overlap": {"train": 0, "dev": 7, "golden": 30},
        "words": {"train": 43213, "dev": 2735, "golden": 5058},
    }


def write_artifacts(root, metrics=None, smallest_acceptance=0.45, receipt=None):
    """What the stages before the report leave; a higher `smallest_acceptance` fails the gate."""
    metrics = metrics or sample_metrics()
    domain = metrics["domain"]
    checks = [
        Check("token_acceptance_trimmed_head", domain, "point", ">=", smallest_acceptance, "fail"),
        Check("speedup", domain, "lower", ">", 1.1, "fail"),
        Check("lossless", "all", "point", ">=", 1.0, "fail"),
        Check("acceptance_rate", domain, "point", ">=", 0.54, "warn"),
        Check("speedup", "chat", "lower", ">", 1.0, "warn"),
    ]
    verdict = {"gate": "default", **judge(metrics, checks), "config": {}}
    passed = verdict["passed"]
    receipt = receipt or {
        "registered": passed,
        "reason": "the gate passed" if passed else "the gate 'default' failed: token_acceptance_trimmed_head",
        "model_name": "tiny-legal-draft",
        "version": "3" if passed else None,
        "alias": "candidate" if passed else None,
        "run_id": "r1",
        "tracking_uri": f"sqlite:///{root}/mlflow.db",
        "fingerprint": "ffff",
    }
    draft = {
        "name": "pruned-3-layers",
        "fingerprint": "ffff",
        "compatibility_key": KEY,
        "dtype": "bfloat16",
        "layers": 3,
        "parameters": 42_500_000,
        "head_tokens": 12000,
    }
    write_json(root / "data/prompts/stats.json", "domain-draft/prompts", 1, sample_prompts(domain))
    write_json(root / "data/draft/draft.json", "domain-draft/draft", 1, draft)
    write_json(root / "data/eval/metrics.json", "domain-draft/metrics", 1, metrics)
    write_json(root / "data/gate/verdict.json", "domain-draft/verdict", 1, verdict)
    write_json(root / "data/registry/receipt.json", "domain-draft/receipt", 1, receipt)
    (root / "data/distill").mkdir(exist_ok=True)
    (root / "data/distill/history.csv").write_text(
        "step,tokens,loss,learning_rate,dev_token_acceptance\n10,210000,3.1,0.001,\n20,420000,2.2,0.0009,0.41\n"
        "40,840000,1.7,0.0005,0.56\n60,1260000,1.5,0.0001,0.604\n80,1680000,1.45,0.0,0.601\n81,1701000,,0.0,\n"
    )


def config(enforce=False, **sheet):
    return report.Config(GateConfig("default", "legal-draft", enforce, []), RoiConfig(**{**SHEET, **sheet}))


def page_of(root):
    return (root / "data/report/index.html").read_text(encoding="utf-8")


class Text(HTMLParser):
    """The page's text outside its style sheet, its cells, and the tags left open."""

    def __init__(self, page):
        super().__init__()
        self.open, self.parts, self.cells = [], [], []
        self.feed(page)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        assert tag == "polyline"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.parts.append(data)
        if "td" in self.open:
            self.cells[-1] += data.strip()


@pytest.fixture
def project(tmp_path, monkeypatch, request):
    monkeypatch.setattr(stage, "PROJECT_ROOT", tmp_path)
    if "store" not in request.fixturenames:
        monkeypatch.setattr(report, "_log", lambda *_: None)
    return tmp_path


@pytest.fixture
def store(tmp_path):
    return fresh_registry(tmp_path)


def test_the_page_carries_the_headline_and_every_section(project, capsys):
    write_artifacts(project)
    report.run(config())
    assert capsys.readouterr().out == f"report {project}/data/report/index.html\n"
    text = Text(page_of(project)).text
    assert (
        "The draft passed the gate 'default' with token acceptance 62.1 % (60.1–64.1 %) and speedup 1.41× (1.35–1.47×)"
        " at k = 4 on legal, and is registered as tiny-legal-draft version 3 (@candidate)."
    ) in text
    for expected in (
        "lower end > 1.1×",
        "missed by 2 percentage points, a warning only",
        "23.1 tokens/s",
        "19.2 tokens/s",
        "cost ratio c = 0.152",
        "v(4) = 1.13",
        "a gap of +0.090",
        "2.05×",
        "optimistic, never gated",
        "81.0 ms",
        "0 of 8 departed",
        "departed from plain decoding: 1; 1 at a near tie (at most 0.5 logits apart)",
        "60.4 % after 1,260,000 tokens (step 60)",
        "30.4 %",
        "lower is better",
        "Some CPU (AVX512)",
        "42.5 M parameters",
        "Not compared: champion: no draft was promoted yet.",
        "64.0 % on dev prompts, 62.1 % on golden ones",
        "legal, continuation",
        "under 1k",
        "requests together",
        "1.27×",
        "not timed",
        "p(argmax q): vLLM's default",
        "1.21×",
        "1.07×",
        "8 prompt lookup 6",
        "1.38×",
        "it takes no memory",
        "beyond its k",
        "is 1,500.0 MiB",
        "269.0 MiB",
        "predicted on dev",
    ):
        assert expected in text
    assert page_of(project).startswith("<!doctype html>")


def test_what_was_not_timed_at_other_draft_lengths_is_called_predicted(project):
    metrics = sample_metrics()
    for row in metrics["by_draft_length"]:
        row["speedup"] = missing("not timed")
    write_artifacts(project, metrics)
    report.run(config())
    text = Text(page_of(project)).text
    assert "predicted on dev" in text and "measured on dev" not in text


def test_the_page_names_the_code_and_the_prompts_it_rests_on(project):
    """The commit of each stage where it is known; no times, so that the same inputs give the same page."""
    write_artifacts(project)
    for name, commit in (("distill", "0123456789abcdef"), ("gate", None)):
        write_json(project / f"data/provenance/{name}.json", "domain-draft/provenance", 1, {"git_commit": commit})
    report.run(config())
    cells = Text(page_of(project)).cells
    assert cells[cells.index("git commit of distill") + 1] == "0123456789abcdef"
    assert "git commit of gate" not in cells and cells[cells.index("golden prompts") + 1] == "90de"


def test_the_rows_of_other_domains_stand_below_those_of_the_target_domain(project):
    metrics = sample_metrics()
    names = ("by_draft_length", "by_batch", "by_temperature")
    found = {name: copy.deepcopy(metrics[name]) for name in names}
    found["by_batch"][0]["speedup"] = entry(1.07, 0.01)
    found["by_draft_length"][0]["speedup"] = entry(1.03, 0.01)
    found["by_temperature"][0]["speedup"] = entry(1.01, 0.001)
    write_artifacts(project, metrics=metrics | {"other_domains": {"code": found}})
    report.run(config())
    text = Text(page_of(project)).text
    assert re.search(r"legal 8 distilled 3 .* code 8 distilled 3 .*1\.07×", text)
    assert re.search(r"legal 1 distilled .* code 1 distilled .*1\.03×", text)
    assert re.search(r"legal 0\.7 distilled 4 .* code 0\.7 distilled 4 .*1\.01×", text)


def test_acceptance_by_position_is_shown_with_its_interval(project):
    write_artifacts(project)
    report.run(config())
    heads = "candidate position 1 position 2 position 3 position 4"
    assert f"{heads} distilled 71.0 % 66.0–75.0 % 55.0 % 50.0–59.0 %" in Text(page_of(project)).text


def test_the_champion_is_compared_where_there_is_one(project):
    assert "Against the champion" not in _page_with(project, None)
    versus = {
        "token_acceptance_difference": entry(0.031),
        "acceptance_rate_difference": entry(0.044),
        "speedup_ratio": entry(1.08),
    }
    text = _page_with(project, {"legal": versus, "all": versus})
    assert "Against the champion" in text and "Version 7 of tiny-legal-draft" in text
    assert "3.1 % (" not in text and "3.1 %" in text and "1.08×" in text and "small sibling" in text
    with (project / "data/report/plots/acceptance_by_position.csv").open(newline="") as stream:
        names = [row["candidate"] for row in csv.DictReader(stream)]
    assert list(dict.fromkeys(names)) == ["distilled", "champion", "small sibling", "undistilled", "prompt_lookup"]


def _page_with(project, versus):
    champion = {"model_name": "tiny-legal-draft", "version": "7", "fingerprint": "eeee", "comparable": True}
    metrics = {**sample_metrics(), "versus_champion": versus, "champion": champion}
    others = {"small sibling": metrics["candidates"]["undistilled"], "champion": metrics["candidates"]["distilled"]}
    metrics["candidates"] |= others if versus else {}
    write_artifacts(project, metrics)
    report.run(config())
    return Text(page_of(project)).text


def test_the_page_says_what_the_draft_saves(project):
    write_artifacts(project)
    report.run(config())
    page = Text(page_of(project))
    assert (
        "At the load of the sheet 'legal service' (batch 8, 1,440,000 requests of 500 tokens a month) the draft makes the"
        " service 2.50× (2.40–2.60×) as fast at k = 3 and saves 1,200 (1,083–1,308) EUR a month, 30.0 % (27.1–32.7 %) of the cost;"
        " paid back after 12.0 months (11.0–13.3 months)."
    ) in page.text
    assert "stated over 12 months" in page.text
    assert {"1.75×", "1,440,000", "7", "legal service"} <= set(page.cells)
    document = read_json(project / "data/report/roi.json", "domain-draft/roi", 1)
    assert document["figures"]["net_saving_share"]["value"] == pytest.approx(0.30)


def test_a_draft_that_costs_more_than_it_saves_is_called_so(project):
    write_artifacts(project)
    report.run(config(price_per_hour_after=12.0))
    page = Text(page_of(project))
    assert "and costs 800 (615–1,000) EUR a month more than it saves; it pays above a speedup of 3.00×." in page.text
    assert "never: the draft costs at least as much as it saves" in page.cells


def test_a_saving_that_may_be_a_loss_is_called_so(project):
    write_artifacts(project)
    report.run(config(price_per_hour_after=9.8))
    words = "paid back after 180.0 months, never at the lower end of the interval."
    assert words in Text(page_of(project)).text


def test_savings_at_a_load_that_was_not_measured_are_not_made_up(project):
    write_artifacts(project)
    report.run(config(batch=32))
    page = Text(page_of(project))
    reason = "the speedup at batch 32 (roi.batch) was not measured; batches measured: 1, 8"
    assert f"nothing can be said about savings: {reason}." in page.text
    assert reason in page.cells and all(page.cells)


def test_a_missing_number_shows_its_reason(project):
    metrics = sample_metrics()
    metrics["candidates"]["distilled"]["legal"]["itl_p95_seconds"] = missing("one token each")
    metrics["lossless"] = {**missing("nothing was compared"), "departures": []}
    metrics["reference"] = dict.fromkeys(metrics["reference"])
    write_artifacts(project, metrics)
    (project / "data/distill/history.csv").write_text("step,tokens,loss,learning_rate,dev_token_acceptance\n")
    report.run(config())
    page = Text(page_of(project))
    for reason in (
        "one token each",
        "this candidate has no output head",
        "nothing was compared",
        "evaluate.reference_prompts is 0",
        "not measured in this domain",
        "not measured in every domain",
        "needs figures that were not measured",
        "the domain 'chat' was not measured",
        "Dev token acceptance was not measured",
    ):
        assert reason in page.text
    assert all(page.cells)
    assert not re.search(r"\b(nan|None|inf)\b", page.text)


def test_an_evaluation_without_timed_prompts_still_renders(project):
    metrics = sample_metrics()
    shares = ("token_acceptance_trimmed_head", "token_acceptance_full_head", "token_acceptance_without_loops")
    for candidate in metrics["candidates"].values():
        candidate["legal"] = {name: candidate["legal"][name] for name in shares}
        del candidate["all"], candidate["code"]
    metrics |= {"by_draft_length": [], "by_batch": [], "by_temperature": []}
    write_artifacts(project, metrics)
    report.run(config())
    page = Text(page_of(project))
    assert "Nothing was measured." in page.text
    assert "speedup no value: not measured in this domain" in page.text


def test_texts_are_escaped_and_nothing_is_fetched(project):
    write_artifacts(project, sample_metrics(domain="<b>x"))
    report.run(config())
    page = page_of(project)
    assert "<b>" not in page and "&lt;b&gt;x" in page
    assert Text(page).open == []
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)


def test_the_plots_are_whole_tables(project):
    write_artifacts(project)
    report.run(config())
    tables = {}
    for name, columns in report.PLOT_COLUMNS.items():
        with (project / f"data/report/plots/{name}.csv").open(newline="") as stream:
            reader = csv.DictReader(stream)
            tables[name] = list(reader)
        assert tuple(reader.fieldnames) == columns
    assert [row["step"] for row in tables["training"]] == ["20", "40", "60", "80"]
    acceptance = {(row["candidate"], row["domain"], row["metric"]): row for row in tables["acceptance_by_domain"]}
    assert float(acceptance["distilled", "code", "token_acceptance_trimmed_head"]["value"]) == 0.312
    assert ("prompt_lookup", "legal", "token_acceptance_full_head") not in acceptance
    by_position = {(row["candidate"], row["position"]): row["value"] for row in tables["acceptance_by_position"]}
    assert [by_position["distilled", str(i)] for i in range(1, 5)] == ["0.71", "0.55", "0.43", "0.35"]
    assert tables["draft_lengths"][1] == {"draft_length": "2", "predicted_speedup": "1.4", "speedup": "1.27"}
    speedups = {(row["candidate"], row["domain"]): row for row in tables["speedup"]}
    assert set(speedups) == {
        *(("distilled", domain) for domain in ("legal", "code", "all")),
        *((name, "legal") for name in ("undistilled", "prompt_lookup")),
    }
    assert speedups["distilled", "legal"]["predicted_measured_cost"] == "1.49"
    assert speedups["undistilled", "legal"]["predicted_measured_cost"] == ""
    assert [row["tokens"] for row in tables["verify_cost"]] == ["1", "2", "3", "4", "5", "7"]
    assert float(tables["verify_cost"][0]["ratio"]) == 1.0


def test_no_cell_that_dvc_plots_is_empty(project):
    """DVC hands an empty cell to Vega, which draws it as 0: of candidates at different k, and of steps between measurements."""
    metrics = sample_metrics()
    metrics["candidates"]["prompt_lookup"]["legal"] |= served(0.19, 1.1, [0.26, 0.2, 0.16, 0.13, 0.1, 0.08])
    metrics["candidates"]["undistilled"]["legal"] |= {"acceptance_by_position": missing("not decoded")}
    for row in metrics["by_draft_length"]:
        row["speedup"] = missing("not timed")
    write_artifacts(project, metrics)
    report.run(config())
    plots = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["plots"]
    for plot in (definition for named in plots for definition in named.values()):
        ((file, y),) = plot["y"].items()
        x = plot["x"] if isinstance(plot["x"], str) else plot["x"][file]
        with (project / file).open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) > 1 and all(row[x] and row[y] for row in rows), file


def test_an_enforced_gate_fails_after_the_report_exists(project):
    write_artifacts(project, smallest_acceptance=0.7)
    report.run(config(enforce=False))
    text = Text(page_of(project)).text
    assert "The draft FAILED the gate 'default'" in text
    assert "not registered: the gate 'default' failed: token_acceptance_trimmed_head" in text
    assert "generate more answers in this domain" in text
    (project / "data/report/index.html").unlink()
    with pytest.raises(PipelineError, match=r"failed: token_acceptance_trimmed_head \(legal\)\.") as error:
        report.run(config(enforce=True))
    assert "acceptance_rate" not in error.value.reason
    assert (project / "data/report/index.html").exists()


def test_an_enforced_gate_that_passed_ends_normally(project):
    write_artifacts(project)
    report.run(config(enforce=True))


def test_a_quantised_target_is_labelled(project):
    metrics = sample_metrics()
    metrics["compatibility_key"] = {**KEY, "quantization": "4bit"}
    write_artifacts(project, metrics)
    report.run(config())
    assert "The target is quantised (4bit)" in Text(page_of(project)).text


@pytest.mark.parametrize("name", ["distill/history.csv", "registry/receipt.json"])
def test_a_missing_artifact_is_named_and_leaves_no_report(project, name):
    write_artifacts(project)
    (project / "data" / name).unlink()
    with pytest.raises(PipelineError, match=f"{name} does not exist.*dvc repro"):
        report.run(config())
    assert not (project / "data/report").exists()


def test_a_report_that_ends_well_joins_the_tree(project, store, capsys):
    """R06"""
    with store.run("an experiment", "a pipeline", {}) as parent:
        pass
    receipt = {"registered": False, "reason": "r", "model_name": "m", "version": None, "alias": None}
    receipt |= {"fingerprint": "f", "run_id": parent, "tracking_uri": store.uri}
    write_artifacts(project, receipt=receipt)
    report.run(config())
    (child,) = store.client.search_runs([store.client.get_run(parent).info.experiment_id], "tags.stage = 'report'")
    assert (child.info.run_name, child.info.status) == ("report", "FINISHED")
    assert child.data.tags["mlflow.parentRunId"] == parent and child.info.end_time >= child.info.start_time
    logged = store.client.download_artifacts(child.info.run_id, "index.html")
    assert Path(logged).read_text(encoding="utf-8") == page_of(project)
    assert "enforce: false" in Path(store.client.download_artifacts(child.info.run_id, "config.yaml")).read_text()


@pytest.mark.parametrize(
    ("uri", "reason"),
    [("http://127.0.0.1:9", "The MLflow store http://127.0.0.1:9 cannot be used"), ("sqlite:////nowhere/m.db", "is gone"),
     (None, "no space left")],
)  # fmt: skip
def test_a_store_that_fails_costs_the_report_a_line(project, store, capsys, monkeypatch, uri, reason):
    def full(*_):
        raise OSError("no space left")

    with store.run("an experiment", "a pipeline", {}) as parent:
        pass
    monkeypatch.setattr("pipeline.adapters.mlflow_store.RunStore.log_files", full)
    receipt = {"registered": False, "reason": "r", "model_name": "m", "version": None, "alias": None}
    write_artifacts(
        project, receipt={**receipt, "fingerprint": "f", "run_id": parent, "tracking_uri": uri or store.uri}
    )
    capsys.readouterr()
    report.run(config())
    message = capsys.readouterr().err
    assert message.startswith("the report is not logged in MLflow: ") and reason in message and message.count("\n") == 1
    assert page_of(project) and not Path("/nowhere").exists()


def test_the_same_artifacts_give_the_same_page(project):
    write_artifacts(project)
    report.run(config())
    first = page_of(project)
    path = project / "data/eval/metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    report.run(config())
    assert page_of(project) == first
