from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.evaluation import Agreement, Request, agreement_metrics, waiting_metrics
from pipeline.core.metrics import (
    acceptance_by_position,
    acceptance_by_position_measure,
    aggregate,
    deviation_measure,
    difference_measure,
    expected_acceptance_by_position,
    no_data,
    quantile_measures,
    ratio,
    ratio_measure,
    scaled,
)


def test_ratio_of_sums_and_no_data():
    assert ratio([1, 3], [2, 6]) == 0.5
    assert ratio([], []) is None
    assert ratio_measure([], [], [], 100) == {"value": None, "interval": None, "count": 0, "reason": "no prompts"}


def test_interval_covers_the_truth_and_widens_with_clusters():
    rng = np.random.default_rng(0)
    hits, tokens = rng.binomial(50, 0.6, size=80), np.full(80, 50)
    apart = ratio_measure(hits, tokens, [str(i) for i in range(80)], 1000)
    low, high = apart["interval"]
    assert low < 0.6 < high and apart["count"] == 80
    correlated = np.repeat(rng.choice([20, 40], size=20), 4)
    together = ratio_measure(correlated, tokens, [str(i // 4) for i in range(80)], 1000)["interval"]
    separate = ratio_measure(correlated, tokens, [str(i) for i in range(80)], 1000)["interval"]
    assert together[1] - together[0] > 1.5 * (separate[1] - separate[0])


def test_one_source_document_has_no_interval():
    assert ratio_measure([1, 2], [2, 4], ["a", "a"], 100)["interval"] is None


def test_acceptance_by_position_is_unconditional_and_leaves_out_what_the_end_cut():
    shares = acceptance_by_position([[(1, 4), (4, 4)], [(0, 4), (2, 2)]], 4)
    assert shares == [2 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert shares == sorted(shares, reverse=True)
    assert acceptance_by_position([[(2, 2), (0, 0), (4, 4)]], 4) == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert acceptance_by_position([[(1, 2)]], 4) is None


@pytest.mark.parametrize("draft_length", [1, 2, 5])
def test_expected_acceptance_is_what_rounds_over_the_answers_give(draft_length):
    """By position, over the rounds that reach it before their answer ends."""
    rng = np.random.default_rng(draft_length)
    answers = [(rng.random(40) < 0.6).astype(float).tolist() for _ in range(20)]
    runs = []
    for agreed in answers:
        position = 1
        while position < len(agreed):
            block = [*agreed[position : position + draft_length], 0.0]
            run = block.index(0.0)
            runs.append((run, len(agreed) - position))
            position += run + 1
    found = expected_acceptance_by_position(answers, draft_length)
    for index in range(draft_length):
        assert found[index] == pytest.approx(np.mean([run > index for run, left in runs if left > index]))
    uneven = [[1.0, *[1.0] * 8, *[0.0] * 8]]
    first = expected_acceptance_by_position(uneven, draft_length)[0]
    assert first < np.mean(uneven), "hard stretches begin more rounds"
    assert expected_acceptance_by_position([[0.3, 0.5, 0.5]], 2) == pytest.approx([0.5, 0.25])
    assert expected_acceptance_by_position([[1.0, 1.0]], 3) == [1.0, 0.0, 0.0]
    assert expected_acceptance_by_position([[1.0]], 3) is None


def test_agreement_leaves_loops_out_and_says_why_there_is_nothing():
    rows = [
        Agreement("a", "legal", "t", "1", 3, True, 10, 10, 9, 9, 9, []),
        Agreement("b", "legal", "t", "2", 3, False, 10, 4, 2, 2, 2, []),
    ]
    found = agreement_metrics(rows, 100)
    assert found["token_acceptance_trimmed_head"]["value"] == 0.7
    assert found["token_acceptance_full_head"]["value"] == 0.55
    assert found["token_acceptance_without_loops"]["value"] == 0.4
    assert agreement_metrics(rows[:1], 100)["token_acceptance_without_loops"]["reason"] == "every answer loops"
    lookup = [Agreement("a", "legal", "t", "1", 3, False, 10, 3, None, None, None, [])]
    assert agreement_metrics(lookup, 100)["token_acceptance_full_head"]["value"] is None


def test_aggregate_adds_all():
    assert aggregate(["ab", "b", "ac"], lambda word: word[0]) == {
        "a": ["ab", "ac"],
        "b": ["b"],
        "all": ["ab", "b", "ac"],
    }


def test_differences_are_paired_by_prompt():
    """Where the first is 0.1 better on every prompt, whatever the prompt, the interval says so; unpaired ones would overlap."""
    tokens, level = [100] * 20, np.linspace(10, 80, 20)
    found = difference_measure((level + 10, tokens), (level, tokens), [str(i) for i in range(20)], 200)
    assert (
        found["value"] == pytest.approx(0.1) and found["interval"] == pytest.approx([0.1, 0.1]) and found["count"] == 20
    )
    assert difference_measure(([1], [2]), ([1], [4]), ["a"], 200)["interval"] is None
    assert difference_measure(([], []), ([], []), [], 200)["reason"] == "no prompts in common"


def requests_of(*pairs: tuple[list[float], list[float]]) -> list[Request]:
    """One request per pair of gaps, with the draft and without, each of a document of its own."""
    return [
        Request(
            "distilled", "headline", 1, index, 2, 3, 0.0, str(index), "legal", "continuation", str(index), 8, [0], 2.0, 3.0, 0.2, 0.1, ours, plain, [2], [1],
            [2], None,
        )
        for index, (ours, plain) in enumerate(pairs)
    ]  # fmt: skip


def test_smoothness_is_the_worst_wait_for_ten_tokens():
    """Bursts of four every 0.4 s and a token every 0.1 s come to the same wait for ten; a stall in the middle does not."""
    bursts = [0.4 if index % 4 == 3 else 0.0 for index in range(40)]
    even, stalled = [0.1] * 40, [0.1] * 20 + [2.0] + [0.1] * 20
    smoothness = {name: waiting_metrics(requests_of((gaps, even)), 50)["smoothness"] for name, gaps in (
        ("bursts", bursts), ("even", even), ("stalled", stalled), ("short", [0.1] * 9),
    )}  # fmt: skip
    assert smoothness["bursts"]["value"] == pytest.approx(1.2) and smoothness["even"]["value"] == pytest.approx(1.0)
    assert smoothness["stalled"]["value"] == pytest.approx(2.9) and smoothness["short"]["value"] is None
    both = waiting_metrics(requests_of((bursts, even), (stalled, even), (even, even)), 200)
    low, high = both["smoothness"]["interval"]
    assert low == pytest.approx(1.0) and high == pytest.approx(2.9), "one document may be drawn alone"
    assert both["itl_p50_seconds"]["interval"] is not None
    jitter = both["itl_jitter_seconds"]
    assert jitter["value"] == pytest.approx(np.std(bursts + stalled + even))
    assert jitter["interval"][0] == pytest.approx(0, abs=1e-9), "the even document drawn alone"
    assert jitter["interval"][0] < jitter["value"] < jitter["interval"][1] <= np.std(stalled) + 1e-9


def test_a_deviation_is_resampled_by_document():
    rng = np.random.default_rng(3)
    groups, clusters = [(1e3 + rng.random(size)).tolist() for size in (7, 3, 12, 5)], ["a", "b", "a", "c"]
    found = deviation_measure(groups, clusters, 200)
    pooled = []
    for names in np.random.default_rng(0).integers(3, size=(200, 3)):
        values = [v for name in names for own, group in zip(clusters, groups) if own == "abc"[name] for v in group]
        pooled.append(np.std(values))
    assert found["interval"] == pytest.approx(np.quantile(pooled, [0.025, 0.975]))
    assert found["value"] == pytest.approx(np.std(np.concatenate(groups))) and found["count"] == 4
    assert deviation_measure(groups, ["a"] * 4, 200)["interval"] is None


def test_acceptance_by_position_has_an_interval_at_each_position():
    """Two documents of one round each, accepted in full and not at all: a draw of both, or of one twice."""
    sequences, documents = [[(2, 2), (2, 2)], [(0, 2), (0, 2)]], ["a", "b"]
    found = acceptance_by_position_measure(sequences, 2, documents, 200)
    assert found["value"] == [0.5, 0.5] and found["interval"] == [[0.0, 1.0], [0.0, 1.0]] and found["count"] == 2
    assert acceptance_by_position_measure(sequences, 2, ["a", "a"], 200)["interval"] is None
    assert acceptance_by_position_measure([[(1, 2)]], 4, ["a"], 200)["reason"] == "no round was whole"
    rng = np.random.default_rng(0)
    many = [[(int(rng.integers(4)), 3) for _ in range(5)] for _ in range(40)]
    found = acceptance_by_position_measure(many, 3, [str(i) for i in range(40)], 500)
    assert found["value"] == acceptance_by_position(many, 3)
    for share, (low, high) in zip(found["value"], found["interval"], strict=True):
        assert low < share < high and high - low < 0.2


def test_a_measure_is_scaled_with_its_interval():
    entry = {"value": 2.0, "interval": [1.0, 4.0], "count": 3, "reason": None}
    assert scaled(entry, -2) == {**entry, "value": -4.0, "interval": [-8.0, -2.0]}
    assert (
        scaled({**entry, "interval": None}, 3)["value"] == 6.0
        and scaled({**entry, "interval": None}, 3)["interval"] is None
    )
    assert scaled(no_data("none"), 3) == no_data("none")


def test_quantiles_of_resampled_documents_are_those_of_their_pooled_values():
    rng = np.random.default_rng(3)
    groups, clusters = [rng.random(size).tolist() for size in (7, 3, 12, 5)], ["a", "b", "a", "c"]
    found = quantile_measures(groups, [0.5, 0.99], clusters, 20)
    drawn = []
    for names in np.random.default_rng(0).integers(3, size=(20, 3)):
        pooled = [
            value for name in names for own, group in zip(clusters, groups) if own == "abc"[name] for value in group
        ]
        drawn.append(np.quantile(pooled, [0.5, 0.99], method="inverted_cdf"))
    for entry, values in zip(found, np.transpose(drawn), strict=True):
        assert entry["interval"] == pytest.approx(np.quantile(values, [0.025, 0.975]))
    own = np.quantile(np.concatenate(groups), [0.5, 0.99], method="inverted_cdf")
    assert [entry["value"] for entry in found] == pytest.approx(own)
    for seed in range(50):  # few documents
        groups = [np.random.default_rng((seed, index)).exponential(size=20).tolist() for index in range(4)]
        (entry,) = quantile_measures(groups, [0.95], ["a", "b", "c", "d"], 200)
        assert entry["interval"][0] <= entry["value"] <= entry["interval"][1]
    assert quantile_measures(groups, [0.5], ["a"] * 4, 20)[0]["interval"] is None
