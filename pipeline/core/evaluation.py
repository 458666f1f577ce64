"""Measuring drafters against plain decoding, in one engine and one run, paired by prompt."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.core.answers import Answer, is_looping
from pipeline.core.batches import AnswerBatches, answer_logits
from pipeline.core.decoding import DecodeConfig, Decoder, GeneratedSequence
from pipeline.core.drafters import Drafter, ModelDrafter, PromptLookupDrafter, head_size
from pipeline.core.evaluation_settings import PLAIN
from pipeline.core.generation import prompt_seed
from pipeline.core.metrics import (
    acceptance_by_position_measure,
    deviation_measure,
    measure,
    no_data,
    quantile_measures,
    quantile_ratio_measure,
    ratio,
    ratio_measure,
)
from pipeline.core.models import max_positions
from pipeline.core.sampling import Sampling, probabilities

GAP_QUANTILES = {"itl_p50_seconds": 0.50, "itl_p95_seconds": 0.95, "itl_p99_seconds": 0.99}
JITTER = "itl_jitter_seconds"
SMOOTHNESS_TOKENS, SMOOTHNESS_QUANTILE = 10, 0.99
HEADLINE = "headline"  # condition of requests that the headline figures are of
NO_HEAD = "this candidate has no output head"
GREEDY_ONLY = "its copies are scored on greedy answers only"
TOO_SHORT = f"no answer has more than {SMOOTHNESS_TOKENS} tokens"


@dataclass
class Request:
    """One prompt decoded once: what a service would log, plus the plain run it is paired with."""

    candidate: str
    condition: str  # what it was decoded for: `HEADLINE`, or what else was varied
    batch: int  # requests decoded together
    lot: int  # with `batch` > 1: those of a candidate, batch and domain that have the same number were decoded together
    target_passes: int  # of the lot
    draft_length: int  # k; 0 plainly
    temperature: float
    prompt_id: str
    domain: str
    task: str
    cluster: str
    prompt_tokens: int
    token_ids: list[int]
    seconds: float
    plain_seconds: float | None  # None: no plain run is beside it
    ttft_seconds: float
    plain_ttft_seconds: float | None
    gaps_seconds: list[float]
    plain_gaps_seconds: list[float] | None
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    first_departure: int | None  # index of the first token that differs from plain decoding


@dataclass
class Timed:
    """A sequence with its start, for the times that a user feels."""

    sequence: GeneratedSequence
    seconds: float
    ttft_seconds: float

    @property
    def gaps_seconds(self) -> list[float]:
        return np.diff(self.sequence.timestamps).tolist()


def time_one(decoder: Decoder, prompt: list[int], seed: int) -> Timed:
    """Decode one prompt alone."""
    return _time_together(decoder, [(prompt, seed)])[0]


def time_lot(decoder: Decoder, answers: list[Answer], seed: int) -> list[Timed]:
    """Decode the prompts of `answers` together; the times of each count from when they all come."""
    return _time_together(decoder, [(a.prompt_ids.tolist(), prompt_seed(seed, a.prompt_id)) for a in answers])


def _time_together(decoder: Decoder, prompts: list[tuple[list[int], int]]) -> list[Timed]:
    started = time.perf_counter()
    numbers = [decoder.submit(prompt, seed) for prompt, seed in prompts]
    finished: dict[int, GeneratedSequence] = {}
    while decoder.busy:
        finished |= {event.request: event.finished for event in decoder.step() if event.finished}
    times = {number: finished[number].timestamps for number in numbers}
    return [Timed(finished[n], stamps[-1] - started, stamps[0] - started) for n, stamps in times.items()]


@dataclass
class Engine:
    """Plain decoding and any number of candidates over the same target weights, each with `slots` requests together."""

    target: PreTrainedModel
    config: DecodeConfig
    slots: int = 1
    condition: str = HEADLINE  # of its requests
    decoders: dict[str, Decoder] = field(default_factory=dict)

    def add(self, name: str, drafter: PreTrainedModel | Drafter | None, draft_length: int | None = None) -> None:
        """Without a `draft_length` of its own a candidate drafts as many tokens as `config` says."""
        config = dataclasses.replace(self.config, draft_length=draft_length or self.config.draft_length)
        self.decoders[name] = Decoder(self.target, drafter, config, slots=self.slots)

    def request(
        self, name: str, answer: Answer, run: Timed, plain: Timed | None, lot: int, target_passes: int | None = None
    ) -> Request:
        """The run of the decoder `name`, beside the plain run of the same prompt if there is one; `target_passes` of its lot,
        if it was not decoded alone."""
        pairs = zip(run.sequence.token_ids, plain.sequence.token_ids, strict=False) if plain else ()
        departure = next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        rounds = run.sequence.rounds
        return Request(
            candidate=name,
            condition=self.condition,
            batch=self.slots,
            lot=lot,
            target_passes=target_passes or 1 + len(rounds),
            draft_length=0 if name == PLAIN else self.decoders[name].config.draft_length,
            temperature=self.config.temperature,
            prompt_id=answer.prompt_id,
            domain=answer.domain,
            task=answer.task,
            cluster=answer.cluster,
            prompt_tokens=len(answer.prompt_ids),
            token_ids=run.sequence.token_ids,
            seconds=run.seconds,
            plain_seconds=plain and plain.seconds,
            ttft_seconds=run.ttft_seconds,
            plain_ttft_seconds=plain and plain.ttft_seconds,
            gaps_seconds=run.gaps_seconds,
            plain_gaps_seconds=plain and plain.gaps_seconds,
            drafted=[block.drafted for block in rounds],
            accepted=[block.accepted for block in rounds],
            emitted=[block.emitted for block in rounds],
            first_departure=departure,
        )

    def plain_requests(self, answers: list[Answer], runs: list[Timed]) -> list[Request]:
        """The plain runs of `answers` as requests of their own."""
        pairs = enumerate(zip(answers, runs, strict=True))
        return [self.request(PLAIN, answer, run, run, lot) for lot, (answer, run) in pairs]


def time_candidates(
    engine: Engine,
    answers: list[Answer],
    candidates_of: Callable[[Answer], list[str]],
    seed: int,
    description: str,
    repeats: int = 1,
) -> tuple[list[Request], list[Timed]]:
    """Decode each prompt plainly and with its candidates in turn, `repeats` times, each turn beginning with another one; a
    prompt counts with its run of median time. The longest prompt, decoded first by all, is a warm-up.

    `candidates_of` names the decoders of `engine` that take part in a prompt. Returns the requests and the plain runs.
    """
    requests, plain_runs = [], []
    warm_up = max(answers, key=lambda answer: len(answer.prompt_ids))
    for decoder in engine.decoders.values():
        time_lot(decoder, [warm_up], seed)
    total = sum(1 + len(candidates_of(answer)) for answer in answers) * repeats * engine.config.max_new_tokens
    with tqdm(total=total, desc=description, unit=" tokens", unit_scale=True, mininterval=2) as progress:
        for index, answer in enumerate(answers):
            names = [PLAIN, *candidates_of(answer)]
            runs: dict[str, list[Timed]] = {name: [] for name in names}
            for turn in range(index, index + repeats):
                for place in range(len(names)):
                    name = names[(turn + place) % len(names)]
                    runs[name] += time_lot(engine.decoders[name], [answer], seed)
                    progress.update(len(runs[name][-1].sequence.token_ids))
            median = {name: sorted(timed, key=lambda run: run.seconds)[repeats // 2] for name, timed in runs.items()}
            plain_runs.append(median[PLAIN])
            requests += [engine.request(name, answer, median[name], median[PLAIN], index) for name in names[1:]]
    return requests, plain_runs


def served_metrics(requests: list[Request], draft_length: int, samples: int) -> dict[str, dict]:
    """Acceptance, speed and waiting times of one candidate on one group of prompts."""
    if not requests:
        return {}
    clusters = [request.cluster for request in requests]
    drafted = [sum(request.drafted) for request in requests]
    accepted = [sum(request.accepted) for request in requests]
    emitted = [sum(request.emitted) for request in requests]
    seconds = [request.seconds for request in requests]
    plain = [request.plain_seconds for request in requests]
    tokens = [len(request.token_ids) for request in requests]
    blocks = [list(zip(request.accepted, request.drafted, strict=True)) for request in requests]
    count = len(requests)
    rounds = [len(request.drafted) for request in requests]
    saved = [all_tokens - own - 1 for all_tokens, own in zip(tokens, rounds, strict=True)]
    return {
        "acceptance_rate": {**ratio_measure(accepted, drafted, clusters, samples), "draft_length": draft_length},
        "mean_acceptance_length": ratio_measure(emitted, rounds, clusters, samples),
        "acceptance_by_position": acceptance_by_position_measure(blocks, draft_length, clusters, samples),
        "speedup": ratio_measure(plain, seconds, clusters, samples),
        "tokens_per_second": ratio_measure(tokens, seconds, clusters, samples),
        "plain_tokens_per_second": ratio_measure(tokens, plain, clusters, samples),
        "target_passes_saved": ratio_measure(saved, tokens, clusters, samples),
        "latency_seconds": ratio_measure(seconds, [1] * count, clusters, samples),
        "plain_latency_seconds": ratio_measure(plain, [1] * count, clusters, samples),
        **waiting_metrics(requests, samples),
    }


def waiting_metrics(requests: list[Request], samples: int) -> dict[str, dict]:
    """What a user waits for, with the draft and (plain_) without: the first token, and the gaps between tokens as they are
    delivered, a round's at once."""
    clusters, count = [request.cluster for request in requests], len(requests)
    ours, plain = ([getattr(r, name) for r in requests] for name in ("ttft_seconds", "plain_ttft_seconds"))
    found = {
        "ttft_seconds": ratio_measure(ours, [1] * count, clusters, samples),
        "plain_ttft_seconds": ratio_measure(plain, [1] * count, clusters, samples),
        "ttft_ratio": ratio_measure(ours, plain, clusters, samples),
        **_gap_metrics([request.gaps_seconds for request in requests], clusters, samples, ""),
        **_gap_metrics([request.plain_gaps_seconds for request in requests], clusters, samples, "plain_"),
    }
    found["smoothness"] = _smoothness(requests, samples)
    return found


def _gap_metrics(gaps: list[list[float]], clusters: list[str], samples: int, prefix: str) -> dict[str, dict]:
    if not any(gaps):
        return {f"{prefix}{name}": no_data("one token each") for name in (*GAP_QUANTILES, JITTER)}
    found = quantile_measures(gaps, list(GAP_QUANTILES.values()), clusters, samples)
    named = {f"{prefix}{name}": entry for name, entry in zip(GAP_QUANTILES, found, strict=True)}
    return {**named, f"{prefix}{JITTER}": deviation_measure(gaps, clusters, samples)}


def _smoothness(requests: list[Request], samples: int) -> dict:
    clusters = [request.cluster for request in requests]
    both = [[_waits(getattr(r, name)) for r in requests] for name in ("gaps_seconds", "plain_gaps_seconds")]
    if not all(any(len(waits) for waits in groups) for groups in both):
        return no_data(TOO_SHORT)
    return quantile_ratio_measure(*both, SMOOTHNESS_QUANTILE, clusters, samples)


def _waits(gaps: list[float]) -> np.ndarray:
    """Seconds: the wait for each `SMOOTHNESS_TOKENS` consecutive tokens of a request; none where it has fewer."""
    if len(gaps) < SMOOTHNESS_TOKENS:
        return np.empty(0)
    return np.convolve(gaps, np.ones(SMOOTHNESS_TOKENS), mode="valid")


@dataclass
class Agreement:
    """Teacher-forced agreement of one candidate with the target on one golden answer (sums over its tokens)."""

    prompt_id: str
    domain: str
    task: str
    cluster: str
    prompt_tokens: int
    looping: bool
    tokens: int
    trimmed_head: float | None
    full_head: float | None
    full_head_best: float | None  # p of the full head's most probable token
    full_head_same: float | None  # sum p q of the full head: the chance that two independent draws are the same token
    overlaps: list[float]  # trimmed head, at each position


def teacher_forced(
    drafter: ModelDrafter,
    target: PreTrainedModel | None,
    answers: list[Answer],
    vocabulary: range,
    sampling: Sampling,
    tokens_per_forward: int,
) -> list[Agreement]:
    """Token acceptance per answer: sum(min(p, q)) over positions, greedily the positions where both argmax agree.

    `trimmed_head` is the draft as `drafter` runs it, `full_head` the model as it is stored. Greedily the stored top of
    the target decides; above temperature 0 the target scores the same prefixes. Where `target` is None its stored
    probabilities do (`stored_logits`).
    """
    drafter.open(1, sampling, vocabulary)
    whole = torch.arange(min(len(vocabulary), head_size(drafter.model)), device=drafter.model.device)
    heads = {"trimmed_head": (drafter.cached.model, drafter.support), "full_head": (drafter.model, whole)}
    batches = AnswerBatches(
        answers, drafter.support.tolist(), tokens_per_forward, seed=0, max_positions=max_positions(drafter.model.config)
    )
    found = []
    with torch.inference_mode():
        for index in range(len(batches)):
            batch = {name: tensor.to(drafter.model.device) for name, tensor in batches[index].items()}
            p = None
            if not sampling.greedy:
                whole_target = target is not None
                logits = answer_logits(target, batch, None) if whole_target else stored_logits(batch, len(vocabulary))
                p = probabilities(logits[:, : len(vocabulary)], sampling)
            values = {"trimmed_head": _overlaps(*heads["trimmed_head"], p, batch, sampling)[0]}
            full = _overlaps(*heads["full_head"], p, batch, sampling)
            values |= dict(zip(("full_head", "full_head_best", "full_head_same"), full, strict=True))
            start = 0
            for answer in batches.groups[index]:
                stop = start + len(answer.answer_ids)
                sums = {name: each[start:stop].sum().item() for name, each in values.items()}
                overlaps = values["trimmed_head"][start:stop].tolist()
                found.append(Agreement(**_facts(answer), **sums, overlaps=overlaps))
                start = stop
    return found


def stored_logits(batch: dict[str, Tensor], width: int) -> Tensor:
    """The target's log-probabilities as far as they are stored, [n, width]: an estimate in which all ids that are not
    stored share the rest of the probability evenly."""
    top = batch["top_logprobs"].float()
    rest = (1 - top.exp().sum(dim=-1, keepdim=True)).clamp_min(torch.finfo(top.dtype).tiny)
    even = (rest / max(1, width - top.shape[1])).log()
    return even.expand(-1, width).scatter(-1, batch["top_ids"], top)


def _facts(answer: Answer) -> dict:
    return {
        "prompt_id": answer.prompt_id,
        "domain": answer.domain,
        "task": answer.task,
        "cluster": answer.cluster,
        "prompt_tokens": len(answer.prompt_ids),
        "looping": is_looping(answer.answer_ids),
        "tokens": len(answer.answer_ids),
    }


def _overlaps(
    draft: PreTrainedModel, support: Tensor, p: Tensor | None, batch: dict[str, Tensor], sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """sum min(p, q), p(argmax q) and sum p q at each answer position, [n] each; greedily (`p` None) all three are whether
    both have the same best token. `support` names the token of each of the draft's first logits."""
    logits = answer_logits(draft, batch, None)[:, : len(support)]
    if p is None:
        same = (support[logits.argmax(dim=-1)] == batch["target"]).double()
        return same, same, same
    p, q = p[:, support], probabilities(logits, sampling)
    best = p.gather(-1, q.argmax(dim=-1, keepdim=True)).squeeze(-1)
    return torch.minimum(p, q).sum(dim=-1).double(), best.double(), (p * q).sum(dim=-1).double()


def lookup_agreement(answers: list[Answer], max_ngram: int, sampling: Sampling) -> list[Agreement]:
    """Share of answer positions whose token prompt lookup would have copied; positions without a match count as missed.

    The answers are greedy ones: above temperature 0 their hits are no acceptance, and only `overlaps` has them.
    """
    drafter = PromptLookupDrafter(max_ngram)
    drafter.open(1, Sampling(), range(1 << 31))
    found = []
    for answer in answers:
        prompt, tokens = answer.prompt_ids.tolist(), answer.answer_ids.tolist()
        drafter.begin(0, [prompt], 0)
        hits = [float(drafter.copied(0, prompt + tokens[:index], 1) == [token]) for index, token in enumerate(tokens)]
        none = dict.fromkeys(("full_head", "full_head_best", "full_head_same"))
        agreed = sum(hits) if sampling.greedy else None
        found.append(Agreement(**_facts(answer), trimmed_head=agreed, **none, overlaps=hits))
    return found


def agreement_metrics(agreements: list[Agreement], samples: int) -> dict[str, dict]:
    """The token acceptances of one candidate on one group of golden answers: as our decoder runs it, as others would."""

    def over(rows: list[Agreement], head: str) -> dict:
        values = [getattr(row, head) for row in rows]
        if any(value is None for value in values):
            return no_data(NO_HEAD if head != "trimmed_head" else GREEDY_ONLY)
        return ratio_measure(values, [row.tokens for row in rows], [row.cluster for row in rows], samples)

    straight = [row for row in agreements if not row.looping]
    return {
        "token_acceptance_trimmed_head": over(agreements, "trimmed_head"),
        "token_acceptance_full_head": over(agreements, "full_head"),
        "token_acceptance_greedy_draft": over(agreements, "full_head_best"),
        "token_acceptance_exact_match": over(agreements, "full_head_same"),
        "token_acceptance_without_loops": over(straight, "trimmed_head") if straight else no_data("every answer loops"),
    }


def lossless_measure(requests: list[Request]) -> dict:
    """Share of prompts whose speculative tokens equal the plain ones, with the first departure of each that differs."""
    if not requests:
        return {**no_data("nothing was compared"), "departures": []}
    departed = [request for request in requests if request.first_departure is not None]
    departures = [
        {"prompt_id": r.prompt_id, "candidate": r.candidate, "token_index": r.first_departure} for r in departed
    ]
    share = ratio([request.first_departure is None for request in requests], [1] * len(requests))
    return {**measure(share, count=len(requests)), "departures": departures}


@torch.inference_mode()
def near_tie_gap(target_float32: PreTrainedModel, prefix: list[int], tokens: tuple[int, int]) -> float:
    """How far the float32 logits of `tokens` after `prefix` lie below the best one: of the two, the one farther off.

    Small only where both share in a near tie for the best token, whichever way rounding lets it fall.
    """
    logits = target_float32(torch.tensor([prefix], device=target_float32.device), use_cache=False).logits[0, -1]
    return (logits.max() - logits[list(tokens)].min()).item()


def judge_departures(
    target_float32: PreTrainedModel,
    requests: list[Request],
    prompts: dict[str, list[int]],
    plain_tokens: dict[str, list[int]],
    largest_gap: float,
) -> list[dict]:
    """First departures of half-precision runs from plain ones; legal where float32 sees both tokens tie for the best."""
    judged = []
    for request in requests:
        if request.first_departure is None:
            continue
        index = request.first_departure
        plain = plain_tokens[request.prompt_id]
        pair = (request.token_ids[index], plain[index])
        gap = near_tie_gap(target_float32, prompts[request.prompt_id] + plain[:index], pair)
        judged.append(
            {
                "prompt_id": request.prompt_id,
                "candidate": request.candidate,
                "token_index": index,
                "float32_gap": gap,
                "legal": gap <= largest_gap,
            }
        )
    return judged
