"""The distilled draft under other conditions than the headline's (draft length, batch size, temperature, against the
champion): each a list of rows or a table for metrics.json."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from tqdm import tqdm

from pipeline.core import cost_model
from pipeline.core.answers import Answer
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.evaluation import (
    Agreement,
    Engine,
    Request,
    Timed,
    agreement_metrics,
    lookup_agreement,
    paired_request,
    served_metrics,
    teacher_forced,
    time_candidates,
    time_one,
    time_together,
)
from pipeline.core.evaluation_settings import (
    CHAMPION,
    DISTILLED,
    LOOKUP,
    PLAIN,
    Contestants,
    DecodeSettings,
    EvaluateConfig,
)
from pipeline.core.metrics import (
    SERVED_BRIEFLY,
    UNDER_LOAD,
    acceptance_by_position,
    aggregate,
    difference_measure,
    expected_acceptance_by_position,
    no_data,
    ratio_measure,
)

CONTEXT_TOKENS, COST_REPEATS = 128, 3
LOTS_OF_AN_INTERVAL = 5  # resampling fewer says little about what another lot would give


def pick(answers: list[Answer], count: int) -> list[Answer]:
    """The first `count` answers in the order of a hash of their ids: fixed, and blind to what they contain."""
    return sorted(answers, key=lambda answer: hashlib.sha256(answer.prompt_id.encode()).digest())[:count]


def dev_acceptance(models: Contestants, dev: list[Answer], settings: DecodeConfig, seed: int) -> list[float] | None:
    """Acceptance by position of `settings.draft_length` drafted tokens on `dev`; None if there is nothing to count."""
    decoder = Decoder(models.target, models.drafter(), settings)
    sequences = []
    for answer in tqdm(dev, desc="acceptance on dev", unit=" prompts"):
        rounds = time_one(decoder, answer.prompt_ids.tolist(), seed).sequence.rounds
        sequences.append([(block.accepted, block.drafted) for block in rounds])
    return acceptance_by_position(sequences, settings.draft_length)


def costs_of_candidates(
    models: Contestants, costs: cost_model.Costs, config: EvaluateConfig
) -> dict[str, cost_model.Costs]:
    """The costs of every candidate: the target's of `costs`, which are the distilled draft's, with a step of its own.

    Copying from the text takes no pass of a model. A candidate that is served at a k which `costs` lack adds its pass.
    """
    found = {LOOKUP: dataclasses.replace(costs, draft_step_seconds=0.0), DISTILLED: costs}
    for name in models.drafts:
        if name != DISTILLED:
            lengths = sorted({max(config.draft_lengths), _served_length(models, name, config) or 1})
            own = measure_costs(models.target, models.drafter(name), lengths, CONTEXT_TOKENS, COST_REPEATS)
            passes = own.target_pass_seconds | costs.target_pass_seconds
            found[name] = dataclasses.replace(
                costs, draft_step_seconds=own.draft_step_seconds, target_pass_seconds=passes
            )
    return found


def _served_length(models: Contestants, name: str, config: EvaluateConfig) -> int | None:
    """The k that a candidate is served with already, as far as there are tokens to decode."""
    served = models.drafts[name].draft_length if name in models.drafts else None
    return served and min(served, config.max_new_tokens)


def own_draft_lengths(
    models: Contestants,
    dev: list[Answer],
    settings: DecodeConfig,
    costs: dict[str, cost_model.Costs],
    decode: DecodeSettings,
    config: EvaluateConfig,
) -> dict[str, int]:
    """The k of every candidate of `costs`, so that each is shown at its best.

    The distilled draft has that of `settings`, and the champion the one that it is served with. The others have the
    configured one, or the best by their own costs and what their teacher-forced agreement on `dev` predicts.
    """
    chosen = {}
    for name, own in costs.items():
        served = settings.draft_length if name == DISTILLED else _served_length(models, name, config)
        if served or decode.draft_length or not dev:
            chosen[name] = served or settings.draft_length
        else:
            expected = _expected_acceptance(models, name, dev, settings, config)
            chosen[name] = cost_model.best_draft_length(expected or [0.0], config.draft_lengths, own)
    return chosen


def _expected_acceptance(
    models: Contestants, name: str, dev: list[Answer], settings: DecodeConfig, config: EvaluateConfig
) -> list[float] | None:
    """Predicted acceptance by position of a candidate that was not decoded."""
    if name == LOOKUP:
        agreed = lookup_agreement(dev, config.lookup_ngram, settings.sampling)
    else:
        common = (dev, models.vocabulary, settings.sampling, config.tokens_per_forward)
        agreed = teacher_forced(models.drafter(name), models.target, *common)
    return expected_acceptance_by_position([row.overlaps for row in agreed], max(config.draft_lengths))


def by_draft_length(
    models: Contestants,
    dev: list[Answer],
    by_position: list[float] | None,
    costs: cost_model.Costs,
    settings: DecodeConfig,
    config: EvaluateConfig,
    seed: int,
) -> list[dict[str, Any]]:
    """One row per k on dev: what measured costs and acceptance predict, and with config.sweep_prompts what was timed."""
    if not by_position:
        return []
    rows = []
    prompts = pick(dev, config.sweep_prompts)
    for k in sorted(k for k in costs.target_pass_seconds if k):
        tokens = cost_model.tokens_per_round(by_position, k)
        row = {
            "draft_length": k,
            "expected_acceptance_rate": (tokens - 1) / k,
            "predicted_speedup": cost_model.measured_cost_speedup(tokens, k, costs),
        }
        found = _timed(models, prompts, dataclasses.replace(settings, draft_length=k), config, seed, f"k = {k} on dev")
        rows.append({**row, **found})
    return rows


def by_temperature(
    models: Contestants, golden: list[Answer], settings: DecodeConfig, config: EvaluateConfig, seed: int
) -> list[dict[str, Any]]:
    """One row per temperature of config.temperatures but the serving one, on golden prompts at the draft length of `settings`."""
    rows = []
    prompts = pick(golden, config.temperature_prompts)
    for temperature in config.temperatures if prompts else ():
        if temperature == settings.temperature:
            continue
        other = dataclasses.replace(settings, temperature=temperature)
        common = (prompts, models.vocabulary, other.sampling, config.tokens_per_forward)
        agreed = agreement_metrics(teacher_forced(models.drafter(), models.target, *common), config.bootstrap_samples)
        found = _timed(models, prompts, other, config, seed, f"temperature {temperature:g}")
        row = {"temperature": temperature, "draft_length": settings.draft_length}
        rows.append({**row, **agreed, **found})
    return rows


def _timed(
    models: Contestants, prompts: list[Answer], settings: DecodeConfig, config: EvaluateConfig, seed: int, title: str
) -> dict[str, dict]:
    """The served metrics of the distilled draft on `prompts`."""
    if not prompts:
        return dict.fromkeys(SERVED_BRIEFLY, no_data("not timed"))
    engine = Engine(models.target, settings)
    engine.add(PLAIN, None)
    engine.add(DISTILLED, models.drafter())
    requests, _ = time_candidates(engine, prompts, lambda _: [DISTILLED], seed, title, config.repeats)
    return served_metrics(requests, settings.draft_length, config.bootstrap_samples)


def by_batch(
    models: Contestants,
    golden: list[Answer],
    by_position: list[float] | None,
    decode: DecodeSettings,
    settings: DecodeConfig,
    config: EvaluateConfig,
    seed: int,
) -> list[dict[str, Any]]:
    """One row per batch size: prompts decoded in lots of so many, plainly and with the draft; all tokens over all seconds.

    The draft length is the configured one, or what measured costs at that size and the acceptance on dev suggest. A lot
    ends when its last prompt does, so that slots run empty towards its end, as they do in a service without refill.
    Prompts of one source document share a lot as far as they can, since intervals are of lots drawn anew.
    """
    rows = []
    prompts = sorted(pick(golden, config.batch_prompts), key=lambda answer: answer.cluster)
    for size in config.batch_sizes:
        lots = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        lengths = [decode.draft_length] if decode.draft_length else config.draft_lengths
        if not lots or not (decode.draft_length or by_position):
            few = f"{len(prompts)} prompts make no lot of {size}: raise evaluate.batch_prompts"
            nothing = no_data("no acceptance on dev to choose k by" if lots else few)
            rows.append(
                {
                    "batch": size,
                    "draft_length": None,
                    "predicted_speedup": None,
                    **dict.fromkeys(UNDER_LOAD, nothing),
                }
            )
            continue
        costs = measure_costs(models.target, models.drafter(), lengths, CONTEXT_TOKENS, COST_REPEATS, rows=size)
        k = lengths[0] if decode.draft_length else cost_model.best_draft_length(by_position, lengths, costs)
        tokens = cost_model.tokens_per_round(by_position, k) if by_position else None
        predicted = tokens and cost_model.measured_cost_speedup(tokens, k, costs)
        row = {"batch": size, "draft_length": k, "predicted_speedup": predicted}
        at_size = dataclasses.replace(settings, draft_length=k)
        rows.append({**row, **_lots_timed(models, lots, at_size, config, seed)})
    return rows


@dataclasses.dataclass
class _Lot:
    """Prompts decoded together."""

    runs: list[Timed]
    target_passes: int  # each over all rows, or one prompt's prefill

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self.runs)


def _lots_timed(
    models: Contestants, lots: list[list[Answer]], settings: DecodeConfig, config: EvaluateConfig, seed: int
) -> dict[str, dict]:
    """The lots decoded by both in turns that begin with one and the other; each counts with its run of median time.

    A lot's throughput is of all its tokens; acceptance and the waits are of its requests, each beside its plain run.
    """
    size = len(lots[0])
    decoders = {
        PLAIN: Decoder(models.target, None, settings, slots=size),
        DISTILLED: Decoder(models.target, models.drafter(), settings, slots=size),
    }
    for decoder in decoders.values():
        _decode_lot(decoder, lots[0], seed)
    requests: list[Request] = []
    counted: dict[str, list[_Lot]] = {name: [] for name in decoders}
    for index, lot in enumerate(tqdm(lots, desc=f"batch size {size}", unit=" lots")):
        runs: dict[str, list[_Lot]] = {name: [] for name in decoders}
        for turn in range(index, index + config.repeats):
            for name in (PLAIN, DISTILLED) if turn % 2 == 0 else (DISTILLED, PLAIN):
                runs[name].append(_decode_lot(decoders[name], lot, seed))
        for name, timed in runs.items():
            counted[name].append(sorted(timed, key=lambda run: run.seconds)[config.repeats // 2])
        pairs = zip(lot, counted[DISTILLED][-1].runs, counted[PLAIN][-1].runs, strict=True)
        for answer, ours, plain in pairs:
            request = paired_request(DISTILLED, answer, ours, plain)
            requests.append(dataclasses.replace(request, cluster=str(index)))
    names = [str(index) for index in range(len(lots))]
    tokens, samples = [size * settings.max_new_tokens] * len(lots), config.bootstrap_samples
    seconds = {name: [lot.seconds for lot in timed] for name, timed in counted.items()}
    passes = {name: [lot.target_passes for lot in timed] for name, timed in counted.items()}
    saved = [plain - ours for plain, ours in zip(passes[PLAIN], passes[DISTILLED], strict=True)]
    found = {
        **served_metrics(requests, settings.draft_length, samples),
        "speedup": ratio_measure(seconds[PLAIN], seconds[DISTILLED], names, samples),
        "tokens_per_second": ratio_measure(tokens, seconds[DISTILLED], names, samples),
        "plain_tokens_per_second": ratio_measure(tokens, seconds[PLAIN], names, samples),
        "target_passes_saved": ratio_measure(saved, passes[PLAIN], names, samples),
    }
    interval = {} if len(lots) >= LOTS_OF_AN_INTERVAL else {"interval": None}
    return {name: {**entry, **interval, "count": len(requests)} for name, entry in found.items()}


def _decode_lot(decoder: Decoder, lot: list[Answer], seed: int) -> _Lot:
    before = decoder.stats.target_passes
    runs = time_together(decoder, [answer.prompt_ids.tolist() for answer in lot], seed)
    return _Lot(runs, decoder.stats.target_passes - before)


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
    ours, theirs = (sorted(rows, key=lambda row: row.prompt_id) for rows in (ours, theirs))
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
