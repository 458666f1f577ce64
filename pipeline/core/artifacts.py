"""Whole-or-nothing artifacts: atomic writes, strict JSON with a schema, fingerprints."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.core.errors import PipelineError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; rename it to `path` when the block ends without an error.

    Works for a file and for a directory: the block creates whichever it wants at the yielded path. Whatever lay at
    `path` is replaced, and what a killed process left there under a temporary name is removed. After an error nothing
    remains.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_behind in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
        _remove(left_behind)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, schema: str, version: int, facts: dict[str, Any]) -> None:
    """Write `facts` as strict JSON (no NaN, no infinity), headed by its schema name and version."""
    document = {"schema": schema, "schema_version": version, **facts}
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path, schema: str, version: int) -> dict[str, Any]:
    """Read a document written by `write_json`.

    Raises `PipelineError` naming the file when it is missing, is not JSON, or carries another schema.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipelineError(f"{path} does not exist.", "run the stage that writes it: `dvc repro`.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(f"{path} is not valid JSON ({error}).", "delete it and run `dvc repro`.") from None
    found = (document.get("schema"), document.get("schema_version")) if isinstance(document, dict) else None
    if found != (schema, version):
        raise PipelineError(
            f"{path} carries schema {found}, expected {(schema, version)}.",
            "it was written by another version of the pipeline: delete it and run `dvc repro`.",
        )
    return document


def file_sizes(folder: Path, marker: str) -> dict[str, int]:
    """Bytes of each file under `folder`, by its path there; hidden ones and the file `marker`, which may list the others,
    are left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((marker, ".")))
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def fingerprint(*parts: Any) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of `parts`."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def fingerprint_files(paths: list[Path]) -> str:
    """16 hex digits of SHA-256 over the names and bytes of `paths`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda item: item.name):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def fingerprint_weights(folder: Path) -> str:
    """16 hex digits that identify the weights and the architecture in a folder in transformers' format."""
    return fingerprint_files(
        [path for pattern in ("*.safetensors", "*.bin", "config.json") for path in folder.glob(pattern)]
    )
