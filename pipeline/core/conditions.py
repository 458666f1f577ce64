"""Candidates under other conditions than the headline's (draft length, batch size, temperature, against the champion):
each a list of rows or a table for metrics.json."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from pipeline.core import cost_model
from pipeline.core.answers import Answer
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import PromptLookupDrafter
from pipeline.core.evaluation import (
    HEADLINE,
    Agreement,
    Engine,
    Request,
    Timed,
    agreement_metrics,
    lookup_agreement,
    served_metrics,
    teacher_forced,
    time_candidates,
    time_lot,
)
from pipeline.core.evaluation_settings import (
    CHAMPION,
    DISTILLED,
    LOOKUP,
    PLAIN,
    Contestants,
    DecodeSettings,
    EvaluateConfig,
    check_draft_lengths,
)
from pipeline.core.metrics import (
    METRICS,
    SERVED_BRIEFLY,
    WAITS,
    acceptance_by_position,
    aggregate,
    difference_measure,
    expected_acceptance_by_position,
    no_data,
    ratio_measure,
)
from pipeline.core.sampling import Sampling

CONTEXT_TOKENS, COST_REPEATS = 128, 3
LOTS_OF_AN_INTERVAL = 5  # resampling fewer says little about what another lot would give


def pick(answers: list[Answer], count: int) -> list[Answer]:
    """The first `count` answers in the order of a hash of their ids: fixed, and blind to what they contain."""
    return sorted(answers, key=lambda answer: hashlib.sha256(answer.prompt_id.encode()).digest())[:count]


def dev_acceptance(
    models: Contestants, dev: list[Answer], settings: DecodeConfig, seed: int
) -> tuple[list[float] | None, list[Request]]:
    """Acceptance by position of `settings.draft_length` drafted tokens on `dev`, None if there is nothing to count, and the
    requests that it was counted in, without plain ones beside them."""
    engine = Engine(models.target, settings, condition="dev")
    engine.add(DISTILLED, models.drafter())
    requests = []
    for lot, answer in enumerate(tqdm(dev, desc="acceptance on dev", unit=" prompts")):
        (run,) = time_lot(engine.decoders[DISTILLED], [answer], seed)
        requests.append(engine.request(DISTILLED, answer, run, None, lot))
    blocks = [list(zip(request.accepted, request.drafted, strict=True)) for request in requests]
    return acceptance_by_position(blocks, settings.draft_length), requests


def agreement(
    models: Contestants, name: str, answers: list[Answer], sampling: Sampling, config: EvaluateConfig
) -> list[Agreement]:
    """Teacher-forced agreement of a candidate on `answers`."""
    if name == LOOKUP:
        return lookup_agreement(answers, config.lookup_ngram, sampling)
    return teacher_forced(
        models.drafter(name), models.target, answers, models.vocabulary, sampling, config.tokens_per_forward
    )


def expected_acceptances(
    models: Contestants,
    dev: list[Answer],
    by_position: list[float] | None,
    settings: DecodeConfig,
    config: EvaluateConfig,
) -> dict[str, list[float] | None]:
    """Acceptance by position of every candidate: `by_position` for the distilled draft, which was decoded on dev; for the
    others what their teacher-forced agreement on `dev` predicts. None where there is nothing to count."""
    others = [name for name in (LOOKUP, *models.drafts) if name != DISTILLED] if dev else []
    return {
        DISTILLED: by_position,
        **{name: agreed_by_position(models, name, dev, settings, config) for name in others},
    }


def agreed_by_position(
    models: Contestants, name: str, dev: list[Answer], settings: DecodeConfig, config: EvaluateConfig
) -> list[float] | None:
    """Acceptance by position, up to `settings.draft_length`, that teacher-forced agreement on `dev` predicts."""
    found = agreement(models, name, dev, settings.sampling, config) if dev else []
    return expected_acceptance_by_position([row.overlaps for row in found], settings.draft_length)


def costs_of_candidates(
    models: Contestants,
    names: Sequence[str],
    costs: cost_model.Costs,
    config: EvaluateConfig,
    sampling: Sampling,
    rows: int = 1,
) -> dict[str, cost_model.Costs]:
    """The costs of the candidates `names`: the target's of `costs`, which are the distilled draft's, with a step of its own.

    Copying from the text takes no pass of a model. A candidate that is served at a k which `costs` lack adds its pass.
    """
    found = {}
    for name in names:
        own = dataclasses.replace(costs, draft_step_seconds=0.0) if name == LOOKUP else costs
        if name not in (LOOKUP, DISTILLED):
            lengths = sorted({max(config.draft_lengths), _served_length(models, name, config) or 1})
            measured = measure_costs(
                models.target, models.drafter(name), lengths, CONTEXT_TOKENS, COST_REPEATS, rows, sampling
            )
            passes = measured.target_pass_seconds | costs.target_pass_seconds
            own = dataclasses.replace(costs, draft_step_seconds=measured.draft_step_seconds, target_pass_seconds=passes)
        found[name] = own
    return found


def _served_length(models: Contestants, name: str, config: EvaluateConfig) -> int | None:
    """The k that a candidate is served with already, as far as there are tokens to decode."""
    served = models.drafts[name].draft_length if name in models.drafts else None
    return served and min(served, config.max_new_tokens)


def suited_lengths(
    models: Contestants,
    expected: dict[str, list[float] | None],
    costs: dict[str, cost_model.Costs],
    decode: DecodeSettings,
    config: EvaluateConfig,
) -> dict[str, int]:
    """The k of every candidate of `costs`, so that each is shown at its best: the one that it is served with already, the
    configured one, or the best by its costs and expected acceptance; where nothing is expected, the cheapest."""
    return {
        name: _served_length(models, name, config)
        or decode.draft_length
        or cost_model.best_draft_length(expected.get(name) or [], config.draft_lengths, own)
        for name, own in costs.items()
    }


def engine_of(
    models: Contestants,
    settings: DecodeConfig,
    config: EvaluateConfig,
    draft_lengths: dict[str, int],
    slots: int = 1,
    condition: str = HEADLINE,
) -> Engine:
    """Plain decoding and the candidates of `draft_lengths`, each at its own, over the same target."""
    engine = Engine(models.target, settings, slots, condition)
    engine.add(PLAIN, None)
    for name, k in draft_lengths.items():
        engine.add(name, PromptLookupDrafter(config.lookup_ngram) if name == LOOKUP else models.drafter(name), k)
    return engine


def predictions(metrics: dict[str, dict], draft_length: int, costs: cost_model.Costs) -> dict[str, float | None]:
    """The three predicted speedups, each under its name; None where what it needs was not measured."""
    names = ("mean_acceptance_length", "acceptance_rate", "token_acceptance_trimmed_head")
    length, rate, token_acceptance = (metrics.get(name, {}).get("value") for name in names)
    c = costs.cost_ratio
    return {
        "measured-cost": None if length is None else cost_model.measured_cost_speedup(length, draft_length, costs),
        "classic": None if token_acceptance is None else cost_model.classic_speedup(token_acceptance, draft_length, c),
        "simple": None if rate is None else cost_model.simple_speedup(rate, c),
    }


@dataclasses.dataclass
class Conditions:
    """What the rows of the side tables have in common, and all requests that were decoded for them.

    In a row the distilled draft's measures stand on the first level, with config.baselines_everywhere those of the other
    candidates in "others" by name.
    """

    models: Contestants
    expected: dict[str, list[float] | None]  # acceptance by position of every candidate
    costs: dict[str, cost_model.Costs]  # of every candidate at batch size 1
    draft_lengths: dict[str, int]  # k of every candidate at batch size 1
    decode: DecodeSettings
    settings: DecodeConfig
    config: EvaluateConfig
    seed: int
    requests: list[Request] = dataclasses.field(default_factory=list)  # those decoded plainly too
    measured: dict[tuple, dict[str, cost_model.Costs]] = dataclasses.field(default_factory=dict)  # see `_costs_at`

    @property
    def names(self) -> list[str]:
        """Those that are measured, the distilled draft first."""
        others = [name for name in self.draft_lengths if name != DISTILLED]
        return [DISTILLED, *(others if self.config.baselines_everywhere else [])]

    def expected_in(self, domain: str, dev: list[Answer]) -> list[float] | None:
        """The distilled draft's acceptance by position in a domain: decoded on dev prompts of the target domain, elsewhere
        what teacher-forced agreement on the answers `dev` predicts. None where there is nothing to count."""
        if domain == self.models.domain:
            return self.expected[DISTILLED]
        longest = dataclasses.replace(self.settings, draft_length=max(self.costs[DISTILLED].target_pass_seconds))
        return agreed_by_position(self.models, DISTILLED, dev, longest, self.config)

    def by_draft_length(self, prompts: list[Answer], by_position: list[float] | None) -> list[dict[str, Any]]:
        """One row per k on dev prompts: what measured costs and the acceptance `by_position` predict, and what was timed on
        `prompts`, which may be none."""
        costs = self.costs[DISTILLED]
        rows = []
        for k in sorted(k for k in costs.target_pass_seconds if k) if by_position else ():
            tokens = cost_model.tokens_per_round(by_position, k)
            row = {
                "draft_length": k,
                "expected_acceptance_rate": cost_model.acceptance_rate(by_position, k),
                "predicted_speedup": cost_model.measured_cost_speedup(tokens, k, costs),
            }
            found = self._timed(prompts, self.settings, dict.fromkeys(self.names, k), "draft_length", f"k = {k} on dev")
            rows.append({**_row(found), **row})
        return rows

    def by_temperature(self, prompts: list[Answer]) -> list[dict[str, Any]]:
        """One row per temperature of config.temperatures but the serving one, on golden prompts at the k of the headline."""
        rows = []
        lengths = {name: self.draft_lengths[name] for name in self.names}
        for temperature in self.config.temperatures if prompts else ():
            if temperature == self.settings.temperature:
                continue
            other = dataclasses.replace(self.settings, temperature=temperature)
            costs = self._costs_at(1, tuple(self.names), other.sampling)
            found = self._timed(prompts, other, lengths, "temperature", f"temperature {temperature:g}")
            for name, measures in found.items():
                measures |= agreement_metrics(
                    agreement(self.models, name, prompts, other.sampling, self.config), self.config.bootstrap_samples
                )
                measures["predicted_speedup"] = predictions(measures, lengths[name], costs[name])
            rows.append({"temperature": temperature, **_row(found)})
        return rows

    def _timed(
        self, prompts: list[Answer], settings: DecodeConfig, lengths: dict[str, int], condition: str, title: str
    ) -> dict[str, dict[str, Any]]:
        """The served metrics of each candidate of `lengths` on `prompts`, with its draft length."""
        if not prompts:
            return {DISTILLED: dict.fromkeys(SERVED_BRIEFLY, no_data("not timed"))}
        engine = engine_of(self.models, settings, self.config, lengths, condition=condition)
        requests, plain = time_candidates(
            engine, prompts, lambda _: list(lengths), self.seed, title, self.config.repeats
        )
        self.requests += [*engine.plain_requests(prompts, plain), *requests]
        return _by_candidate(requests, lengths, self.config.bootstrap_samples)

    def by_batch(
        self, golden: dict[str, list[Answer]], agreed: dict[str, dict[str, dict]]
    ) -> dict[str, list[dict[str, Any]]]:
        """domain -> one row per batch size: the prompts of that domain in `golden` decoded in lots of so many, plainly and
        with the draft; all tokens over all seconds.

        k suits the costs measured at that size, which the row keeps. A lot ends when its last prompt does, so that slots
        run empty towards its end, as they do in a service without refill. Prompts of one source document share a lot as
        far as they can, since intervals are of lots drawn anew. `agreed`: every candidate's metrics by domain.
        """
        rows: dict[str, list[dict[str, Any]]] = {domain: [] for domain in golden}
        for size in self.config.batch_sizes:
            for domain, answers in golden.items():
                known = {name: by_domain.get(domain, {}) for name, by_domain in agreed.items()}
                rows[domain].append({"batch": size, **self._at_batch(answers, size, domain, known)})
        return rows

    def _at_batch(self, answers: list[Answer], size: int, domain: str, agreed: dict[str, dict]) -> dict[str, Any]:
        """A row but for its size; where memory does not hold all candidates, those beside the distilled draft have none."""
        prompts = sorted(answers, key=lambda answer: answer.cluster)
        lots = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        setting = "batch_prompts" if domain == self.models.domain else "condition_prompts_other"
        reason = f"{len(prompts)} prompts make no lot of {size}: raise evaluate.{setting}"
        others: dict[str, Any] = {}
        for names in dict.fromkeys((tuple(self.names), (DISTILLED,))) if lots else ():
            try:
                row = self._under_load(lots, size, agreed, names)
                return {**row, "others": {**others, **row["others"]}}
            except torch.OutOfMemoryError:  # what was measured before is not lost
                reason = f"{size} requests together do not fit into memory"
                others |= {name: _no_row(f"{reason} with all candidates") for name in names if name != DISTILLED}
            torch.cuda.empty_cache()  # the exception holds its tensors no more
        return {**_no_row(reason), "others": others}

    def _under_load(
        self, lots: list[list[Answer]], size: int, agreed: dict[str, dict], names: tuple[str, ...]
    ) -> dict[str, Any]:
        """A row but for its size."""
        costs = self._costs_at(size, names, self.decode.sampling)
        chosen = suited_lengths(self.models, self.expected, costs, self.decode, self.config)
        found = self._lots_timed(lots, chosen)
        for name, measures in found.items():
            known = {**agreed[name], **measures}
            measures["predicted_speedup"] = predictions(known, chosen[name], costs[name])
            measures["costs"] = costs[name].document()
        return _row(found)

    def _costs_at(self, size: int, names: tuple[str, ...], sampling: Sampling) -> dict[str, cost_model.Costs]:
        """The costs of the candidates `names` with `size` requests together, drafted as `sampling` says; measured once."""
        key = (size, names, *vars(sampling).values())
        if key not in self.measured:
            models, config = self.models, self.config
            lengths = check_draft_lengths(self.decode, config)
            own = measure_costs(models.target, models.drafter(), lengths, CONTEXT_TOKENS, COST_REPEATS, size, sampling)
            self.measured[key] = costs_of_candidates(models, names, own, config, sampling, size)
        return self.measured[key]

    def _lots_timed(self, lots: list[list[Answer]], lengths: dict[str, int]) -> dict[str, dict[str, Any]]:
        """The metrics of each candidate of `lengths` on the lots.

        Its throughput is of all its tokens; acceptance and waits are of its requests, each beside its plain run. Intervals
        are over lots, since what the requests of a lot wait for is the lot's.
        """
        size, samples = len(lots[0]), self.config.bootstrap_samples
        engine = engine_of(self.models, self.settings, self.config, lengths, size, "batch")
        counted = self._counted(engine, lots)
        requests = [
            engine.request(name, answer, own, plain, index, timed[index].target_passes)
            for name, timed in counted.items()
            for index, lot in enumerate(lots)
            for answer, own, plain in zip(lot, timed[index].runs, counted[PLAIN][index].runs, strict=True)
        ]
        self.requests += requests
        by_lot = [dataclasses.replace(request, cluster=str(request.lot)) for request in requests]
        found = _by_candidate(by_lot, lengths, samples)
        for name, measures in found.items():
            measures |= _throughput(counted[PLAIN], counted[name], size * self.settings.max_new_tokens, samples)
            if len(lots) < LOTS_OF_AN_INTERVAL:
                measures |= {key: {**entry, "interval": None} for key, entry in measures.items() if key in METRICS}
        return found

    def _counted(self, engine: Engine, lots: list[list[Answer]]) -> dict[str, list[_Lot]]:
        """The lots decoded by all decoders of `engine` in turn, each turn beginning with another one; a lot counts with its
        run of median time."""
        decoders, repeats = engine.decoders, self.config.repeats
        for decoder in decoders.values():  # a warm-up
            _decode_lot(decoder, lots[0], self.seed)
        counted: dict[str, list[_Lot]] = {name: [] for name in decoders}
        names = list(decoders)
        for index, lot in enumerate(tqdm(lots, desc=f"batch size {engine.slots}", unit=" lots")):
            runs: dict[str, list[_Lot]] = {name: [] for name in names}
            for turn in range(index, index + repeats):
                for place in range(len(names)):
                    name = names[(turn + place) % len(names)]
                    runs[name].append(_decode_lot(decoders[name], lot, self.seed))
            for name, timed in runs.items():
                counted[name].append(sorted(timed, key=lambda run: run.seconds)[repeats // 2])
        return counted


def _no_row(reason: str) -> dict[str, Any]:
    """A row of a batch size without any measure."""
    nothing = {"draft_length": None, "predicted_speedup": None, "costs": None}
    return {**nothing, **dict.fromkeys((*SERVED_BRIEFLY, *WAITS), no_data(reason))}


def _row(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The distilled draft's measures, and those of the others by name."""
    return {**found[DISTILLED], "others": {name: own for name, own in found.items() if name != DISTILLED}}


def _by_candidate(requests: list[Request], lengths: dict[str, int], samples: int) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "draft_length": k,
            **served_metrics([request for request in requests if request.candidate == name], k, samples),
        }
        for name, k in lengths.items()
    }


@dataclasses.dataclass
class _Lot:
    """Prompts decoded together."""

    runs: list[Timed]
    target_passes: int  # each over all rows, or over the prompts of a prefill

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self.runs)


def _decode_lot(decoder: Decoder, lot: list[Answer], seed: int) -> _Lot:
    before = decoder.stats.target_passes
    runs = time_lot(decoder, lot, seed)
    return _Lot(runs, decoder.stats.target_passes - before)


def _throughput(plain: list[_Lot], ours: list[_Lot], tokens: int, samples: int) -> dict[str, dict]:
    """What is of lots as a whole, `tokens` in each."""
    names = [str(index) for index in range(len(plain))]
    seconds, before = ([lot.seconds for lot in lots] for lots in (ours, plain))
    passes, passes_before = ([lot.target_passes for lot in lots] for lots in (ours, plain))
    saved = [theirs - own for theirs, own in zip(passes_before, passes, strict=True)]
    every = [tokens] * len(plain)
    found = {
        "speedup": ratio_measure(before, seconds, names, samples),
        "tokens_per_second": ratio_measure(every, seconds, names, samples),
        "plain_tokens_per_second": ratio_measure(every, before, names, samples),
        "target_passes_saved": ratio_measure(saved, passes_before, names, samples),
    }
    return {name: {**entry, "count": len(plain) * len(plain[0].runs)} for name, entry in found.items()}


def versus_champion(
    requests: list[Request], agreements: dict[str, list[Agreement]], draft_lengths: dict[str, int], samples: int
) -> dict[str, dict[str, dict]] | None:
    """domain (and "all") -> the distilled draft against the champion, paired by prompt; None without a champion.

    token_acceptance_difference and acceptance_rate_difference are ours - theirs; speedup_ratio is their seconds / ours.
    Acceptance rates at different k say little and are not compared.
    """
    if CHAMPION not in agreements:
        return None
    same_k = draft_lengths[DISTILLED] == draft_lengths[CHAMPION]
    served = {name: [row for row in requests if row.candidate == name] for name in (DISTILLED, CHAMPION)}
    by_domain = {
        name: (aggregate(agreements[name], _domain), aggregate(served[name], _domain)) for name in (DISTILLED, CHAMPION)
    }
    ours, theirs = by_domain[DISTILLED], by_domain[CHAMPION]
    return {
        domain: {
            **_agreement_difference(ours[0][domain], theirs[0][domain], samples),
            **_served_difference(ours[1].get(domain, []), theirs[1].get(domain, []), same_k, samples),
        }
        for domain in ours[0]
    }


def _domain(row: Request | Agreement) -> str:
    return row.domain


def _agreement_difference(ours: list[Agreement], theirs: list[Agreement], samples: int) -> dict[str, dict]:
    both = {row.prompt_id for row in ours} & {row.prompt_id for row in theirs}  # contexts may differ in length
    ours, theirs = (
        sorted((row for row in rows if row.prompt_id in both), key=lambda row: row.prompt_id) for rows in (ours, theirs)
    )
    pairs = [([row.trimmed_head for row in rows], [row.tokens for row in rows]) for rows in (ours, theirs)]
    return {"token_acceptance_difference": difference_measure(*pairs, [row.cluster for row in ours], samples)}


def _served_difference(ours: list[Request], theirs: list[Request], same_k: bool, samples: int) -> dict[str, dict]:
    """Of requests of the same prompts in the same order."""
    clusters = [row.cluster for row in ours]
    pairs = [([sum(row.accepted) for row in rows], [sum(row.drafted) for row in rows]) for rows in (ours, theirs)]
    return {
        "acceptance_rate_difference": difference_measure(*pairs, clusters, samples)
        if same_k
        else no_data("they draft at different k"),
        "speedup_ratio": ratio_measure([r.seconds for r in theirs], [r.seconds for r in ours], clusters, samples),
    }
