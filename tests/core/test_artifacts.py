"""Artifacts are whole or absent, and strict (I05)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pipeline.core.artifacts import atomic_path, fingerprint, fingerprint_files, read_json, write_json
from pipeline.core.errors import PipelineError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "facts.json"
    write_json(path, "s", 1, {"a": 1})
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(path, "s", 1)["a"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    for name in ("old", "new"):
        with atomic_path(tmp_path / "out") as folder:
            folder.mkdir()
            (folder / name).write_text(name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_kill_during_a_write_leaves_no_file_of_the_final_name(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from pipeline.core.artifacts import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", "s", 1, {"value": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", '{"schema": "other", "schema_version": 1}', "[]", "\xff"])
def test_unreadable_documents_name_the_file(tmp_path, text):
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PipelineError, match="x.json"):
        read_json(tmp_path / "x.json", "s", 1)
    with pytest.raises(PipelineError, match="dvc repro"):
        read_json(tmp_path / "absent.json", "s", 1)


def test_fingerprints_depend_on_content_alone(tmp_path):
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
    for name, text in (("a", "x"), ("b", "y")):
        (tmp_path / name).write_text(text)
    before = fingerprint_files([tmp_path / "a", tmp_path / "b"])
    assert before == fingerprint_files([tmp_path / "b", tmp_path / "a"])
    (tmp_path / "b").write_text("z")
    assert before != fingerprint_files([tmp_path / "a", tmp_path / "b"])


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    left, other = tmp_path / ".draft.0123abcd.tmp", tmp_path / ".drafts.0123abcd.tmp"
    for folder in (left, other):
        folder.mkdir()
    with atomic_path(tmp_path / "draft") as temporary:
        temporary.mkdir()
    assert not left.exists() and other.exists() and (tmp_path / "draft").is_dir()
