"""The evaluation as a whole: which prompts are decoded by whom, what is derived from it, and what is worth a warning."""

from __future__ import annotations

import copy
import dataclasses
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from pipeline.core import cost_model
from pipeline.core.answers import Answer
from pipeline.core.conditions import (
    CONTEXT_TOKENS,
    Conditions,
    agreement,
    costs_of_candidates,
    dev_acceptance,
    engine_of,
    expected_acceptances,
    pick,
    predictions,
    suited_lengths,
    versus_champion,
)
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.decoding import DecodeConfig
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import (
    Agreement,
    Request,
    Timed,
    agreement_metrics,
    judge_departures,
    lossless_measure,
    served_metrics,
    time_candidates,
)
from pipeline.core.evaluation_settings import (
    CHAMPION,
    DISTILLED,
    LOOKUP,
    UNDISTILLED,
    Contestants,
    DecodeSettings,
    EvaluateConfig,
    check_draft_lengths,
)
from pipeline.core.experts import experts_touched
from pipeline.core.memory import memory
from pipeline.core.metrics import aggregate, expected_acceptance_by_position, no_data, ratio
from pipeline.core.models import max_positions
from pipeline.core.packing import decoding_view
from pipeline.core.sampling import Sampling

HEADLINE_COST_REPEATS = 9
EXPERT_TEXTS = 16  # golden prompts with answers over which the experts of a mixture are counted
GAP_WORTH_A_WARNING = 0.1
PROMPT_LENGTHS = ((1024, "under 1k"), (4096, "1k to 4k"), (16_384, "4k to 16k"), (1 << 62, "above 16k"))  # tokens


@dataclass
class Outcome:
    """`metrics` for metrics.json, `requests` for the raw tables."""

    metrics: dict[str, Any]
    requests: list[Request]


def evaluate(
    models: Contestants,
    dev: list[Answer],
    golden: list[Answer],
    decode: DecodeSettings,
    config: EvaluateConfig,
    seed: int,
) -> Outcome:
    """Measure the distilled draft beside all other candidates on golden prompts, in one engine and one run, each at the
    draft length that suits it."""
    check_draft_lengths(decode, config)
    models = _fitting(models, [*dev, *golden], config)
    agreements = _agreements(models, golden, config, decode.sampling)
    own_dev = [answer for answer in dev if answer.domain == models.domain]
    conditions = _tuned(models, dev, pick(own_dev, config.dev_prompts), decode, config, seed)
    settings, lengths, costs = conditions.settings, conditions.draft_lengths, conditions.costs
    timed, roster = _roster(models, golden, config)
    engine = engine_of(conditions.models, settings, config, lengths)
    requests, plain = time_candidates(
        engine, timed, lambda answer: roster[answer.prompt_id], seed, "evaluate golden", config.repeats
    )
    candidates, by_task, by_length = (
        _candidates(requests, agreements, lengths, costs, config, group_of)
        for group_of in (lambda row: row.domain, lambda row: f"{row.domain}, {row.task}", _prompt_length)
    )
    gap = _served_gap(models.domain, timed, candidates[DISTILLED], agreements[DISTILLED], settings.draft_length, config)
    dev_agreement = agreement_metrics(
        agreement(models, DISTILLED, own_dev, decode.sampling, config) if own_dev else [], config.bootstrap_samples
    )
    chosen_on = "configuration" if decode.draft_length else "dev" if conditions.expected[DISTILLED] else "costs"
    metrics = {
        "domain": models.domain,
        "settings": _settings(models, decode, settings, chosen_on),
        "draft_lengths": lengths,
        "cost_ratios": {name: own.cost_ratio for name, own in costs.items()},
        "candidates": candidates,
        "skipped": models.skipped,
        "by_task": by_task,
        "by_prompt_length": by_length,
        **_side_tables(conditions, dev, golden, candidates),
        "versus_champion": versus_champion(requests, agreements, lengths, config.bootstrap_samples),
        "dev": dev_agreement,
        "lossless": _as_far_as_it_fits(lambda: _lossless(models, timed, requests, plain, settings, config, seed)),
        "reference": _reference(models.target, timed[: config.reference_prompts], plain, settings),
        "costs": costs[DISTILLED].document(),
        "memory": memory(models, timed, config.max_new_tokens, lengths, candidates),
        "served_gap": gap,
        "warnings": _warnings(gap, models.domain, dev_agreement, candidates[DISTILLED].get(models.domain, {})),
        "machine": machine(),
    }
    return Outcome(metrics, [*engine.plain_requests(timed, plain), *requests, *conditions.requests])


def _tuned(
    models: Contestants,
    dev: list[Answer],
    tuned: list[Answer],
    decode: DecodeSettings,
    config: EvaluateConfig,
    seed: int,
) -> Conditions:
    """Costs and expected acceptance of every candidate, and the k that suits it by both: chosen on the dev answers `tuned`,
    unless it is configured."""
    packed = dataclasses.replace(models, target=decoding_view(models.target))
    lengths, sampling = check_draft_lengths(decode, config), decode.sampling
    costs = costs_of_candidates(
        packed, [LOOKUP, *models.drafts], _costs(packed, dev, lengths, sampling), config, sampling
    )
    settings = DecodeConfig(
        draft_length=max(lengths),
        max_new_tokens=config.max_new_tokens,
        allowed_token_ids=models.vocabulary,
        **vars(sampling),
    )
    by_position, requests = dev_acceptance(packed, tuned, settings, seed)
    expected = expected_acceptances(packed, [] if decode.draft_length else tuned, by_position, settings, config)
    chosen = suited_lengths(packed, expected, costs, decode, config)
    settings = dataclasses.replace(settings, draft_length=chosen[DISTILLED])
    return Conditions(packed, expected, costs, chosen, decode, settings, config, seed, requests)


def _side_tables(
    conditions: Conditions, dev: list[Answer], golden: list[Answer], candidates: dict[str, dict[str, dict]]
) -> dict[str, Any]:
    """The rows by k, batch size and temperature: the target domain's, and with config.condition_prompts_other those of
    every other domain."""
    config, domain = conditions.config, conditions.models.domain
    others = sorted({answer.domain for answer in golden} - {domain}) if config.condition_prompts_other else []
    dev_of, golden_of = (
        {name: [answer for answer in answers if answer.domain == name] for name in (domain, *others)}
        for answers in (dev, golden)
    )

    def chosen(answers: dict[str, list[Answer]], count: int) -> dict[str, list[Answer]]:
        elsewhere = config.condition_prompts_other if count else 0
        return {name: pick(found, count if name == domain else elsewhere) for name, found in answers.items()}

    swept, warmed = chosen(dev_of, config.sweep_prompts), chosen(golden_of, config.temperature_prompts)
    by_batch = conditions.by_batch(chosen(golden_of, config.batch_prompts), candidates)
    tables = {
        name: {
            "by_draft_length": conditions.by_draft_length(swept[name], conditions.expected_in(name, dev_of[name])),
            "by_batch": by_batch[name],
            "by_temperature": conditions.by_temperature(warmed[name]),
        }
        for name in dev_of
    }
    return {**tables.pop(domain), "other_domains": tables}


def _settings(models: Contestants, decode: DecodeSettings, used: DecodeConfig, chosen_on: str) -> dict[str, Any]:
    """How was decoded, for metrics.json."""
    return {
        **vars(decode),
        "draft_length": used.draft_length,
        "draft_length_chosen_on": chosen_on,
        "max_new_tokens": used.max_new_tokens,
        "head_tokens": len(models.drafts[DISTILLED].token_ids),
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "device": models.target.device.type,
    }


def _costs(models: Contestants, dev: list[Answer], lengths: list[int], sampling: Sampling) -> cost_model.Costs:
    """Times of a draft step and of target passes, and the experts that those touch on dev answers."""
    draft = models.drafter()
    costs = measure_costs(models.target, draft, lengths, CONTEXT_TOKENS, HEADLINE_COST_REPEATS, sampling=sampling)
    texts = [answer.prompt_ids.tolist() + answer.answer_ids.tolist() for answer in dev[:EXPERT_TEXTS]]
    costs.experts_touched = experts_touched(models.target, texts, [k + 1 for k in (0, *lengths)])
    return costs


def _fitting(models: Contestants, answers: list[Answer], config: EvaluateConfig) -> Contestants:
    """Refuse, before anything is measured, lengths that cannot be decoded; siblings and a champion with too short a context
    are skipped."""
    prompt = max(len(answer.prompt_ids) for answer in answers)
    new = max(config.max_new_tokens, config.lossless_new_tokens)
    needed = max(prompt + new, *(len(answer.prompt_ids) + len(answer.answer_ids) for answer in answers))
    drafts, skipped = dict(models.drafts), dict(models.skipped)
    for name, model in {"target": models.target, **{name: draft.model for name, draft in drafts.items()}}.items():
        limit = max_positions(model.config)
        if name in drafts and name not in (DISTILLED, UNDISTILLED) and limit and needed > limit:
            del drafts[name]
            skipped[name] = f"it has {limit} positions, prompts and answers take up to {needed}"
        elif limit and prompt + new > limit:
            raise PipelineError(
                f"Prompts of up to {prompt} tokens and {new} new ones exceed the {limit} positions of the {name} model.",
                "lower evaluate.max_new_tokens and evaluate.lossless_new_tokens.",
            )
    return dataclasses.replace(models, drafts=drafts, skipped=skipped)


def _agreements(
    models: Contestants, golden: list[Answer], config: EvaluateConfig, sampling: Sampling
) -> dict[str, list[Agreement]]:
    """Teacher-forced agreement of every candidate on all golden answers."""
    return {name: agreement(models, name, golden, sampling, config) for name in (LOOKUP, *models.drafts)}


def _roster(
    models: Contestants, golden: list[Answer], config: EvaluateConfig
) -> tuple[list[Answer], dict[str, list[str]]]:
    """The golden prompts that are decoded, and by which candidates each."""
    always = [name for name in models.drafts if name in (DISTILLED, CHAMPION)]
    everyone = [LOOKUP, *models.drafts]
    elsewhere = config.timed_prompts_other if config.baselines_everywhere else 0
    timed: list[Answer] = []
    roster: dict[str, list[str]] = {}
    for name, answers in aggregate(golden, lambda answer: answer.domain).items():
        if name == "all":
            continue
        own = name == models.domain
        chosen = pick(answers, config.timed_prompts if own else config.timed_prompts_other)
        for index, answer in enumerate(chosen):
            roster[answer.prompt_id] = everyone if index < (config.baseline_prompts if own else elsewhere) else always
        timed = chosen + timed if own else timed + chosen
    return timed, roster


def _prompt_length(row: Request | Agreement) -> str:
    return next(name for limit, name in PROMPT_LENGTHS if row.prompt_tokens < limit)


def _candidates(
    requests: list[Request],
    agreements: dict[str, list[Agreement]],
    draft_lengths: dict[str, int],
    costs: dict[str, cost_model.Costs],
    config: EvaluateConfig,
    group_of: Callable[[Request | Agreement], str],
) -> dict[str, dict[str, dict]]:
    """candidate -> group (and "all") -> metric -> measure; predicted_speedup -> formula -> number."""
    result: dict[str, dict[str, dict]] = {}
    for name, found in agreements.items():
        served = aggregate([request for request in requests if request.candidate == name], group_of)
        result[name] = {
            group: {
                **agreement_metrics(rows, config.bootstrap_samples),
                **served_metrics(served.get(group, []), draft_lengths[name], config.bootstrap_samples),
            }
            for group, rows in aggregate(found, group_of).items()
        }
        for measures in result[name].values():
            measures["predicted_speedup"] = predictions(measures, draft_lengths[name], costs[name])
    return result


def _as_far_as_it_fits(lossless: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `_lossless`, or why there is none: what was measured before is not lost."""
    try:
        return lossless()
    except torch.OutOfMemoryError:
        return {**no_data("float32 copies of the models do not fit into memory beside them"), "departures": []}


def _lossless(
    models: Contestants,
    timed: list[Answer],
    requests: list[Request],
    plain: list[Timed],
    settings: DecodeConfig,
    config: EvaluateConfig,
    seed: int,
) -> dict[str, Any]:
    """Token by token against plain decoding, greedily and in float32.

    Greedy float32 runs are compared as they were timed. Otherwise a subset is decoded again in float32 (a quantised
    target with the values that its weights stand for), and departures of greedy runs are judged by their float32 gap: one
    that is no near tie makes the result 0.
    """
    greedy = settings.sampling.greedy
    quantised = getattr(models.target, "is_quantized", False)
    if greedy and models.target.dtype == torch.float32 and not quantised:
        return lossless_measure(requests)
    distilled = models.drafts[DISTILLED]
    whole = copy.deepcopy(models.target)
    if quantised:
        whole = whole.dequantize(dtype=torch.float32)
    precise = dataclasses.replace(
        models,
        target=decoding_view(whole.float()),
        drafts={DISTILLED: dataclasses.replace(distilled, model=copy.deepcopy(distilled.model).float())},
    )
    subset = dataclasses.replace(
        settings, max_new_tokens=config.lossless_new_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
    )
    engine = engine_of(precise, subset, config, {DISTILLED: subset.draft_length})
    checked, _ = time_candidates(
        engine, timed[: config.lossless_prompts], lambda _: [DISTILLED], seed, "lossless in float32"
    )
    result = lossless_measure(checked)
    if greedy:
        prompts = {answer.prompt_id: answer.prompt_ids.tolist() for answer in timed}
        plain_tokens = {answer.prompt_id: run.sequence.token_ids for answer, run in zip(timed, plain, strict=True)}
        judged = judge_departures(precise.target, requests, prompts, plain_tokens, config.near_tie_gap)
        result["half_precision_departures"] = judged
        result["near_tie_gap"] = config.near_tie_gap
        if not all(departure["legal"] for departure in judged):
            result["value"] = 0.0
    return result


def _reference(
    target: PreTrainedModel, answers: list[Answer], plain: list[Timed], settings: DecodeConfig
) -> dict[str, float | None]:
    """transformers' own plain decoding beside ours, tokens per second on the same prompts and lengths."""
    if not answers:
        return {"transformers_plain_tokens_per_second": None, "our_plain_tokens_per_second": None}

    def decode_one(answer: Answer) -> float:
        prompt = torch.tensor(answer.prompt_ids[None].astype("int64"), device=target.device)
        length = {"min_new_tokens": settings.max_new_tokens, "max_new_tokens": settings.max_new_tokens}
        started = time.perf_counter()
        target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)
        return time.perf_counter() - started

    decode_one(answers[0])  # a warm-up, as our decoder had
    tokens = [settings.max_new_tokens] * len(answers)
    return {
        "transformers_plain_tokens_per_second": ratio(tokens, list(map(decode_one, answers))),
        "our_plain_tokens_per_second": ratio(tokens, [run.seconds for run in plain[: len(answers)]]),
    }


def _served_gap(
    domain: str,
    timed: list[Answer],
    distilled: dict[str, dict],
    agreements: list[Agreement],
    draft_length: int,
    config: EvaluateConfig,
) -> dict[str, float | None]:
    decoded = {answer.prompt_id for answer in timed if answer.domain == domain}
    agreed = [row for row in agreements if row.prompt_id in decoded]
    return served_gap(distilled, domain, agreed, draft_length, config.max_new_tokens)


def served_gap(
    distilled: dict[str, dict], domain: str, agreements: list[Agreement], draft_length: int, tokens: int
) -> dict[str, float | None]:
    """How often the decoder accepted the first drafted token on the target domain, beside what teacher-forced agreement
    on the same prompts' golden answers predicts; `tokens` of each were decoded."""
    expected = expected_acceptance_by_position([row.overlaps[:tokens] for row in agreements], draft_length)
    served = distilled.get(domain, {}).get("acceptance_by_position", {}).get("value")
    predicted, measured = (by_position[0] if by_position else None for by_position in (expected, served))
    gap = None if predicted is None or measured is None else measured - predicted
    return {"predicted_first_drafted_token": predicted, "first_drafted_token": measured, "gap": gap}


def _warnings(served: dict[str, float | None], domain: str, dev: dict[str, dict], golden: dict[str, dict]) -> list[str]:
    """Teacher-forced and served acceptance should tell the same story, and so should dev and golden."""
    warnings = []
    if served["gap"] is not None and abs(served["gap"]) > GAP_WORTH_A_WARNING:
        warnings.append(
            f"served acceptance of the first drafted token on {domain} is {served['first_drafted_token']:.2f}, the golden"
            f" answers predict {served['predicted_first_drafted_token']:.2f}: check that answers, template and sampling are"
            " those of production"
        )
    name = "token_acceptance_trimmed_head"
    tuned, held_out = (found.get(name, {}).get("value") for found in (dev, golden))
    if tuned is not None and held_out is not None and abs(tuned - held_out) > GAP_WORTH_A_WARNING:
        warnings.append(
            f"token acceptance on {domain} is {tuned:.2f} on dev and {held_out:.2f} on golden prompts: too few prompts, or the"
            " two are of different documents"
        )
    return warnings


def summarise(metrics: dict[str, Any]) -> dict[str, float | str | None]:
    """The headline figures, flat, for `dvc metrics`."""
    summary: dict[str, float | str | None] = {
        "target": metrics["target"]["name"],
        "domain": metrics["domain"],
        "draft_length": metrics["settings"]["draft_length"],
        "cost_ratio": metrics["costs"]["cost_ratio"],
        "lossless": metrics["lossless"]["value"],
        **metrics["reference"],
    }
    for domain, found in metrics["candidates"][DISTILLED].items():
        for name in ("token_acceptance_trimmed_head", "token_acceptance_full_head", "acceptance_rate", "speedup"):
            summary[f"{name}_{domain}"] = found.get(name, {}).get("value")
    domain = metrics["domain"]
    interval = metrics["candidates"][DISTILLED].get(domain, {}).get("speedup", {}).get("interval")
    summary[f"speedup_lower_{domain}"] = interval and interval[0]
    for name, by_domain in metrics["candidates"].items():
        found = by_domain.get(domain, {})
        for metric in ("token_acceptance_trimmed_head", "speedup") if name != DISTILLED else ():
            summary[f"{name}_{metric}_{domain}"] = found.get(metric, {}).get("value")
    return summary


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor_name() -> str:
    """The CPU's name as Linux gives it, with the widest vector instructions that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
