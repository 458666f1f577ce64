"""The report as one HTML page, by Jinja2: no script, no other file, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.adapters.report_conditions import condition_lines, condition_sentences, condition_tables
from pipeline.adapters.report_elements import (
    Bar,
    Bars,
    Cell,
    Line,
    Lines,
    Table,
    measure_cell,
    number_cell,
    number_or_reason,
)
from pipeline.core.cost_model import Costs
from pipeline.core.gating import CANDIDATE, PROMPTS
from pipeline.core.metrics import METRICS
from pipeline.core.report_page import (
    SHARES,
    TOKEN_ACCEPTANCE,
    Documents,
    candidates,
    domains,
    exact,
    found,
    measured,
    money,
    predicted,
    quantity,
    registration,
    span,
    words,
)
from pipeline.core.roi import FIGURES

TEMPLATE = "report.html.j2"
PREDICTIONS = {
    "measured-cost": "tokens per round / (k c + v(k))",
    "classic": "(1 - a^(k+1)) / ((1 - a)(k c + 1)), a = token acceptance",
    "simple": "1 / (1 - a (1 - c)), a = acceptance rate; optimistic, never gated",
}
UNITS_OF_RULES = {PROMPTS: "tokens", **{name: metric.unit for name, metric in METRICS.items()}}
STATISTIC_WORDS = {"point": "", "lower": "lower end ", "upper": "upper end "}


def render(documents: Documents, plots: dict[str, list[dict[str, Any]]]) -> str:
    """The page for `documents`; its charts draw the rows of `plots` (see `plot_tables`)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{share:.2f}%"
    content = {
        "documents": documents,
        "verdict_sentence": _verdict_sentence(documents),
        "tiles": _tiles(documents),
        "lossless_sentences": _lossless_sentences(documents.metrics),
        "training_sentence": _training_sentence(plots["training"]),
        "cost_sentence": _cost_sentence(documents.metrics),
        "formulas": PREDICTIONS,
        "reference_sentence": _reference_sentence(documents.metrics["reference"]),
        **condition_sentences(documents.metrics),
        "money_sentence": _money_sentence(documents),
        "tables": _tables(documents, plots),
        "charts": _charts(documents.metrics, plots),
    }
    return environment.get_template(TEMPLATE).render(content)


def _tables(documents: Documents, plots: dict[str, list[dict[str, Any]]]) -> dict[str, Table]:
    metrics, prompts = documents.metrics, documents.prompts
    return {
        "checks": _check_table(documents.verdict),
        "acceptance": _acceptance_table(metrics),
        "speed": _speed_table(metrics),
        "predictions": _prediction_table(metrics),
        "money": _money_table(documents.roi),
        "roi_sheet": _sheet_table(documents.roi["sheet"]),
        "verify_cost": _verify_cost_table(plots["verify_cost"]),
        "positions": _position_table(plots["acceptance_by_position"]),
        "departures": _departure_table(metrics),
        "prompts": _prompt_table(prompts),
        "sources": _source_table(prompts),
        "definitions": _definition_table(),
        "settings": _settings_table(documents),
        "machine": _facts_table(metrics["machine"]),
        **condition_tables(metrics),
    }


def _charts(metrics: dict[str, Any], plots: dict[str, list[dict[str, Any]]]) -> dict[str, Bars | Lines]:
    acceptance = [row for row in plots["acceptance_by_domain"] if row["metric"] == TOKEN_ACCEPTANCE]
    positions = {
        name: [(row["position"], row["value"]) for row in plots["acceptance_by_position"] if row["candidate"] == name]
        for name in candidates(metrics)
    }
    costs = [(row["tokens"], row["ratio"]) for row in plots["verify_cost"]]
    return {
        "acceptance": _bars(metrics, acceptance, "value", "share", 1.0),
        "speedup": _bars(metrics, plots["speedup"], "speedup", "ratio", None),
        "positions": _step_lines(positions, "share", "position in the drafted block"),
        "verify_cost": _step_lines({"verify cost": costs}, "ratio", "tokens in the target's pass (k + 1)"),
        "training": _training_lines(plots["training"]),
        **{name: _step_lines(*lines) for name, lines in condition_lines(metrics).items()},
    }


def _verdict_sentence(documents: Documents) -> str:
    metrics, verdict = documents.metrics, documents.verdict
    domain = metrics["domain"]
    acceptance = measured(found(metrics, CANDIDATE, domain, TOKEN_ACCEPTANCE), "share")
    speedup = measured(found(metrics, CANDIDATE, domain, "speedup"), "ratio")
    outcome = "passed" if verdict["passed"] else "FAILED"
    return (
        f"The draft {outcome} the gate {verdict['gate']!r} with token acceptance {acceptance} and speedup {speedup}"
        f" at k = {metrics['settings']['draft_length']} on {domain}, and is {registration(documents.receipt)}."
    )


def _tiles(documents: Documents) -> list[tuple[str, Cell]]:
    """The headline figures, each with its caption."""
    metrics = documents.metrics
    domain, settings, lossless = metrics["domain"], metrics["settings"], metrics["lossless"]
    chosen = {
        "dev": "chosen on dev prompts",
        "configuration": "set in the configuration",
        "costs": "the cheapest: there were no dev prompts",
    }
    return [
        (f"token acceptance on {domain}", measure_cell(found(metrics, CANDIDATE, domain, TOKEN_ACCEPTANCE), "share")),
        (f"speedup on {domain}", measure_cell(found(metrics, CANDIDATE, domain, "speedup"), "ratio")),
        ("draft length k", Cell(str(settings["draft_length"]), chosen[settings["draft_length_chosen_on"]])),
        ("lossless", measure_cell(lossless, "share", f"of {lossless['count']} decoded answers")),
    ]


def _check_table(verdict: dict[str, Any]) -> Table:
    rows = []
    for item in verdict["checks"]:
        unit = UNITS_OF_RULES.get(item["metric"], "")
        needs = f"{STATISTIC_WORDS[item['statistic']]}{item['op']} {exact(item['threshold'], unit)}"
        notes = [] if item["shortfall"] is None else [f"missed by {_distance(item['shortfall'], unit)}"]
        notes += [item["reason"]] if item["reason"] and item["value"] is not None else []
        notes += ["a warning only"] if item["severity"] == "warn" else []
        value = measure_cell(item, unit)
        rows.append(
            [
                Cell(item["state"], kind=item["state"].replace(" ", "-")),
                Cell(words(item["metric"])),
                Cell(item["domain"]),
                value,
                Cell(needs, ", ".join(notes), "limit"),
                Cell(item["remedy"] or "none needed"),
            ]
        )
    return Table(["result", "metric", "domain", "value, 95 % interval", "needs", "remedy"], rows)


def _distance(shortfall: float, unit: str) -> str:
    """Two digits that count, so that the narrowest miss is no zero."""
    scale, suffix = (100, " percentage points") if unit == "share" else (1, "")
    return f"{float(f'{scale * shortfall:.2g}'):g}{suffix}"


def _acceptance_table(metrics: dict[str, Any]) -> Table:
    rows = []
    for domain in domains(metrics):
        for candidate in candidates(metrics):
            entries = [found(metrics, candidate, domain, name) for name in SHARES]
            length = found(metrics, candidate, domain, "mean_acceptance_length")
            rows.append(
                [
                    Cell(domain),
                    Cell(words(candidate)),
                    *(measure_cell(entry, "share") for entry in entries),
                    number_cell(metrics["draft_lengths"][candidate], "tokens"),
                    measure_cell(length, "tokens per round"),
                    number_cell(entries[0]["count"], "tokens"),
                    number_cell(length["count"], "tokens"),
                ]
            )
    heads = ["token acceptance, trimmed head", "full head", "without looping answers"]
    served = ["acceptance rate", "at k", "mean acceptance length"]
    return Table(["domain", "candidate", *heads, *served, "answers", "decoded"], rows)


def _speed_table(metrics: dict[str, Any]) -> Table:
    columns = {
        "speedup": "speedup",
        "tokens_per_second": "speculative",
        "plain_tokens_per_second": "plain, same prompts",
        "ttft_seconds": "time to first token",
        "itl_p95_seconds": "inter-token latency, p95",
    }
    rows = []
    for domain in domains(metrics):
        for candidate in candidates(metrics):
            entries = {name: found(metrics, candidate, domain, name) for name in columns}
            if candidate != CANDIDATE and entries["speedup"]["value"] is None:
                continue  # what it is compared with is timed on prompts of the target domain only
            cells = [measure_cell(entry, METRICS[name].unit) for name, entry in entries.items()]
            count = number_cell(entries["speedup"]["count"], "tokens")
            rows.append([Cell(domain), Cell(words(candidate)), *cells, count])
    return Table(["domain", "candidate", *columns.values(), "prompts"], rows)


def _prediction_table(metrics: dict[str, Any]) -> Table:
    rows = []
    for domain in domains(metrics):
        for candidate in candidates(metrics):
            measured_speedup = found(metrics, candidate, domain, "speedup")
            if candidate != CANDIDATE and measured_speedup["value"] is None:
                continue
            values = [predicted(metrics, candidate, domain, name) for name in PREDICTIONS]
            rows.append(
                [
                    Cell(domain),
                    Cell(words(candidate)),
                    number_cell(metrics["draft_lengths"][candidate], "tokens"),
                    number_cell(metrics["cost_ratios"][candidate], ""),
                    measure_cell(measured_speedup, "ratio"),
                    *(number_or_reason(value, "ratio", "needs figures that were not measured") for value in values),
                ]
            )
    return Table(["domain", "candidate", "k", "cost ratio c", "measured", *PREDICTIONS], rows)


def _reference_sentence(reference: dict[str, float | None]) -> str:
    ours, theirs = (reference[f"{name}_plain_tokens_per_second"] for name in ("our", "transformers"))
    if ours is None or theirs is None:
        return "transformers' own plain decoding was not measured (evaluate.reference_prompts is 0)."
    return (
        f"Plain decoding of the same prompts by two engines: {quantity(ours, 'tokens/s')} with our decoder,"
        f" {quantity(theirs, 'tokens/s')} with transformers' generate."
    )


def _money_sentence(documents: Documents) -> str:
    roi, metrics = documents.roi, documents.metrics
    sheet = roi["sheet"]
    lengths = {1: metrics["settings"]["draft_length"]} | {
        row["batch"]: row["draft_length"] for row in metrics["by_batch"]
    }
    load = (
        f"At the load of the sheet {sheet['name']!r} (batch {sheet['batch']}, {sheet['requests_per_month']:,.0f} requests"
        f" of {sheet['tokens_per_request']:,.0f} tokens a month)"
    )
    if roi["speedup"]["value"] is None:
        return f"{load} nothing can be said about savings: {roi['speedup']['reason']}."
    faster = f"{measured(roi['speedup'], 'ratio')} as fast at k = {lengths[sheet['batch']]}"
    return f"{load} the draft makes the service {faster} and {money(roi)}."


def _money_table(roi: dict[str, Any]) -> Table:
    rows = []
    for name, figure in FIGURES.items():
        entry = roi["figures"][name]
        label = f"{figure.label}, {roi['sheet']['currency']}" if figure.unit == "money" else figure.label
        rows.append([Cell(label), measure_cell(entry, figure.unit, entry["reason"] or ""), Cell(figure.meaning)])
    return Table(["figure", "value, 95 % interval", "how it follows"], rows)


def _sheet_table(sheet: dict[str, Any]) -> Table:
    return _facts_table({name: value if isinstance(value, str) else f"{value:,.10g}" for name, value in sheet.items()})


def _cost_sentence(metrics: dict[str, Any]) -> str:
    costs, k = Costs.from_document(metrics["costs"]), metrics["settings"]["draft_length"]
    return (
        f"A draft step takes {quantity(costs.draft_step_seconds, 's')}, a target pass over one token"
        f" {quantity(costs.target_pass_seconds[0], 's')}: cost ratio c = {costs.cost_ratio:.3f}. A pass over k + 1 ="
        f" {k + 1} tokens costs v({k}) = {costs.verify_cost(k):.2f} passes over one token. So a round at k = {k} costs"
        f" k c + v(k) = {costs.round_cost(k):.2f} plain steps and pays where it yields more tokens than that."
    )


def _verify_cost_table(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [number_cell(row["tokens"], "tokens"), number_cell(row["seconds"], "s"), number_cell(row["ratio"], "ratio")]
        for row in rows
    ]
    return Table(["tokens in the pass", "time", "v: over the time for one token"], cells)


def _position_table(rows: list[dict[str, Any]]) -> Table:
    """One row per candidate, a column per position."""
    positions = sorted({row["position"] for row in rows})
    shown: dict[str, list[Cell]] = {}
    for row in rows:  # by candidate, and of each the positions in order
        interval = None if row["lower"] is None else (row["lower"], row["upper"])
        cell = Cell(quantity(row["value"], "share"), span(interval, "share"), "number")
        shown.setdefault(row["candidate"], [Cell(words(row["candidate"]))]).append(cell)
    width = len(positions) + 1
    return Table(
        ["candidate", *(f"position {position}" for position in positions)],
        [cells + [Cell("beyond its k", kind="missing")] * (width - len(cells)) for cells in shown.values()],
    )


def _lossless_sentences(metrics: dict[str, Any]) -> list[str]:
    lossless, settings = metrics["lossless"], metrics["settings"]
    if lossless["value"] is None:
        return [f"Not judged: {lossless['reason']}."]
    if settings["temperature"] == 0 and "half_precision_departures" not in lossless:
        compared = "The timed float32 runs were compared token by token with plain decoding of the same prompts"
    else:
        compared = (
            f"The timed runs are in {settings['dtype']} at temperature {settings['temperature']:g}. So prompts were"
            " decoded again, greedily and in float32, and compared token by token with plain decoding"
        )
    sentences = [f"{compared}: {len(lossless['departures'])} of {lossless['count']} departed."]
    if "half_precision_departures" in lossless:
        judged = lossless["half_precision_departures"]
        legal = sum(item["legal"] for item in judged)
        sentences.append(
            f"Timed {settings['dtype']} runs that departed from plain decoding: {len(judged)}; {legal} at a near tie"
            f" (at most {lossless['near_tie_gap']:g} logits apart) that float32 confirms, which is legal, {len(judged) - legal} elsewhere. Only the first departure of a"
            " run is judged."
        )
    return sentences


def _departure_table(metrics: dict[str, Any]) -> Table:
    lossless = metrics["lossless"]
    rows = [
        [
            Cell("float32"),
            *_departed(item),
            Cell("float32 allows none", kind="missing"),
            Cell("not legal", kind="failed"),
        ]
        for item in lossless["departures"]
    ]
    for item in lossless.get("half_precision_departures", []):
        gap = Cell(quantity(item["float32_gap"], "logits"))
        state = Cell("legal", kind="passed") if item["legal"] else Cell("not legal", kind="failed")
        rows.append([Cell(metrics["settings"]["dtype"]), *_departed(item), gap, state])
    return Table(["runs in", "prompt", "candidate", "first departing token", "float32 logit gap", "judgement"], rows)


def _departed(item: dict[str, Any]) -> list[Cell]:
    return [Cell(item["prompt_id"]), Cell(words(item["candidate"])), number_cell(item["token_index"] + 1, "tokens")]


def _training_sentence(evaluated: list[dict[str, str]]) -> str:
    if not evaluated:
        return "Dev token acceptance was not measured during training."
    best = max(evaluated, key=lambda row: float(row["dev_token_acceptance"]))
    return (
        f"The best of {len(evaluated)} measurements is {quantity(float(best['dev_token_acceptance']), 'share')} after"
        f" {quantity(int(best['tokens']), 'tokens')} tokens (step {best['step']}); that checkpoint is the draft."
    )


def _prompt_table(prompts: dict[str, Any]) -> Table:
    tasks = sorted({task for split in prompts["prompts"].values() for counts in split.values() for task in counts})
    rows = []
    for split, wanted in prompts["prompts_wanted"].items():
        for domain, asked in wanted.items():
            counts = prompts["prompts"][split].get(domain, {})
            numbers = [*(counts.get(task, 0) for task in tasks), sum(counts.values()), asked]
            rows.append([Cell(split), Cell(domain), *(number_cell(number, "tokens") for number in numbers)])
    return Table(["split", "domain", *tasks, "prompts", "asked for"], rows)


def _source_table(prompts: dict[str, Any]) -> Table:
    rows = [
        [
            Cell(domain),
            number_cell(count, "tokens"),
            number_cell(prompts["clusters"][domain], "tokens"),
            number_cell(prompts["near_duplicate_share"][domain], "share"),
        ]
        for domain, count in prompts["documents"].items()
    ]
    return Table(["domain", "documents", "clusters of near-duplicates", "near-duplicate share"], rows)


def _definition_table() -> Table:
    directions = {True: "higher is better", False: "lower is better", None: "neither, for reading"}
    rows = [
        [Cell(words(name)), Cell(metric.unit), Cell(directions[metric.higher_is_better]), Cell(metric.meaning)]
        for name, metric in METRICS.items()
    ]
    return Table(["metric", "unit", "direction", "meaning"], rows)


def _settings_table(documents: Documents) -> Table:
    draft, metrics = documents.draft, documents.metrics
    return _facts_table(
        {
            **metrics["settings"],
            "draft": draft["name"],
            "draft_fingerprint": draft["fingerprint"],
            "draft_dtype": draft["dtype"],
            **metrics["compatibility_key"],
            **metrics["prompts"],
            **{f"git_commit_of_{name}": commit for name, commit in documents.commits.items()},
            "mlflow_run": documents.receipt["run_id"],
            "mlflow_store": documents.receipt["tracking_uri"],
        }
    )


def _facts_table(facts: dict[str, Any]) -> Table:
    rows = [[Cell(words(name)), Cell("none" if value is None else str(value))] for name, value in facts.items()]
    return Table(["fact", "value"], rows)


def _bars(metrics: dict[str, Any], rows: list[dict[str, Any]], column: str, unit: str, largest: float | None) -> Bars:
    """One bar per row, grouped by domain; the frame ends at `largest`, or where the longest interval does."""
    ends = [row[name] for row in rows for name in (column, "upper") if row[name] is not None]
    frame = largest or 1.05 * max([1.0, *ends])
    order = candidates(metrics)
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        bar = Bar(
            label=words(row["candidate"]),
            series=order.index(row["candidate"]),
            text=quantity(row[column], unit),
            length=100 * row[column] / frame,
            interval=None if row["lower"] is None else (100 * row["lower"] / frame, 100 * row["upper"] / frame),
        )
        groups.setdefault(row["domain"], []).append(bar)
    shown = [(domain, groups[domain]) for domain in domains(metrics) if domain in groups]
    return Bars(shown, None if largest else 100 / frame)


def _step_lines(series: dict[str, list[tuple[int, float]]], unit: str, x_label: str) -> Lines:
    """Lines over the whole numbers 1, 2, ...; each number has an equal band of the frame."""
    steps = max([1, *(x for points in series.values() for x, _ in points)])
    y_ticks, top = _axis([y for points in series.values() for _, y in points], unit)
    lines = [
        Line(
            words(name),
            index,
            [(100 * (x - 0.5) / steps, 100 * y / top, f"{x}: {quantity(y, unit)}") for x, y in points],
        )
        for index, (name, points) in enumerate(series.items())
        if points
    ]
    return Lines(lines, [(100 * (x - 0.5) / steps, str(x)) for x in range(1, steps + 1)], y_ticks, x_label)


def _training_lines(evaluated: list[dict[str, str]]) -> Lines:
    points = [(int(row["tokens"]), float(row["dev_token_acceptance"])) for row in evaluated]
    x_ticks, right = _axis([x for x, _ in points], "tokens")
    y_ticks, top = _axis([y for _, y in points], "share")
    placed = [(100 * x / right, 100 * y / top, f"{x:,} tokens: {quantity(y, 'share')}") for x, y in points]
    return Lines([Line("dev token acceptance", 0, placed)] if points else [], x_ticks, y_ticks, "tokens trained on")


def _axis(values: Sequence[float], unit: str) -> tuple[list[tuple[float, str]], float]:
    """About five ticks from 0 at round numbers, and the number at the end of the frame."""
    largest = max(values, default=0) or 1
    magnitude = 10 ** math.floor(math.log10(largest / 4))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= largest / 4)
    count = math.ceil(largest / step - 1e-9)
    ticks = [(100 * index / count, _tick(index * step, unit)) for index in range(count + 1)]
    return ticks, count * step


def _tick(value: float, unit: str) -> str:
    if unit == "tokens" and value >= 1000:
        return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k"
    return exact(value, unit)
