"""A fresh default MLflow store for a test module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.adapters.mlflow_store import RunStore, check_store, resolve_tracking_uri


@contextlib.contextmanager
def fresh_store(kind: type[RunStore], tmp_path_factory) -> Iterator[tuple[RunStore, Path]]:
    """(the store, its project), of a project whose path has a space, made from another working directory that stays empty."""
    root, elsewhere = tmp_path_factory.mktemp("a project"), tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(elsewhere)
        uri = resolve_tracking_uri(None, root)
        check_store(uri, timeout_seconds=5)
        yield kind(uri), root
        assert list(elsewhere.iterdir()) == []
