"""What a finished stage leaves is whole and of the same code, or it is not used; what an unfinished one left is not touched."""

from __future__ import annotations

import pytest

from pipeline.core.finished import FINISHED, discard_finished, finished_beside, is_finished, mark_finished


@pytest.fixture
def outputs(tmp_path):
    (tmp_path / "data" / "draft").mkdir(parents=True)
    (tmp_path / "data" / "draft" / "model").write_text("weights")
    (tmp_path / "data" / "history.csv").write_text("step\n")
    return tmp_path / "data" / "draft", tmp_path / "data" / "history.csv"


def test_copies_are_kept_that_later_changes_do_not_reach(outputs, tmp_path):
    state = tmp_path / "stage" / "key"
    assert not is_finished(state, "code")
    mark_finished(state, "code", outputs)
    assert is_finished(state, "code") and not is_finished(state, "other code")
    with (outputs[0] / "model").open("r+") as file:
        file.write("changed")
    assert (state / FINISHED / "draft" / "model").read_text() == "weights"
    assert (state / FINISHED / "history.csv").read_text() == "step\n" and is_finished(state, "code")


@pytest.mark.parametrize("damage", ["cut", "gone", "no marker", "broken marker", "more"])
def test_what_is_not_whole_is_not_finished(damage, outputs, tmp_path):
    mark_finished(tmp_path / "key", "code", outputs)
    kept = tmp_path / "key" / FINISHED
    if damage == "cut":
        (kept / "draft" / "model").write_text("w")
    elif damage == "more":
        (kept / "draft" / "other").write_text("w")
    elif damage == "gone":
        (kept / "draft" / "model").unlink()
    elif damage == "no marker":
        (kept / "finished.json").unlink()
    else:
        (kept / "finished.json").write_text("{")
    assert not is_finished(tmp_path / "key", "code")


def test_only_finished_states_are_removed(outputs, tmp_path):
    stage = tmp_path / "stage"
    for key in ("a", "b", "c"):
        (stage / key / "checkpoint-1").mkdir(parents=True)
    for key in ("a", "b"):
        mark_finished(stage / key, "code", outputs)
    assert finished_beside(stage / "a") == [stage / "b"]
    assert finished_beside(stage / "c") == [stage / "a", stage / "b"]
    for key in ("b", "c", "absent"):
        discard_finished(stage / key)
    assert sorted(path.name for path in stage.iterdir()) == ["a", "c"]
    (stage / ".d.1f.leaving" / "half").mkdir(parents=True)
    discard_finished(stage / "c")
    assert sorted(path.name for path in stage.iterdir()) == ["a", "c"], "nor does what a killed run was removing stay"
