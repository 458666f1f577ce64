"""T05: ids, not text, are stored, aligned with their probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.adapters.answer_files import read_answers, read_facts, write_answers
from pipeline.core.answers import Answer, is_looping
from pipeline.core.errors import PipelineError
from pipeline.core.sampling import Sampling

SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.1)


def answer(ids: list[int], name: str = "a") -> Answer:
    rng = np.random.default_rng(len(ids))
    top = np.log(rng.dirichlet(np.ones(4), size=len(ids))).astype(np.float32)
    index = rng.permutation(4 * len(ids)).reshape(len(ids), 4).astype(np.int32)
    return Answer(
        name, "legal", "continuation", "c", np.array([9, 9], np.int32), np.array(ids, np.int32), "eos", SAMPLING,
        -7, top[:, 0], index, top, index[:1], top[:1],
    )  # fmt: skip


def test_ids_that_are_no_canonical_split_come_back_as_they_were(tmp_path):
    """The split he + llo + eos stays three ids with three rows of probabilities, though hello is one id."""
    original = answer([4, 6, 2])
    write_answers(tmp_path / "train" / "0.parquet", [original, answer([5], "b")], {"target": "t"})
    back, other = read_answers(tmp_path / "train")
    assert back.answer_ids.tolist() == [4, 6, 2] and other.prompt_id == "b"
    assert back.top_ids.tolist() == original.top_ids.tolist() and back.top_logprobs.shape == (3, 4)
    assert np.abs(back.top_logprobs - original.top_logprobs).max() < 2e-3
    assert np.array_equal(back.logprobs, original.logprobs)
    assert back.prompt_top_ids.tolist() == original.prompt_top_ids.tolist() and back.prompt_top_logprobs.shape == (1, 4)
    assert (back.sampling, back.seed) == (SAMPLING, -7)
    assert read_facts(tmp_path / "train") == {"target": "t"}


def test_misaligned_probabilities_are_an_error():
    whole = answer([4, 6, 2])
    with pytest.raises(ValueError, match="not aligned"):
        Answer(**{**vars(whole), "answer_ids": whole.answer_ids[:2]})
    with pytest.raises(ValueError, match="not aligned"):
        Answer(**{**vars(whole), "prompt_ids": whole.prompt_ids[:1]})


def test_a_cut_shard_is_named(tmp_path):
    """I05"""
    path = tmp_path / "0.parquet"
    write_answers(path, [answer([4, 6, 2])] * 50, {})
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    with pytest.raises(PipelineError, match="0.parquet"):
        read_answers(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(PipelineError, match="0.parquet"):
        read_facts(tmp_path)


def test_shards_of_two_runs_are_refused(tmp_path):
    write_answers(tmp_path / "0.parquet", [answer([1])], {"target": "a"})
    write_answers(tmp_path / "1.parquet", [answer([1])], {"target": "b"})
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
