"""What the report says about the distilled draft under other conditions than the headline's: latency, load, lengths,
temperatures, other engines, memory, and the champion."""

from __future__ import annotations

from typing import Any

from pipeline.adapters.report_elements import Cell, Table, measure_cell, number_cell, number_or_reason
from pipeline.core.gating import CANDIDATE
from pipeline.core.metrics import METRICS, SERVED_BRIEFLY, WAITS, no_data
from pipeline.core.report_page import candidates, domains, found, quantity, words

LATENCY = (
    "ttft_seconds", "ttft_ratio", "latency_seconds", "itl_p50_seconds", "itl_p95_seconds", "itl_p99_seconds", "smoothness",
    "itl_jitter_seconds",
)  # fmt: skip
ENGINES = {
    "token_acceptance_full_head": "draws from both distributions, sum min(p, q): vLLM, probabilistic drafts",
    "token_acceptance_greedy_draft": "draft greedy, p(argmax q): vLLM's default, llama.cpp",
    "token_acceptance_exact_match": "both sample, tokens must be equal, sum p q: MLX",
}
GROUPED = ("token_acceptance_trimmed_head", "acceptance_rate", "mean_acceptance_length", "speedup", "latency_seconds")
DIFFERENCES = {
    "token_acceptance_difference": "share",
    "acceptance_rate_difference": "share",
    "speedup_ratio": "ratio",
}


def condition_tables(metrics: dict[str, Any]) -> dict[str, Table]:
    """The tables by the names that the template uses."""
    return {
        "latency": _latency_table(metrics),
        "tasks": _group_table("task", metrics["by_task"][CANDIDATE]),
        "prompt_lengths": _group_table("prompt tokens", metrics["by_prompt_length"][CANDIDATE]),
        "draft_lengths": _length_table(metrics),
        "batches": _row_table(metrics, "batch", "requests together", SERVED_BRIEFLY, predicted=True),
        "batch_waits": _row_table(metrics, "batch", "requests together", WAITS),
        "temperatures": _row_table(
            metrics,
            "temperature",
            "temperature",
            ("token_acceptance_trimmed_head", *SERVED_BRIEFLY[:3]),
            predicted=True,
        ),
        "temperature_engines": _row_table(metrics, "temperature", "temperature", tuple(ENGINES)),
        "engines": _engine_table(metrics),
        "memory": _memory_table(metrics),
        "champion": _champion_table(metrics),
    }


def condition_lines(metrics: dict[str, Any]) -> dict[str, tuple[dict[str, list[tuple[int, float]]], str, str]]:
    """Charts over whole numbers: lines by label, unit, and what the numbers are."""
    rows = metrics["by_draft_length"]
    lines = {"predicted on dev": [(row["draft_length"], row["predicted_speedup"]) for row in rows]}
    timed = [(row["draft_length"], row["speedup"]["value"]) for row in rows]
    lines["measured on dev"] = [(k, value) for k, value in timed if value is not None]
    return {"draft_lengths": (lines, "ratio", "draft length k")}


def condition_sentences(metrics: dict[str, Any]) -> dict[str, str]:
    """Sentences by the names that the template uses; empty where there is nothing to say."""
    skipped = "; ".join(f"{words(name)}: {reason}" for name, reason in metrics["skipped"].items())
    tuned = metrics["dev"].get("token_acceptance_trimmed_head") or no_data("not measured")
    golden = found(metrics, CANDIDATE, metrics["domain"], "token_acceptance_trimmed_head")
    both = f"{measure_cell(tuned, 'share').text} on dev prompts, {measure_cell(golden, 'share').text} on golden ones"
    memory = metrics["memory"]
    return {
        "memory_sentence": (
            f"Beside the target's weights, {quantity(memory['target_weight_bytes'], 'bytes')}, and its cache for one request of"
            f" {memory['cache_positions']} tokens, {quantity(memory['target_cache_bytes'], 'bytes')}. Memory efficiency is"
            f" {METRICS['memory_efficiency'].meaning}. The {METRICS['peak_bytes'].meaning}, is"
            f" {quantity(memory['peak_bytes'], 'bytes')}."
        ),
        "skipped_sentence": f"Not compared: {skipped}." if skipped else "",
        "dev_sentence": f"Token acceptance on {metrics['domain']} is {both}, which nothing was tuned on.",
    }


def _latency_table(metrics: dict[str, Any]) -> Table:
    rows = []
    for name in LATENCY:
        metric = METRICS[name]
        cells = []
        for domain in domains(metrics):
            plain = found(metrics, CANDIDATE, domain, f"plain_{name}")["value"]
            before = "" if plain is None else f"plain {quantity(plain, metric.unit)}"
            cells.append(measure_cell(found(metrics, CANDIDATE, domain, name), metric.unit, before))
        rows.append([Cell(words(name.removesuffix("_seconds"))), *cells, Cell(metric.meaning)])
    return Table(["", *domains(metrics), "meaning"], rows)


def _group_table(title: str, groups: dict[str, dict[str, dict]]) -> Table:
    rows = []
    for group, measures in groups.items():
        if group == "all":
            continue
        entries = {name: measures.get(name) or no_data("not decoded") for name in GROUPED}
        cells = [measure_cell(entry, METRICS[name].unit) for name, entry in entries.items()]
        answers = measures["token_acceptance_trimmed_head"]["count"]
        rows.append(
            [Cell(group), *cells, number_cell(answers, "tokens"), number_cell(entries["speedup"]["count"], "tokens")]
        )
    return Table([title, *map(_heading, GROUPED), "golden answers", "decoded"], rows)


def _heading(name: str) -> str:
    return words(name.removesuffix("_seconds").removesuffix("_trimmed_head"))


def _row_table(metrics: dict[str, Any], key: str, title: str, names: tuple[str, ...], predicted: bool = False) -> Table:
    """The domain, the condition, and each candidate that was measured there: its draft length, its measures and, if wanted,
    the measured-cost speedup that was predicted."""
    table = []
    for domain, rows in _everywhere(metrics, f"by_{key}"):
        for row in rows:
            for candidate, own in {CANDIDATE: row, **row["others"]}.items():
                k, guess = own["draft_length"], (own.get("predicted_speedup") or {}).get("measured-cost")
                cells = [measure_cell(own[name], METRICS[name].unit) for name in names]
                extra = [number_or_reason(guess, "ratio", "not measured")] if predicted else []
                named = [Cell(domain), Cell(f"{row[key]:g}"), Cell(words(candidate))]
                table.append([*named, number_or_reason(k, "tokens", "none"), *cells, *extra])
    heads = ["domain", title, "candidate", "k", *map(_heading, names), *(["predicted speedup"] if predicted else [])]
    return Table(heads, table)


def _length_table(metrics: dict[str, Any]) -> Table:
    """What is expected of the distilled draft at each k, and what was measured of each candidate."""
    table = []
    for domain, rows in _everywhere(metrics, "by_draft_length"):
        for row in rows:
            for candidate, own in {CANDIDATE: row, **row["others"]}.items():
                expected = [own.get(name) for name in ("expected_acceptance_rate", "predicted_speedup")]
                cells = [measure_cell(own[name], METRICS[name].unit) for name in ("acceptance_rate", "speedup")]
                table.append(
                    [
                        Cell(domain),
                        number_cell(row["draft_length"], "tokens"),
                        Cell(words(candidate)),
                        number_or_reason(expected[0], "share", "not predicted"),
                        cells[0],
                        number_or_reason(expected[1], "ratio", "not predicted"),
                        cells[1],
                    ]
                )
    heads = ["expected acceptance rate", "measured", "predicted speedup", "measured"]
    return Table(["domain", "k", "candidate", *heads], table)


def _everywhere(metrics: dict[str, Any], name: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each domain with its rows of the side table `name`, the target domain first."""
    others = metrics["other_domains"].items()
    return [(metrics["domain"], metrics[name]), *((domain, tables[name]) for domain, tables in others)]


def _engine_table(metrics: dict[str, Any]) -> Table:
    rows = []
    for name, meaning in ENGINES.items():
        cells = [measure_cell(found(metrics, CANDIDATE, domain, name), "share") for domain in domains(metrics)]
        rows.append([Cell(meaning), *cells])
    return Table(["an engine that", *domains(metrics)], rows)


def _memory_table(metrics: dict[str, Any]) -> Table:
    memory = metrics["memory"]
    rows = []
    for name in candidates(metrics):
        own = memory["candidates"][name]
        taken = [number_cell(own[part], "bytes") for part in ("weight_bytes", "cache_bytes")]
        efficiency = measure_cell(own["memory_efficiency"], METRICS["memory_efficiency"].unit)
        saved = measure_cell(found(metrics, name, metrics["domain"], "target_passes_saved"), "share")
        rows.append([Cell(words(name)), *taken, number_cell(own["draft_share"], "share"), saved, efficiency])
    heads = ["weights", "cache", "share of target and draft", "target passes saved", "memory efficiency"]
    return Table(["candidate", *heads], rows)


def _champion_table(metrics: dict[str, Any]) -> Table:
    """No rows where there is no other champion to compare with."""
    versus = metrics["versus_champion"] or {}
    rows = [
        [Cell(domain), *(measure_cell(entries[name], unit) for name, unit in DIFFERENCES.items())]
        for domain, entries in versus.items()
    ]
    return Table(["domain", *map(words, DIFFERENCES)], rows)
