"""T05, L06, P08: ids, not text, are stored, and probabilities are never read beside ids that they do not belong to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.adapters import answer_files
from pipeline.adapters.answer_files import read_answers, read_facts, write_answers
from pipeline.core.answers import Answer, GenerateConfig, check_same_settings, is_looping
from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling

SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.1)
FACTS = {"target": "t", "vocabulary_size": 50}


def answer(ids: list[int], name: str = "a") -> Answer:
    rng = np.random.default_rng(len(ids))
    top = -np.sort(-np.log(rng.dirichlet(np.ones(4), size=len(ids))), axis=-1).astype(np.float32)
    index = rng.permutation(4 * len(ids)).reshape(len(ids), 4).astype(np.int32)
    return Answer(
        name, "legal", "continuation", "c", np.array([9, 9], np.int32), np.array(ids, np.int32), "eos", SAMPLING,
        -7, top[:, 0], index, top, index[:1], top[:1],
    )  # fmt: skip


def test_ids_that_are_no_canonical_split_come_back_as_they_were(tmp_path):
    """The split he + llo + eos stays three ids with three rows of probabilities, though hello is one id."""
    original = answer([4, 6, 2])
    write_answers(tmp_path / "train" / "0.parquet", [original, answer([5], "b")], FACTS)
    back, other = read_answers(tmp_path / "train")
    assert back.answer_ids.tolist() == [4, 6, 2] and other.prompt_id == "b"
    assert back.top_ids.tolist() == original.top_ids.tolist() and back.top_logprobs.shape == (3, 4)
    assert np.array_equal(back.top_logprobs, original.top_logprobs.astype(np.float16).astype(np.float32))
    assert np.array_equal(back.logprobs, original.logprobs)
    assert back.prompt_top_ids.tolist() == original.prompt_top_ids.tolist() and back.prompt_top_logprobs.shape == (1, 4)
    assert (back.sampling, back.seed) == (SAMPLING, -7)
    assert read_facts(tmp_path / "train") == FACTS


def test_misaligned_probabilities_are_an_error():
    whole = answer([4, 6, 2])
    with pytest.raises(ValueError, match="not aligned"):
        Answer(**{**vars(whole), "answer_ids": whole.answer_ids[:2]})
    with pytest.raises(ValueError, match="not aligned"):
        Answer(**{**vars(whole), "prompt_ids": whole.prompt_ids[:1]})


def swapped(lists: list) -> list:
    return [lists[1], lists[0], *lists[2:]]


def last_token_dropped(lists: list) -> list:
    return [lists[0][:-4], *lists[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_logprobs": swapped},
        {"top_ids": swapped, "top_logprobs": swapped},
        {"prompt_top_ids": swapped, "prompt_top_logprobs": swapped},
        {"top_ids": last_token_dropped, "top_logprobs": last_token_dropped},
        {"top_logprobs": lambda lists: [lists[0][::-1], *lists[1:]]},
        {"logprobs": swapped},
        {"answer_ids": swapped},
        {"answer_ids": lambda lists: [[7, *lists[0][1:]], *lists[1:]]},
        {"prompt_ids": lambda lists: [[8, 9], *lists[1:]]},
        {"prompt_id": swapped},
        {"checksum": swapped},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_probabilities_that_are_not_the_rows_are_refused(changes, tmp_path):
    """Rows of one size, so that no shape gives the change away."""
    rows = [answer([4, 6, 2], "a"), answer([5, 3, 1], "b"), answer([2], "c")]
    rows[1].top_logprobs = rows[1].top_logprobs - 1
    rows[1].prompt_top_ids, rows[1].prompt_top_logprobs = rows[1].prompt_top_ids + 1, rows[1].prompt_top_logprobs - 1
    rows[1].top_ids, rows[1].logprobs = rows[1].top_ids + 1, rows[1].logprobs - 1
    path = tmp_path / "0.parquet"
    write_answers(path, rows, FACTS)
    table = pq.read_table(path)
    for name, change in changes.items():
        column = pa.array(change(table[name].to_pylist()), type=table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    pq.write_table(table, path)
    with pytest.raises(PipelineError, match=r"0.parquet: the probabilities of prompt [ab] do not belong to its ids"):
        read_answers(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_ids", 50, "outside 0 to 49"),
        ("top_ids", -1, "outside 0 to 49"),
        ("prompt_top_ids", 50, "outside 0 to 49"),
        ("top_ids", None, "twice"),
        ("prompt_top_ids", None, "twice"),
        ("top_logprobs", 0.01, "above 0"),
        ("top_logprobs", np.nan, "not finite"),
        ("prompt_top_logprobs", -np.inf, "not finite"),
    ],
)
def test_entries_that_are_no_top_are_refused(name, value, words, tmp_path, monkeypatch):
    """L06: when they are written, and when a file that has them is read."""
    broken = answer([4, 6, 2])
    entries = getattr(broken, name).copy()
    entries[-1, 2] = entries[-1, 0] if value is None else value
    broken = dataclasses.replace(broken, **{name: entries})
    with pytest.raises(PipelineError, match=words):
        write_answers(tmp_path / "0.parquet", [answer([5]), broken], FACTS)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(answer_files, "check_entries", lambda *_: None)
    write_answers(tmp_path / "0.parquet", [answer([5]), broken], FACTS)
    monkeypatch.undo()
    with pytest.raises(PipelineError, match=words):
        read_answers(tmp_path)


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_a_scored_token_takes_well_below_100_bytes(vocabulary, tmp_path):
    """With 20 entries whose ids follow no pattern, the worst case: real ids repeat, and take half."""
    rng = np.random.default_rng(0)
    tokens, top = 2000, 20
    start, stride = rng.integers(0, vocabulary, (tokens, 1)), rng.integers(1, vocabulary // top, (tokens, 1))
    ids = ((start + stride * np.arange(top)) % vocabulary).astype(np.int32)
    logits = -np.sort(-rng.normal(0, 3, (tokens, 1000)).astype(np.float32))
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[:, :top]
    rows = [
        Answer(
            f"{number:016x}", "legal", "continuation", f"{number:016x}", ids[part, 0], ids[part, 1], "length",
            Sampling(), number, logprobs[part, 1], ids[part], logprobs[part], ids[part][1:], logprobs[part][1:],
        )
        for number, part in enumerate(np.split(np.arange(tokens), 20))
    ]  # fmt: skip
    path = tmp_path / "0.parquet"
    write_answers(path, rows, {"vocabulary_size": vocabulary})
    assert path.stat().st_size / sum(len(row.top_ids) + len(row.prompt_top_ids) for row in rows) < 80


def test_answers_of_other_settings_are_refused():
    """P08"""
    settings = GenerateConfig(24, 0.25, SAMPLING, top_logprobs=8, batch_size=4, shard_rows=8)
    check_same_settings(settings.facts, settings)
    check_same_settings(settings.facts, dataclasses.replace(settings, batch_size=16, shard_rows=128))
    for change in (
        {"top_logprobs": 16}, {"max_new_tokens": 25}, {"sampled_share": 0.5}, {"sampling": Sampling(0.7)},
    ):  # fmt: skip
        with pytest.raises(PipelineError, match=f"generate.{next(iter(change))} was"):
            check_same_settings(settings.facts, dataclasses.replace(settings, **change))


def test_a_cut_shard_is_named(tmp_path):
    """I05"""
    path = tmp_path / "0.parquet"
    write_answers(path, [answer([4, 6, 2])] * 50, FACTS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    with pytest.raises(PipelineError, match="0.parquet"):
        read_answers(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(PipelineError, match="0.parquet"):
        read_facts(tmp_path)


def test_shards_of_two_runs_are_refused(tmp_path):
    write_answers(tmp_path / "0.parquet", [answer([1])], {**FACTS, "target": "a"})
    write_answers(tmp_path / "1.parquet", [answer([1])], {**FACTS, "target": "b"})
    with pytest.raises(PipelineError, match="different runs"):
        read_facts(tmp_path)


def test_an_empty_folder_says_what_to_run(tmp_path):
    with pytest.raises(PipelineError, match="dvc repro generate"):
        read_answers(tmp_path)


def test_looping_answers():
    assert is_looping(np.array([1, 2, 3, 4] * 10))
    assert not is_looping(np.arange(40))
    assert not is_looping(np.array([1, 2]))
    assert not is_looping(torch.randperm(60).numpy())
