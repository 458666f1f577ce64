"""summary: the closing lines of `make repro`.

Reads:  data/eval/metrics.json, data/gate/verdict.json, data/registry/receipt.json, data/report/roi.json, and the MLflow
        store that the receipt names.
Does:   prints what was reached and where to look; exits 1 when a file or the registered version is missing.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.core.artifacts import read_json
from pipeline.core.errors import PipelineError
from pipeline.core.gating import verdict_lines
from pipeline.core.report_page import (
    TOKEN_ACCEPTANCE,
    candidates,
    domains,
    found,
    measured,
    money,
    quantity,
    registration,
    words,
)
from pipeline.stage import STORE_TIMEOUT_SECONDS, console, input_path


def show(console: Console) -> None:
    """Print the summary of the finished pipeline.

    Raises `PipelineError`, before anything is printed, when a file is missing or the store lacks the registered version.
    """
    metrics = read_json(input_path("data/eval/metrics.json"), "domain-draft/metrics", 1)
    verdict = read_json(input_path("data/gate/verdict.json"), "domain-draft/verdict", 1)
    receipt = read_json(input_path("data/registry/receipt.json"), "domain-draft/receipt", 1)
    roi = read_json(input_path("data/report/roi.json"), "domain-draft/roi", 1)
    page = input_path("data/report/index.html")
    if not page.exists():
        raise PipelineError(f"{page} does not exist.", "run the stage that writes it: `dvc repro`.")
    _check_registered(receipt)
    missed = [item for item in verdict["checks"] if not item["passed"]]
    quantization = metrics["compatibility_key"].get("quantization", "none")
    label = "" if quantization == "none" else f" (target in {quantization}: not comparable with an unquantised one)"
    console.print(f"Draft for {metrics['target']['name']} on {metrics['domain']}{label}", style="bold")
    console.print(_comparison(metrics))
    worth = [f"money ({roi['sheet']['name']}, batch {roi['sheet']['batch']})", money(roi)]
    console.print(_facts([*_figures(metrics), worth, [f"gate {verdict['gate']!r}", _outcome(verdict, missed)]]))
    for line in verdict_lines({**verdict, "checks": missed})[:-1]:
        console.print(f"  {line}", soft_wrap=True)
    places = [["model", registration(receipt)], ["report", str(page)], ["runs", _browse(receipt["tracking_uri"])]]
    console.print(_facts(places))


def _comparison(metrics: dict[str, Any]) -> Table:
    """Token acceptance by domain, and the speedup on the target's, a column for each candidate."""
    domain = metrics["domain"]
    names = candidates(metrics)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("token acceptance", *map(words, names)):
        table.add_column(heading, no_wrap=True)
    for row in domains(metrics):
        table.add_row(row, *(measured(found(metrics, name, row, TOKEN_ACCEPTANCE), "share") for name in names))
    speedups = (measured(found(metrics, name, domain, "speedup"), "ratio") for name in names)
    table.add_row(f"speedup ({domain})", *speedups)
    table.add_row("  at draft length k", *(str(metrics["draft_lengths"][name]) for name in names))
    counts = (found(metrics, name, domain, "speedup")["count"] for name in names)
    table.add_row("  on so many prompts", *map(str, counts))
    return table


def _figures(metrics: dict[str, Any]) -> list[list[str]]:
    reference, lossless = metrics["reference"], metrics["lossless"]
    engines = {"ours": "our_plain_tokens_per_second", "transformers": "transformers_plain_tokens_per_second"}
    speeds = [
        f"{engine} {'not measured' if reference[name] is None else quantity(reference[name], 'tokens/s')}"
        for engine, name in engines.items()
    ]
    return [
        ["plain decoding", ", ".join(speeds)],
        ["lossless", f"{measured(lossless, 'share')}, {lossless['count']} decoded answers compared"],
    ]


def _facts(rows: list[list[str]]) -> Table:
    """A label and a text on each line."""
    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(label, Text(text, overflow="fold"))
    return table


def _outcome(verdict: dict[str, Any], missed: list[dict[str, Any]]) -> str:
    total = sum(item["state"] != "not applicable" for item in verdict["checks"])
    return f"{'passed' if verdict['passed'] else 'FAILED'}, {total - len(missed)} of {total} checks met"


def _browse(tracking_uri: str) -> str:
    """How to look at the runs of a store."""
    if tracking_uri.startswith(("http://", "https://")):
        return tracking_uri
    return f"mlflow ui --backend-store-uri {shlex.quote(tracking_uri)}"


def _check_registered(receipt: dict[str, Any]) -> None:
    """Raise `PipelineError` when the store lacks the version that the receipt names."""
    if not receipt["registered"]:
        return
    from pipeline.adapters.mlflow_registry import MlflowStore
    from pipeline.adapters.mlflow_store import check_store, is_gone

    uri, name, version = (receipt[key] for key in ("tracking_uri", "model_name", "version"))
    lacking = PipelineError(
        f"data/registry/receipt.json names {name} version {version}, which the MLflow store {uri} lacks.",
        "bring that store back, or delete data/registry/receipt.json and run `make repro` to register anew.",
    )
    if is_gone(uri):
        raise lacking
    check_store(uri, STORE_TIMEOUT_SECONDS)
    if MlflowStore(uri).version_fingerprint(name, version) != receipt["fingerprint"]:
        raise lacking


def main() -> None:
    try:
        show(console())
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
