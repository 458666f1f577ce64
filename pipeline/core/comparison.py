"""The evaluation as a whole: which prompts are decoded by whom, what is derived from it, and what is worth a warning."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.core import cost_model
from pipeline.core.answers import Answer
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import (
    Agreement,
    Engine,
    Request,
    Timed,
    agreement_metrics,
    judge_departures,
    lookup_agreement,
    lossless_measure,
    served_metrics,
    teacher_forced,
    time_candidates,
    time_one,
)
from pipeline.core.experts import experts_touched
from pipeline.core.metrics import acceptance_by_position, aggregate, expected_first_acceptance, no_data
from pipeline.core.models import max_positions
from pipeline.core.packing import decoding_view
from pipeline.core.sampling import Sampling

PLAIN, LOOKUP, UNDISTILLED, DISTILLED = "plain", "prompt_lookup", "undistilled", "distilled"
COST_CONTEXT_TOKENS, COST_REPEATS = 128, 9
EXPERT_TEXTS = 16  # golden prompts with answers over which the experts of a mixture are counted
SERVED_GAP_WORTH_A_WARNING = 0.1


@dataclass
class DecodeSettings(Sampling):
    """How the draft is served: the sampling, and the tokens drafted per round."""

    draft_length: int | None = None  # k; null: chosen on dev
    draft_half_weights: bool = False  # on a CPU, stream the draft's weights in half as many bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_length is not None and self.draft_length < 1:
            raise ValueError(f"decode.draft_length must be >= 1 or null, got {self.draft_length}")


@dataclass
class EvaluateConfig:
    """How much is measured."""

    max_new_tokens: int  # tokens decoded per timed prompt, EOS ignored
    timed_prompts: int  # golden prompts of the target domain, distilled draft against plain
    timed_prompts_other: int  # golden prompts of each other domain
    baseline_prompts: int  # of those of the target domain, for prompt lookup and the undistilled draft
    reference_prompts: int  # of those of the target domain, for transformers' own plain decoding
    dev_prompts: int  # dev prompts of the target domain, for the choice of the draft length
    draft_lengths: List[int]  # candidates for k
    lookup_ngram: int  # longest n-gram that prompt lookup matches
    lossless_prompts: int  # golden prompts decoded in float32 when the timed runs are not
    lossless_new_tokens: int  # tokens of each
    near_tie_gap: float  # half precision: largest float32 logit gap at which a departure from plain decoding is legal
    bootstrap_samples: int  # resamples behind a 95 % interval
    tokens_per_forward: int  # tokens of one teacher-forced pass

    def __post_init__(self) -> None:
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise ValueError(f"evaluate.draft_lengths must be numbers >= 1, got {self.draft_lengths}")
        for name, value in vars(self).items():
            least = 0 if name in ("timed_prompts_other", "baseline_prompts", "reference_prompts", "near_tie_gap") else 1
            if name != "draft_lengths" and not least <= value < float("inf"):
                raise ValueError(f"evaluate.{name} must be >= {least}, got {value}")


@dataclass
class Contestants:
    """The models of an evaluation, the ids that the target may emit, and the target domain.

    `head_token_ids` are the only ids that the drafts guess: those of the domain that both tokenizers share.
    """

    target: PreTrainedModel
    undistilled: PreTrainedModel
    distilled: PreTrainedModel
    head_token_ids: list[int]
    half_weights: bool  # on a CPU, the drafts' float32 weights are streamed in float16
    vocabulary: range
    domain: str

    def drafter(self, model: PreTrainedModel) -> ModelDrafter:
        """One of the drafts as it is served."""
        return ModelDrafter(model, self.head_token_ids, self.half_weights)


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
    """Measure the distilled draft beside prompt lookup and its undistilled self on golden prompts."""
    sampling = Sampling(decode.temperature, decode.top_k, decode.top_p, decode.min_p)
    lengths = sorted({*config.draft_lengths, *([decode.draft_length] if decode.draft_length else [])})
    _check_lengths(models, [*dev, *golden], max(lengths), config)
    agreements = _agreements(models, golden, config, sampling)
    packed = dataclasses.replace(models, target=decoding_view(models.target))
    costs = _costs(packed, dev, lengths)
    settings = DecodeConfig(
        draft_length=decode.draft_length or max(lengths),
        max_new_tokens=config.max_new_tokens,
        allowed_token_ids=models.vocabulary,
        **vars(sampling),
    )
    if decode.draft_length is None:
        chosen = _choose_draft_length(packed, dev, costs, settings, config, seed)
        settings = dataclasses.replace(settings, draft_length=chosen)
    timed, roster = _roster(models.domain, golden, config)
    engine = _engine(packed, settings, config, [LOOKUP, UNDISTILLED, DISTILLED])
    requests, plain = time_candidates(engine, timed, lambda answer: roster[answer.prompt_id], seed, "evaluate golden")
    candidates = _candidates(requests, agreements, settings.draft_length, costs, config)
    decoded = {answer.prompt_id for answer in timed if answer.domain == models.domain}
    agreed = [row for row in agreements[DISTILLED] if row.prompt_id in decoded]
    gap = served_gap(candidates[DISTILLED], models.domain, agreed, settings.draft_length, config.max_new_tokens)
    metrics = {
        "domain": models.domain,
        "settings": _settings(models, decode, settings),
        "candidates": candidates,
        "lossless": _lossless(models, timed, requests, plain, settings, config, seed),
        "reference": _reference(models.target, timed[: config.reference_prompts], plain, settings),
        "costs": costs.document(),
        "served_gap": gap,
        "warnings": _warnings(gap, models.domain),
        "machine": machine(),
    }
    return Outcome(metrics, requests)


def _settings(models: Contestants, decode: DecodeSettings, used: DecodeConfig) -> dict[str, Any]:
    """How was decoded, for metrics.json."""
    return {
        **vars(decode),
        "draft_length": used.draft_length,
        "draft_length_chosen_on": "configuration" if decode.draft_length else "dev",
        "max_new_tokens": used.max_new_tokens,
        "head_tokens": len(models.head_token_ids),
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "device": models.target.device.type,
    }


def _costs(models: Contestants, dev: list[Answer], lengths: list[int]) -> cost_model.Costs:
    """Times of a draft step and of target passes, and the experts that those touch on dev answers."""
    drafter = models.drafter(models.distilled)
    costs = measure_costs(models.target, drafter, lengths, COST_CONTEXT_TOKENS, COST_REPEATS)
    texts = [answer.prompt_ids.tolist() + answer.answer_ids.tolist() for answer in dev[:EXPERT_TEXTS]]
    costs.experts_touched = experts_touched(models.target, texts, [k + 1 for k in (0, *lengths)])
    return costs


def _check_lengths(models: Contestants, answers: list[Answer], draft_length: int, config: EvaluateConfig) -> None:
    """Refuse, before anything is measured, lengths that cannot be decoded."""
    if draft_length > config.max_new_tokens:
        raise PipelineError(
            f"A draft length of {draft_length} exceeds the {config.max_new_tokens} tokens decoded per prompt.",
            "lower decode.draft_length or evaluate.draft_lengths, or raise evaluate.max_new_tokens.",
        )
    prompt = max(len(answer.prompt_ids) for answer in answers)
    new = max(config.max_new_tokens, config.lossless_new_tokens)
    for name, model in (("target", models.target), ("draft", models.distilled)):
        limit = max_positions(model.config)
        if limit and prompt + new > limit:
            raise PipelineError(
                f"Prompts of up to {prompt} tokens and {new} new ones exceed the {name}'s {limit} positions.",
                "lower evaluate.max_new_tokens and evaluate.lossless_new_tokens.",
            )


def _agreements(
    models: Contestants, golden: list[Answer], config: EvaluateConfig, sampling: Sampling
) -> dict[str, list[Agreement]]:
    """Teacher-forced agreement of every candidate on all golden answers."""
    common = (models.target, golden, models.vocabulary, sampling, config.tokens_per_forward)
    return {
        LOOKUP: lookup_agreement(golden, config.lookup_ngram),
        UNDISTILLED: teacher_forced(models.drafter(models.undistilled), *common),
        DISTILLED: teacher_forced(models.drafter(models.distilled), *common),
    }


def _engine(models: Contestants, settings: DecodeConfig, config: EvaluateConfig, names: list[str]) -> Engine:
    """Plain decoding and the candidates `names` over the same target."""
    drafters: dict[str, Drafter] = {
        LOOKUP: PromptLookupDrafter(config.lookup_ngram),
        UNDISTILLED: models.drafter(models.undistilled),
        DISTILLED: models.drafter(models.distilled),
    }
    engine = Engine(models.target, settings)
    engine.add(PLAIN, None)
    for name in names:
        engine.add(name, drafters[name])
    return engine


def _choose_draft_length(
    models: Contestants,
    dev: list[Answer],
    costs: cost_model.Costs,
    settings: DecodeConfig,
    config: EvaluateConfig,
    seed: int,
) -> int:
    """The k with the best predicted speedup: measured costs, acceptance by position of the longest k on dev prompts."""
    decoder = Decoder(models.target, models.drafter(models.distilled), settings)
    prompts = _pick([answer for answer in dev if answer.domain == models.domain], config.dev_prompts)
    sequences = []
    for answer in tqdm(prompts, desc="choose draft length on dev", unit=" prompts"):
        rounds = time_one(decoder, answer.prompt_ids.tolist(), seed).sequence.rounds
        sequences.append([(block.accepted, block.drafted) for block in rounds])
    by_position = acceptance_by_position(sequences, settings.draft_length)
    return cost_model.best_draft_length(by_position or [0.0], config.draft_lengths, costs)


def _pick(answers: list[Answer], count: int) -> list[Answer]:
    """The first `count` answers in the order of a hash of their ids: fixed, and blind to what they contain."""
    return sorted(answers, key=lambda answer: hashlib.sha256(answer.prompt_id.encode()).digest())[:count]


def _roster(domain: str, golden: list[Answer], config: EvaluateConfig) -> tuple[list[Answer], dict[str, list[str]]]:
    """The golden prompts that are decoded, and by which candidates each."""
    timed: list[Answer] = []
    roster: dict[str, list[str]] = {}
    for name, answers in aggregate(golden, lambda answer: answer.domain).items():
        if name == "all":
            continue
        chosen = _pick(answers, config.timed_prompts if name == domain else config.timed_prompts_other)
        for index, answer in enumerate(chosen):
            all_candidates = name == domain and index < config.baseline_prompts
            roster[answer.prompt_id] = [LOOKUP, UNDISTILLED, DISTILLED] if all_candidates else [DISTILLED]
        timed = chosen + timed if name == domain else timed + chosen
    return timed, roster


def _candidates(
    requests: list[Request],
    agreements: dict[str, list[Agreement]],
    draft_length: int,
    costs: cost_model.Costs,
    config: EvaluateConfig,
) -> dict[str, dict[str, dict]]:
    """candidate -> domain (and "all") -> metric -> measure."""
    result: dict[str, dict[str, dict]] = {}
    for name, found in agreements.items():
        served = aggregate([request for request in requests if request.candidate == name], lambda row: row.domain)
        result[name] = {
            domain: {
                **agreement_metrics(rows, config.bootstrap_samples),
                **served_metrics(served.get(domain, []), draft_length, config.bootstrap_samples),
            }
            for domain, rows in aggregate(found, lambda row: row.domain).items()
        }
    for metrics in result[DISTILLED].values():
        metrics["predicted_speedup"] = _predictions(metrics, draft_length, costs)
    return result


def _predictions(metrics: dict[str, dict], draft_length: int, costs: cost_model.Costs) -> dict[str, float | None]:
    """The three predicted speedups, each under its name; None where what it needs was not measured."""
    length, rate = (metrics.get(name, {}).get("value") for name in ("mean_acceptance_length", "acceptance_rate"))
    token_acceptance = metrics["token_acceptance_trimmed_head"]["value"]
    c = costs.cost_ratio
    return {
        "measured-cost": None if length is None else cost_model.measured_cost_speedup(length, draft_length, costs),
        "classic": None if token_acceptance is None else cost_model.classic_speedup(token_acceptance, draft_length, c),
        "simple": None if rate is None else cost_model.simple_speedup(rate, c),
    }


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

    Greedy float32 runs are compared as they were timed. Otherwise a subset is decoded again in float32, and departures of
    greedy half-precision runs are judged by their float32 gap: one that is no near tie makes the result 0.
    """
    greedy = settings.sampling.greedy
    if greedy and models.target.dtype == torch.float32:
        return lossless_measure(requests)
    if getattr(models.target, "is_quantized", False):
        return {**no_data("a quantised target has no float32 form to compare in"), "departures": []}
    precise = dataclasses.replace(
        models,
        target=decoding_view(copy.deepcopy(models.target).float()),
        distilled=copy.deepcopy(models.distilled).float(),
    )
    subset = dataclasses.replace(
        settings, max_new_tokens=config.lossless_new_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
    )
    engine = _engine(precise, subset, config, [DISTILLED])
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
    seconds = 0.0
    for answer in answers:
        prompt = torch.tensor(answer.prompt_ids[None].astype("int64"), device=target.device)
        started = time.perf_counter()
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=settings.max_new_tokens,
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
        )
        seconds += time.perf_counter() - started
    tokens = len(answers) * settings.max_new_tokens
    return {
        "transformers_plain_tokens_per_second": tokens / seconds,
        "our_plain_tokens_per_second": tokens / sum(run.seconds for run in plain[: len(answers)]),
    }


def served_gap(
    distilled: dict[str, dict], domain: str, agreements: list[Agreement], draft_length: int, tokens: int
) -> dict[str, float | None]:
    """How often the decoder accepted the first drafted token on the target domain, beside what teacher-forced agreement
    on the same prompts' golden answers predicts; `tokens` of each were decoded."""
    predicted = expected_first_acceptance([row.overlaps[:tokens] for row in agreements], draft_length)
    served = (distilled.get(domain, {}).get("acceptance_by_position", {}).get("value") or [None])[0]
    gap = None if predicted is None or served is None else served - predicted
    return {"predicted_first_drafted_token": predicted, "first_drafted_token": served, "gap": gap}


def _warnings(served: dict[str, float | None], domain: str) -> list[str]:
    """Teacher-forced and served acceptance should tell the same story."""
    if served["gap"] is None or abs(served["gap"]) <= SERVED_GAP_WORTH_A_WARNING:
        return []
    return [
        f"served acceptance of the first drafted token on {domain} is {served['first_drafted_token']:.2f}, the golden answers"
        f" predict {served['predicted_first_drafted_token']:.2f}: check that answers, template and sampling are those of"
        " production"
    ]


def summarise(metrics: dict[str, Any]) -> dict[str, float | str | None]:
    """The headline figures, flat, for `dvc metrics`."""
    summary: dict[str, float | str | None] = {
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
    for name in (LOOKUP, UNDISTILLED):
        found = metrics["candidates"][name].get(domain, {})
        for metric in ("token_acceptance_trimmed_head", "speedup"):
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
