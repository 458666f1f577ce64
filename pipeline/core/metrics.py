"""Every ratio of the product, derived in one place from raw counts, with its unit and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Metric:
    """What a number means. `higher_is_better` None: for reading, neither direction is better."""

    unit: str
    higher_is_better: bool | None
    meaning: str


METRICS = {
    "token_acceptance_trimmed_head": Metric(
        "share", True, "positions where the draft, as our decoder runs it, agrees with the target (teacher-forced)"
    ),
    "token_acceptance_full_head": Metric(
        "share", True, "the same with the draft's whole head: sum min(p, q), as vLLM verifies sampled drafts"
    ),
    "token_acceptance_greedy_draft": Metric(
        "share", True, "whole head, p of the draft's best token: vLLM's default, and llama.cpp"
    ),
    "token_acceptance_exact_match": Metric(
        "share",
        True,
        "whole head, sum p q: draft and target sample on their own and must agree, as in MLX",
    ),
    "token_acceptance_without_loops": Metric("share", True, "trimmed head, answers that repeat themselves left out"),
    "acceptance_rate": Metric("share", True, "accepted / drafted tokens at the stated k"),
    "mean_acceptance_length": Metric("tokens per round", True, "emitted / rounds, bonus token included"),
    "acceptance_by_position": Metric("share per position", True, "rounds in which position i was accepted"),
    "speedup": Metric("ratio", True, "plain seconds / speculative seconds, same engine, prompts and lengths"),
    "tokens_per_second": Metric("tokens/s", True, "decoded with this candidate, prefill included"),
    "plain_tokens_per_second": Metric("tokens/s", True, "decoded plainly on the same prompts, prefill included"),
    "target_passes_saved": Metric(
        "share", True, "of the target's passes (reads of all its weights) that plain decoding makes"
    ),
    "latency_seconds": Metric("s", False, "whole request, mean"),
    "plain_latency_seconds": Metric("s", False, "whole request decoded plainly, mean"),
    "plain_ttft_seconds": Metric("s", False, "time to the first token of plain decoding, mean"),
    "plain_itl_p50_seconds": Metric("s", False, "gap between tokens of plain decoding, median"),
    "plain_itl_p95_seconds": Metric("s", False, "gap between tokens of plain decoding, 95th percentile"),
    "plain_itl_p99_seconds": Metric("s", False, "gap between tokens of plain decoding, 99th percentile"),
    "plain_itl_jitter_seconds": Metric("s", None, "standard deviation of the gaps of plain decoding, for reading only"),
    "ttft_seconds": Metric("s", False, "time to the first token, mean"),
    "ttft_ratio": Metric("ratio", False, "time to the first token / that of plain decoding"),
    "itl_p50_seconds": Metric("s", False, "gap between tokens as delivered, median"),
    "itl_p95_seconds": Metric("s", False, "gap between tokens as delivered, 95th percentile: about a round's time"),
    "itl_p99_seconds": Metric("s", False, "gap between tokens as delivered, 99th percentile"),
    "itl_jitter_seconds": Metric(
        "s", None, "standard deviation of the gaps, for reading only: rounds deliver in bursts"
    ),
    "smoothness": Metric(
        "ratio", False, "99th percentile of the wait for any 10 consecutive tokens / that of plain decoding"
    ),
    "memory_efficiency": Metric(
        "passes per token and GiB", True, "target passes saved / extra memory of draft and its cache"
    ),
    "draft_share": Metric("share", False, "draft's weights and cache / those of target and draft"),
    "peak_bytes": Metric("bytes", False, "most memory that the evaluation took, all candidates and checks together"),
    "token_acceptance_difference": Metric("share", True, "token acceptance minus the champion's, paired by prompt"),
    "acceptance_rate_difference": Metric("share", True, "acceptance rate minus the champion's, paired by prompt"),
    "speedup_ratio": Metric("ratio", True, "the champion's seconds / this draft's, paired by prompt"),
    "cost_ratio": Metric("ratio", False, "c: one draft step / one plain step of the target"),
    "verify_cost": Metric("ratio", False, "v(k): a target pass over k + 1 tokens / over one"),
    "predicted_speedup": Metric("ratio", True, "what costs and acceptance predict for decoding, prefills left out"),
    "lossless": Metric("share", True, "decoded answers whose speculative tokens equal the plain ones in float32"),
}
# What side tables show of a candidate that decoded.
SERVED_BRIEFLY = (
    "acceptance_rate", "mean_acceptance_length", "speedup", "tokens_per_second", "plain_tokens_per_second",
)  # fmt: skip
WAITS = ("ttft_seconds", "ttft_ratio", "itl_p95_seconds", "smoothness", "latency_seconds")


def measure(
    value: float | list[float] | None,
    interval: Sequence[float] | list[list[float]] | None = None,
    count: int = 0,
    reason: str | None = None,
) -> dict[str, Any]:
    """The form every number has in metrics.json: value, 95 % interval, number of prompts, reason when there is none; with a
    value for each of several positions there is a list of intervals."""
    return {"value": value, "interval": list(interval) if interval else None, "count": count, "reason": reason}


def no_data(reason: str) -> dict[str, Any]:
    return measure(None, reason=reason)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Sum over sum; None when the denominator is 0."""
    total = float(np.sum(denominators))
    return float(np.sum(numerators)) / total if total > 0 else None


def ratio_measure(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[str], samples: int, seed: int = 0
) -> dict[str, Any]:
    """Sum over sum with a percentile bootstrap 95 % interval; prompts of one source document are drawn together.

    One entry per prompt in each sequence; `samples` bootstrap resamples.
    """
    value = ratio(numerators, denominators)
    if value is None:
        return no_data("no prompts" if not len(denominators) else "nothing was counted")
    drawn = _resampled([numerators, denominators], clusters, samples, seed)
    return measure(value, interval_of(drawn[0] / drawn[1]) if drawn is not None else None, len(denominators))


def scaled(entry: dict[str, Any], factor: float) -> dict[str, Any]:
    """A measure times `factor`, and the ends of its interval with it."""
    if entry["value"] is None:
        return entry
    interval = entry["interval"] and sorted(end * factor for end in entry["interval"])
    return {**entry, "value": entry["value"] * factor, "interval": interval}


def quantile_measures(
    groups: Sequence[Sequence[float]], quantiles: Sequence[float], clusters: Sequence[str], samples: int
) -> list[dict[str, Any]]:
    """Of each quantile of the pooled values of `groups`, of which there is one per prompt and at least one value."""
    values = _quantiles(groups, quantiles)
    drawn = _resampled_quantiles(groups, quantiles, clusters, samples)
    ends = [None] * len(values) if drawn is None else map(interval_of, drawn)
    return [measure(float(value), interval, len(groups)) for value, interval in zip(values, ends, strict=True)]


def quantile_ratio_measure(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    quantile: float,
    clusters: Sequence[str],
    samples: int,
) -> dict[str, Any]:
    """A quantile of the pooled values of `ours` / that of `theirs`, paired by prompt; each has at least one value."""
    value, other = (_quantiles(groups, [quantile])[0] for groups in (ours, theirs))
    drawn = [_resampled_quantiles(groups, [quantile], clusters, samples) for groups in (ours, theirs)]
    interval = None if drawn[0] is None else interval_of(drawn[0] / drawn[1])
    return measure(float(value / other), interval, len(ours))


def deviation_measure(groups: Sequence[Sequence[float]], clusters: Sequence[str], samples: int) -> dict[str, Any]:
    """Standard deviation of the pooled values of `groups`, of which there is one per prompt and at least one value."""
    every = np.concatenate(groups)
    centred = [np.asarray(group, dtype=float) - every.mean() for group in groups]  # so that squares keep their digits
    counts = [len(group) for group in centred]
    sums = [group.sum() for group in centred], [np.square(group).sum() for group in centred]
    drawn = _resampled([sums[0], counts, sums[1], counts], clusters, samples, seed=0)
    interval = None
    if drawn is not None:
        variance = drawn[2] / drawn[3] - (drawn[0] / drawn[1]) ** 2
        interval = interval_of(np.sqrt(np.clip(variance, 0, None)))
    return measure(float(np.std(every)), interval, len(groups))


def _quantiles(groups: Sequence[Sequence[float]], quantiles: Sequence[float]) -> np.ndarray:
    """Of the pooled values, each one of them, as `_resampled_quantiles` takes it: an interpolated one could lie outside its
    own interval."""
    return np.quantile(np.concatenate(groups), quantiles, method="inverted_cdf")


def _resampled_quantiles(
    groups: Sequence[Sequence[float]],
    quantiles: Sequence[float],
    clusters: Sequence[str],
    samples: int,
    seed: int = 0,
) -> np.ndarray | None:
    """Quantiles of the pooled values of `groups` (one per prompt) over clusters drawn with replacement, [quantiles, samples];
    None where there is but one cluster. The same clusters, samples and seed give the same draws."""
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(names), size=(samples, len(names)))
    values = np.concatenate([np.asarray(group, dtype=float) for group in groups])
    owners = np.repeat(index, [len(group) for group in groups])
    order = np.argsort(values)
    values, owners = values[order], owners[order]
    found = np.full((len(quantiles), samples), np.nan)
    for row, names_drawn in enumerate(drawn):
        total = np.bincount(names_drawn, minlength=len(names))[owners].cumsum()
        if total[-1] > 0:
            found[:, row] = values[np.searchsorted(total, np.asarray(quantiles) * total[-1])]
    return found


def interval_of(values: np.ndarray) -> tuple[float, float] | None:
    """The middle 95 % of resampled values; None where none is a number."""
    values = values[np.isfinite(values)]
    return (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))) if len(values) else None


def difference_measure(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    clusters: Sequence[str],
    samples: int,
    seed: int = 0,
) -> dict[str, Any]:
    """(sum over sum of `first`) - (that of `second`), paired by prompt, with a bootstrap interval as `ratio_measure`.

    Each is (numerators, denominators) with one entry per prompt, the same prompts in the same order in both.
    """
    values = [ratio(*pair) for pair in (first, second)]
    if None in values:
        return no_data("no prompts in common" if not len(clusters) else "nothing was counted")
    drawn = _resampled([*first, *second], clusters, samples, seed)
    interval = None if drawn is None else interval_of(drawn[0] / drawn[1] - drawn[2] / drawn[3])
    return measure(values[0] - values[1], interval, len(clusters))


def _resampled(parts: Sequence[Sequence[float]], clusters: Sequence[str], samples: int, seed: int) -> np.ndarray | None:
    """Sums of each of `parts` over clusters drawn with replacement, [parts, samples]; None where there is but one cluster.

    The last of each two parts is a denominator; draws in which one is 0 are left out.
    """
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(names), size=(samples, len(names)))
    sums = [np.bincount(index, weights=np.asarray(part, dtype=float))[drawn].sum(axis=1) for part in parts]
    return np.stack(sums)[:, np.all(np.stack(sums[1::2]) > 0, axis=0)]


def acceptance_by_position(sequences: Sequence[Sequence[tuple[int, int]]], draft_length: int) -> list[float] | None:
    """Share of rounds in which position i was accepted, unconditional, for i = 1 .. k.

    `sequences`: (accepted, drafted) of each round of each sequence. A last round that is short was cut by the end of its
    sequence and is left out; elsewhere a drafter that proposed fewer tokens missed the positions after them.
    """
    hits, rounds = _by_position(sequences, draft_length)
    return [ratio(own, rounds) for own in hits] if sum(rounds) else None


def acceptance_by_position_measure(
    sequences: Sequence[Sequence[tuple[int, int]]], draft_length: int, clusters: Sequence[str], samples: int
) -> dict[str, Any]:
    """`acceptance_by_position` as a measure: a value per position, and an interval per position."""
    hits, rounds = _by_position(sequences, draft_length)
    entries = [ratio_measure(own, rounds, clusters, samples) for own in hits]
    if not sum(rounds):
        return no_data("no round was whole")
    intervals = [entry["interval"] for entry in entries]
    return measure([entry["value"] for entry in entries], None if None in intervals else intervals, len(sequences))


def _by_position(
    sequences: Sequence[Sequence[tuple[int, int]]], draft_length: int
) -> tuple[list[list[int]], list[int]]:
    """Of each sequence the rounds in which position i was accepted, [draft_length][sequences], and all that count."""
    runs = [
        np.array(
            [
                accepted
                for index, (accepted, drafted) in enumerate(rounds)
                if drafted == draft_length or index < len(rounds) - 1
            ]
        )
        for rounds in sequences
    ]
    hits = [[int((own >= position).sum()) for own in runs] for position in range(1, draft_length + 1)]
    return hits, [len(own) for own in runs]


def expected_acceptance_by_position(overlaps: Sequence[Sequence[float]], draft_length: int) -> list[float] | None:
    """Share of rounds in which drafted position i is accepted, unconditional, for i = 1 .. k, as teacher-forced agreement
    predicts it; None where no answer has a round.

    `overlaps`: sum(min(p, q)) at every position of each answer; 0 or 1 greedily. Hard stretches of a text begin more
    rounds than easy ones, so the first is usually lower than the mean overlap. An answer's first token comes from the
    prefill; positions after its end count in no round.
    """
    rounds, accepted = np.zeros(draft_length), np.zeros(draft_length)
    for overlap in overlaps:
        begins = np.zeros(len(overlap) + draft_length + 2)
        begins[1] = 1.0
        for start in range(1, len(overlap)):
            kept = float(begins[start])
            for index, position in enumerate(range(start, start + draft_length)):
                inside = position < len(overlap)
                share = float(overlap[position]) if inside else 0.0
                rounds[index] += begins[start] if inside else 0.0
                begins[position + 1] += kept * (1 - share)
                kept *= share
                accepted[index] += kept
            begins[start + draft_length + 1] += kept
    counted = [(share, total) for share, total in zip(accepted, rounds) if total > 0]
    shares = [float(share / total) for share, total in counted]
    return [*shares, *[0.0] * (draft_length - len(shares))] if shares else None


def aggregate(rows: Sequence[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    """Rows grouped by `key`, and all of them under "all"."""
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {**dict(sorted(groups.items())), "all": list(rows)}
