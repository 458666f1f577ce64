"""What a finished stage leaves in its folder of resumable state, from which the next run restores its result.

DVC records the outputs of a stage after the stage has ended: a kill in between, or a params.yaml that changed meanwhile,
would else cost all the work. It is kept until another run of the stage has finished.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from pipeline.core.artifacts import atomic_path, file_sizes, read_json, write_json
from pipeline.core.errors import PipelineError

FINISHED = "finished"
MARKER = "finished.json"
SCHEMA_NAME, SCHEMA_VERSION = "domain-draft/finished", 1


def mark_finished(state: Path, code: str, outputs: tuple[Path, ...] = ()) -> None:
    """Copy `outputs`, files or folders, into `state`/finished, whole or not at all.

    `code` identifies the code that made them. They are no hard links: what is changed in place afterwards stays outside.
    """
    with atomic_path(state / FINISHED) as folder:
        folder.mkdir()
        for path in outputs:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, folder / path.name)
        write_json(folder / MARKER, SCHEMA_NAME, SCHEMA_VERSION, {"code": code, "sizes": file_sizes(folder, MARKER)})


def is_finished(state: Path, code: str) -> bool:
    """Whether `state` is that of a run which has finished, with the same code, and what it left is whole."""
    try:
        facts = read_json(state / FINISHED / MARKER, SCHEMA_NAME, SCHEMA_VERSION)
    except PipelineError:
        return False
    return facts["code"] == code and facts["sizes"] == file_sizes(state / FINISHED, MARKER)


def discard_finished(state: Path) -> None:
    """Remove `state` if its run has finished; what an unfinished one left stays."""
    if (state / FINISHED).is_dir():  # a kill in the middle leaves no part that looks unfinished
        state.rename(state.with_name(f".{state.name}.{uuid.uuid4().hex}.leaving"))
    for leaving in state.parent.glob(".*.leaving"):  # those of killed runs too
        shutil.rmtree(leaving, ignore_errors=True)


def finished_beside(state: Path) -> list[Path]:
    """The states of other runs of the same stage that have finished."""
    return [
        other
        for other in sorted(state.parent.iterdir())
        if other != state and (other / FINISHED).is_dir() and not other.name.startswith(".")
    ]
