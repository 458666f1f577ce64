"""Departures of half-precision runs are judged in float32 (D12); raw counts survive writing and reading."""

from __future__ import annotations

import dataclasses

import pyarrow.parquet as pq
import pytest
import torch
from tiny_models import chain

from pipeline.adapters.request_files import write_requests
from pipeline.core.evaluation import Request, judge_departures, near_tie_gap

RUN = Request(
    candidate="distilled",
    condition="headline",
    batch=1,
    draft_length=3,
    temperature=0.0,
    prompt_id="p",
    domain="legal",
    task="continuation",
    cluster="c",
    prompt_tokens=2,
    token_ids=[4, 6],
    seconds=1.0,
    plain_seconds=2.0,
    ttft_seconds=0.1,
    plain_ttft_seconds=0.1,
    gaps_seconds=[0.9],
    plain_gaps_seconds=[1.9],
    drafted=[3, 1],
    accepted=[1, 1],
    emitted=[2, 1],
    first_departure=1,
)


@pytest.fixture(scope="module")
def target():
    """After token 4 the ids 5, 6 and 8 almost tie, and 7 comes far behind."""
    model = chain({1: 4, 4: 5})
    with torch.no_grad():
        model.lm_head.weight[6:9, 4] = torch.tensor([0.99, 0.5, 0.985])
    return model


@pytest.mark.parametrize(("token", "largest_gap", "legal"), [(6, 0.5, True), (6, 0.01, False), (7, 0.5, False)])
def test_a_departure_is_legal_only_where_both_tokens_tie_for_the_best(target, token, largest_gap, legal):
    same = dataclasses.replace(RUN, token_ids=[4, 5], first_departure=None)
    departed = dataclasses.replace(RUN, token_ids=[4, token])
    (judged,) = judge_departures(target, [same, departed], {"p": [2, 1]}, {"p": [4, 5]}, largest_gap)
    assert (judged["token_index"], judged["legal"]) == (1, legal)
    assert (judged["float32_gap"] > 0.5) == (token == 7)


def test_a_tie_of_three_may_fall_either_way(target):
    """Neither token is float32's best, both tie with it."""
    departed = dataclasses.replace(RUN, token_ids=[4, 8])
    (judged,) = judge_departures(target, [departed], {"p": [2, 1]}, {"p": [4, 6]}, 0.5)
    assert judged["legal"]


def test_the_gap_is_that_of_the_float32_logits(target):
    logits = target(torch.tensor([[1, 4]]), use_cache=False).logits[0, -1]
    assert near_tie_gap(target, [1, 4], (6, 5)) == pytest.approx((logits[5] - logits[6]).item())


def test_raw_counts_are_one_row_per_request_and_round(tmp_path):
    under_load = dataclasses.replace(RUN, condition="batch", batch=4, draft_length=2)
    write_requests(tmp_path, [RUN, dataclasses.replace(RUN, candidate="prompt_lookup"), under_load])
    requests, rounds = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("requests", "rounds"))
    assert [row["candidate"] for row in requests] == ["distilled", "prompt_lookup", "distilled"]
    names = ("request", "condition", "batch", "draft_length", "temperature", "tokens_drafted", "tokens_accepted")
    assert [tuple(row[name] for name in names) for row in requests[::2]] == [
        (0, "headline", 1, 3, 0.0, 4, 2),
        (2, "batch", 4, 2, 0.0, 4, 2),
    ]
    for number in range(3):
        own = [(row["drafted"], row["accepted"], row["emitted"]) for row in rounds if row["request"] == number]
        assert own == [(3, 1, 2), (1, 1, 1)], "each round names its request"
