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
    lot=0,
    target_passes=3,
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
    run = dataclasses.replace(RUN, token_ids=[4, 6, 7, 8], gaps_seconds=[0.5, 0.0, 0.4])
    under_load = dataclasses.replace(run, condition="batch", batch=4, lot=1, target_passes=9, draft_length=2)
    alone = dataclasses.replace(
        run, candidate="prompt_lookup", plain_seconds=None, plain_ttft_seconds=None, plain_gaps_seconds=None
    )
    write_requests(tmp_path, [run, alone, under_load])
    requests, rounds = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("requests", "rounds"))
    assert [row["candidate"] for row in requests] == ["distilled", "prompt_lookup", "distilled"]
    assert [row["plain_seconds"] for row in requests] == [2.0, None, 2.0]
    names = (
        "request", "condition", "batch", "lot", "target_passes", "draft_length", "temperature", "tokens_drafted", "tokens_accepted"
    )  # fmt: skip
    assert [tuple(row[name] for name in names) for row in requests[::2]] == [
        (0, "headline", 1, 0, 3, 3, 0.0, 4, 2),
        (2, "batch", 4, 1, 9, 2, 0.0, 4, 2),
    ]
    for number in range(3):
        own = [(row["drafted"], row["accepted"], row["emitted"]) for row in rounds if row["request"] == number]
        assert own == [(3, 1, 2), (1, 1, 1)], "each round names its request"
        delivered = [row["delivered_seconds"] for row in rounds if row["request"] == number]
        assert delivered == pytest.approx([0.6, 1.0]), "the first token came after 0.1 s, two more 0.5 s later"
