"""Raw counts of an evaluation as Parquet: one row per request, one row per round."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.evaluation import Request

_REQUEST_FIELDS = (
    "candidate", "prompt_id", "domain", "task", "cluster", "prompt_tokens", "seconds", "plain_seconds", "ttft_seconds",
    "plain_ttft_seconds",    "first_departure",
)  # fmt: skip


def write_requests(folder: Path, requests: list[Request]) -> None:
    """Write `requests.parquet` (tokens generated, seconds, tokens drafted and accepted) and `rounds.parquet`."""
    rows = [
        {
            **{name: getattr(request, name) for name in _REQUEST_FIELDS},
            "tokens_generated": len(request.token_ids),
            "tokens_drafted": sum(request.drafted),
            "tokens_accepted": sum(request.accepted),
        }
        for request in requests
    ]
    rounds = [
        {
            "candidate": request.candidate,
            "prompt_id": request.prompt_id,
            "domain": request.domain,
            "round": number,
            "drafted": drafted,
            "accepted": accepted,
            "emitted": emitted,
        }
        for request in requests
        for number, (drafted, accepted, emitted) in enumerate(
            zip(request.drafted, request.accepted, request.emitted, strict=True)
        )
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "requests.parquet")
    pq.write_table(pa.Table.from_pylist(rounds), folder / "rounds.parquet")
