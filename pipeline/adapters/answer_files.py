"""Answers as Parquet shards: ids and log-probabilities of a row side by side, the run's facts in the file's metadata.

The top log-probabilities are kept in half precision, within 0.05 % of their value. The bytes of a number go into streams
of their own before they are compressed (Parquet's BYTE_STREAM_SPLIT): the high bytes of ids and of log-probabilities say
little and shrink to little, for a vocabulary of any size. With 20 entries a scored token, of prompt or answer, takes 55
bytes where the vocabulary has 49k tokens, about 61 where it has 152k. A row's checksum covers its prompt id, all its ids
and all its probabilities, so that probabilities are never read beside ids that they do not belong to.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.answers import Answer, check_entries
from pipeline.core.artifacts import atomic_path
from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling

SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/answers", 2
CHECKSUM_BYTES = 8
ZSTD_LEVEL = 9  # 3 % smaller than the default; a shard still takes a fraction of a second, and reads as fast

SAMPLING = pa.struct(
    [("temperature", pa.float64()), ("top_k", pa.int64()), ("top_p", pa.float64()), ("min_p", pa.float64())]
)
ARRAYS = {
    "prompt_ids": pa.int32(),
    "answer_ids": pa.int32(),
    "logprobs": pa.float32(),
    "top_ids": pa.int32(),  # flattened [answer tokens x top]
    "top_logprobs": pa.float16(),  # flattened likewise
    "prompt_top_ids": pa.int32(),  # flattened [prompt tokens after the first x top]
    "prompt_top_logprobs": pa.float16(),  # flattened likewise
}
SCALARS = {
    "prompt_id": pa.string(),
    "domain": pa.string(),
    "task": pa.string(),
    "cluster": pa.string(),
    "finish_reason": pa.string(),
    "sampling": SAMPLING,
    "seed": pa.int64(),
    "checksum": pa.binary(CHECKSUM_BYTES),  # of the row's prompt_id and arrays, as stored
}
SCHEMA = pa.schema(
    [*SCALARS.items(), *((name, pa.list_(pa.field("element", kind, nullable=False))) for name, kind in ARRAYS.items())]
)


def write_answers(path: Path, answers: list[Answer], facts: dict) -> None:
    """Write one shard whole or not at all.

    `facts`: what the answers depend on, JSON values; `vocabulary_size`, the number of real token ids, among them.
    """
    for answer in answers:
        check_entries(answer, facts["vocabulary_size"])
    stored = {
        name: [getattr(answer, name).reshape(-1).astype(kind.to_pandas_dtype()) for answer in answers]
        for name, kind in ARRAYS.items()
    }
    columns = {name: [getattr(answer, name) for answer in answers] for name in SCALARS if name != "checksum"}
    columns["sampling"] = [vars(answer.sampling) for answer in answers]
    columns["checksum"] = [
        _checksum(answer.prompt_id, arrays) for answer, arrays in zip(answers, _rows(stored), strict=True)
    ]
    for name, arrays in stored.items():
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, np.concatenate(arrays), type=SCHEMA.field(name).type)
    metadata = {
        "schema": SCHEMA_NAME,
        "schema_version": str(SCHEMA_VERSION),
        "facts": json.dumps(facts, sort_keys=True),
    }
    table = pa.table(columns, schema=SCHEMA.with_metadata(metadata))
    with atomic_path(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=["domain", "task", "cluster", "finish_reason"],
            column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ARRAYS},
        )


def read_facts(directory: Path) -> dict:
    """What the shards of `directory` depend on; raises `PipelineError` when they are missing, broken or disagree."""
    facts = {json.dumps(_facts(path, _opened(pq.read_schema, path)), sort_keys=True) for path in shards(directory)}
    if len(facts) != 1:
        raise PipelineError(
            f"The shards in {directory} come from different runs.", "delete the folder and run `dvc repro`."
        )
    return json.loads(facts.pop())


def read_answers(directory: Path) -> list[Answer]:
    """All answers of a split, in the order they were written."""
    return [answer for path in shards(directory) for answer in read_shard(path)]


def read_shard(path: Path) -> list[Answer]:
    """The answers of one shard, top log-probabilities reshaped to [answer tokens, top]; they share the shard's memory.

    Raises `PipelineError` where a row's probabilities are not those of its ids, or its stored entries are no top of a
    distribution over the vocabulary.
    """
    table = _opened(pq.read_table, path)
    facts = _facts(path, table.schema)
    stored = {name: _arrays(table[name]) for name in ARRAYS}
    answers = []
    for row, arrays in zip(table.select(list(SCALARS)).to_pylist(), _rows(stored), strict=True):
        if row.pop("checksum") != _checksum(row["prompt_id"], arrays):
            raise PipelineError(
                f"{path}: the probabilities of prompt {row['prompt_id']} do not belong to its ids.",
                "the file was changed after it was written: delete it and run `dvc repro`.",
            )
        top = len(arrays["top_ids"]) // len(arrays["answer_ids"])
        for name in ("top_ids", "prompt_top_ids"):
            arrays[name] = arrays[name].reshape(-1, top)
        for name in ("top_logprobs", "prompt_top_logprobs"):
            arrays[name] = arrays[name].reshape(-1, top).astype(np.float32)
        answer = Answer(**{**row, "sampling": Sampling(**row["sampling"])}, **arrays)
        check_entries(answer, facts["vocabulary_size"])
        answers.append(answer)
    return answers


def shards(directory: Path) -> list[Path]:
    found = sorted(Path(directory).glob("*.parquet"))
    if not found:
        raise PipelineError(f"{directory} holds no answers.", "run `dvc repro generate`.")
    return found


def _rows(columns: dict[str, list[np.ndarray]]) -> list[dict[str, np.ndarray]]:
    return [dict(zip(columns, arrays, strict=True)) for arrays in zip(*columns.values(), strict=True)]


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The lists of a column as writable views of one array."""
    lists = column.combine_chunks()
    values = np.array(lists.values)
    return np.split(values, lists.offsets.to_numpy()[1:-1])


def _checksum(prompt_id: str, arrays: dict[str, np.ndarray]) -> bytes:
    """Of the prompt's id, and the size and the bytes of each array."""
    digest = hashlib.blake2b(
        repr((prompt_id, [len(arrays[name]) for name in ARRAYS])).encode(), digest_size=CHECKSUM_BYTES
    )
    for name in ARRAYS:
        digest.update(arrays[name])
    return digest.digest()


def _opened(read: Any, path: Path) -> Any:
    try:
        return read(path)
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(
            f"{path} is not a whole Parquet file ({error}).", "delete it and run `dvc repro`."
        ) from None


def _facts(path: Path, schema: pa.Schema) -> dict:
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    found = (metadata.get("schema"), metadata.get("schema_version"))
    if found != (SCHEMA_NAME, str(SCHEMA_VERSION)):
        raise PipelineError(f"{path} carries schema {found}.", "delete data/answers and run `dvc repro`.")
    return json.loads(metadata["facts"])
