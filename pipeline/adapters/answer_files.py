"""Answers as Parquet shards: ids and log-probabilities of a row side by side, the run's facts in the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path
from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling

SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/answers", 1

SAMPLING = pa.struct(
    [("temperature", pa.float64()), ("top_k", pa.int64()), ("top_p", pa.float64()), ("min_p", pa.float64())]
)
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("task", pa.string()),
        ("cluster", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("sampling", SAMPLING),
        ("seed", pa.int64()),
        ("logprobs", pa.list_(pa.float32())),
        ("top_ids", pa.list_(pa.int32())),  # flattened [answer tokens x top]
        ("top_logprobs", pa.list_(pa.float16())),  # flattened likewise
        ("prompt_top_ids", pa.list_(pa.int32())),  # flattened [prompt tokens after the first x top]
        ("prompt_top_logprobs", pa.list_(pa.float16())),  # flattened likewise
    ]
)


def write_answers(path: Path, answers: list[Answer], facts: dict) -> None:
    """Write one shard whole or not at all. `facts`: what the answers depend on, strings and numbers."""
    columns = {name: [getattr(answer, name) for answer in answers] for name in SCHEMA.names}
    columns["sampling"] = [vars(answer.sampling) for answer in answers]
    for name in ("top_ids", "prompt_top_ids"):
        columns[name] = [array.reshape(-1) for array in columns[name]]
    for name in ("top_logprobs", "prompt_top_logprobs"):
        columns[name] = [array.reshape(-1).astype(np.float16) for array in columns[name]]
    metadata = {
        "schema": SCHEMA_NAME,
        "schema_version": str(SCHEMA_VERSION),
        "facts": json.dumps(facts, sort_keys=True),
    }
    table = pa.table(columns, schema=SCHEMA.with_metadata(metadata))
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_facts(directory: Path) -> dict:
    """What the shards of `directory` depend on; raises `PipelineError` when they are missing, broken or disagree."""
    facts = {json.dumps(_open(path)[1], sort_keys=True) for path in shards(directory)}
    if len(facts) != 1:
        raise PipelineError(
            f"The shards in {directory} come from different runs.", "delete the folder and run `dvc repro`."
        )
    return json.loads(facts.pop())


def read_answers(directory: Path) -> list[Answer]:
    """All answers of a split, in the order they were written."""
    return [answer for path in shards(directory) for answer in read_shard(path)]


def read_shard(path: Path) -> list[Answer]:
    """The answers of one shard, top log-probabilities reshaped to [answer tokens, top]."""
    table, _ = _open(path)
    rows = []
    for row in table.to_pylist():
        top = len(row["top_ids"]) // len(row["answer_ids"])
        for name in ("top_ids", "prompt_top_ids"):
            row[name] = np.asarray(row[name], dtype=np.int32).reshape(-1, top)
        for name in ("top_logprobs", "prompt_top_logprobs"):
            row[name] = np.asarray(row[name], dtype=np.float32).reshape(-1, top)
        for name in ("prompt_ids", "answer_ids"):
            row[name] = np.asarray(row[name], dtype=np.int32)
        row["sampling"] = Sampling(**row["sampling"])
        row["logprobs"] = np.asarray(row["logprobs"], dtype=np.float32)
        rows.append(Answer(**row))
    return rows


def shards(directory: Path) -> list[Path]:
    found = sorted(Path(directory).glob("*.parquet"))
    if not found:
        raise PipelineError(f"{directory} holds no answers.", "run `dvc repro generate`.")
    return found


def _open(path: Path) -> tuple[pa.Table, dict]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(
            f"{path} is not a whole Parquet file ({error}).", "delete it and run `dvc repro`."
        ) from None
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    found = (metadata.get("schema"), metadata.get("schema_version"))
    if found != (SCHEMA_NAME, str(SCHEMA_VERSION)):
        raise PipelineError(f"{path} carries schema {found}.", "delete data/answers and run `dvc repro`.")
    return table, json.loads(metadata["facts"])
