"""Raw counts of an evaluation as Parquet: one row per request, one row per round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.evaluation import Request

REQUESTS = pa.schema(
    [
        ("request", pa.int64()),  # its number
        ("candidate", pa.string()),
        (
            "condition",
            pa.string(),
        ),  # headline; what was varied: draft_length, batch, temperature; dev: where k was chosen
        ("batch", pa.int64()),  # requests decoded together
        ("lot", pa.int64()),  # same number, and same candidate, condition, batch and domain: decoded together
        ("target_passes", pa.int64()),  # of the lot, prefills included
        ("draft_length", pa.int64()),  # 0: decoded plainly
        ("temperature", pa.float64()),
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("task", pa.string()),
        ("cluster", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("tokens_generated", pa.int64()),
        ("seconds", pa.float64()),
        ("ttft_seconds", pa.float64()),
        ("tokens_drafted", pa.int64()),
        ("tokens_accepted", pa.int64()),
        ("plain_seconds", pa.float64()),  # from here on what only an evaluation knows
        ("plain_ttft_seconds", pa.float64()),
        ("first_departure", pa.int64()),
    ],
    metadata={"schema": "domain-draft/requests", "schema_version": "2"},
)
ROUNDS = pa.schema(
    [
        ("request", pa.int64()),  # as in requests.parquet
        ("candidate", pa.string()),
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("round", pa.int64()),
        ("drafted", pa.int64()),
        ("accepted", pa.int64()),
        ("emitted", pa.int64()),
        ("delivered_seconds", pa.float64()),  # since the request came
    ],
    metadata={"schema": "domain-draft/rounds", "schema_version": "2"},
)
COUNTED = ("request", "tokens_generated", "tokens_drafted", "tokens_accepted")


def write_requests(folder: Path, requests: list[Request]) -> None:
    """Write `requests.parquet` (what a service should log of each request, and the plain run beside it) and `rounds.parquet`."""
    given = [name for name in REQUESTS.names if name not in COUNTED]
    rows = [
        {
            "request": index,
            **{name: getattr(request, name) for name in given},
            "tokens_generated": len(request.token_ids),
            "tokens_drafted": sum(request.drafted),
            "tokens_accepted": sum(request.accepted),
        }
        for index, request in enumerate(requests)
    ]
    rounds = [
        {
            "request": index,
            "candidate": request.candidate,
            "prompt_id": request.prompt_id,
            "domain": request.domain,
            "round": number,
            "drafted": drafted,
            "accepted": accepted,
            "emitted": emitted,
            "delivered_seconds": delivered,
        }
        for index, request in enumerate(requests)
        for number, (drafted, accepted, emitted, delivered) in enumerate(
            zip(request.drafted, request.accepted, request.emitted, _deliveries(request), strict=True)
        )
    ]
    pq.write_table(pa.Table.from_pylist(rows, REQUESTS), folder / "requests.parquet")
    pq.write_table(pa.Table.from_pylist(rounds, ROUNDS), folder / "rounds.parquet")


def _deliveries(request: Request) -> list[float]:
    """Seconds from the coming of a request to the delivery of each round; the first token came before with the prefill."""
    tokens = request.ttft_seconds + np.cumsum([0.0, *request.gaps_seconds])
    return tokens[np.cumsum(request.emitted, dtype=int)].tolist()
