"""What is a domain draft worth on one large GPU? Answers, distillation at GPU scale, speculative decoding of an 8B twin.

    PYTHONPATH=. python benchmarks/gpu_headline.py                        # one large CUDA GPU, under eight minutes
    PYTHONPATH=. python benchmarks/gpu_headline.py --device cpu --tiny    # the same code on a tiny model: does it run?

Needs torch, transformers, accelerate, pipeline.core, pipeline.adapters.trainer, conf/ and the folder that
benchmarks/gpu_bundle.py writes. Prints tables and writes benchmarks/results/gpu_headline.json after every part, so that a run
that is cut short leaves what it measured. What the figures mean: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import itertools
import statistics
import sys
import tempfile
import time
import typing
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_report import Report, goal, print_goals, print_table, results_path
from gpu_twins import (
    HERE,
    LLAMA_3_8B,
    TINY_TWIN,
    SplitPrompts,
    TwinSize,
    argmax_agreement,
    build_tiny,
    build_tiny_splits,
    check_device,
    describe,
    grow_draft,
    grow_target,
    load_splits,
    load_target,
    parser,
)
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline.adapters.trainer import distill
from pipeline.core.answers import Answer, is_looping
from pipeline.core.comparison import machine
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.cost_model import Costs, best_draft_length, measured_cost_speedup, tokens_per_round
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.evaluation import (
    Engine,
    Request,
    Timed,
    judge_departures,
    lossless_measure,
    served_metrics,
    time_candidates,
    time_one,
)
from pipeline.core.footprint import free_memory_bytes, weight_bytes
from pipeline.core.generation import EncodedPrompt, generate_answers
from pipeline.core.metrics import acceptance_by_position
from pipeline.core.models import cast_parameters
from pipeline.core.packing import decoding_view
from pipeline.core.pruning import keep_layers
from pipeline.core.sampling import Sampling
from pipeline.core.training import DistillConfig
from pipeline.core.vocabulary import domain_token_ids

# the share of the time budget after which a part begins nothing new
ANSWERS_END, TRAINING_END, CHOICE_END, DECODING_END = 0.27, 0.66, 0.78, 0.92
LEAST_RATE, AIMED_RATE, LEAST_SPEEDUP, AIMED_SPEEDUP = 0.65, 0.75, 2.5, 3.0  # the reference story, and better
PROBE_STEPS, UNTIMED_STEPS = 24, 4  # optimiser steps that tell the speed of training, and those not counted
LEAST_TRAINING_SECONDS = 15.0  # a further draft is not begun with less
SEED = 0
PLAIN = "plain"


@dataclass(frozen=True)
class Workload:
    """How much is done at most; the time budget decides how much of it."""

    twin: TwinSize
    drafts: dict[str, list[int]]  # name -> layers of the small target that it starts from, the most wanted first
    new_tokens: int  # of an answer, and decoded per prompt with EOS ignored
    slots: int  # answers decoded together
    samples: int  # sampled answers to each train prompt, beside the greedy one
    samples_per_pass: int  # of them, between two looks at the clock
    epochs: float  # passes over the answers
    tokens_per_forward: int  # of a training pass, which is an optimiser step
    chunk_tokens: int  # whose logits exist at one time
    head_tokens: int  # the draft's trimmed head
    draft_lengths: tuple[int, ...]  # candidates for k
    choice_prompts: int  # dev prompts on which k is chosen
    timed_prompts: int  # other dev prompts, decoded plainly and with every draft
    lot: int  # of them, between two looks at the clock


LARGE = Workload(
    twin=LLAMA_3_8B, drafts={"3 layers": [0, 1, 29], "6 layers": [0, 1, 2, 3, 28, 29]}, new_tokens=128, slots=1024,
    samples=24, samples_per_pass=4, epochs=40, tokens_per_forward=32_768, chunk_tokens=8192, head_tokens=8192,
    draft_lengths=(3, 4, 5, 6, 7, 8), choice_prompts=12, timed_prompts=24, lot=8,
)  # fmt: skip
TINY = Workload(
    twin=TINY_TWIN, drafts={"2 layers": [0, 3], "3 layers": [0, 1, 3]}, new_tokens=12, slots=8,
    samples=2, samples_per_pass=1, epochs=4, tokens_per_forward=256, chunk_tokens=128, head_tokens=200,
    draft_lengths=(3, 4), choice_prompts=2, timed_prompts=3, lot=2,
)  # fmt: skip


def settings(group: str, name: str) -> dict[str, Any]:
    """The values of one file of conf/, which holds plain ones in the groups that are read here."""
    return yaml.safe_load((HERE.parent / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8"))


def recipe(**changes: Any) -> DistillConfig:
    """The pipeline's default recipe with `changes`."""
    types = typing.get_type_hints(DistillConfig)
    values = {**settings("distill", "default"), **changes}
    nested = {name: types[name](**value) for name, value in values.items() if isinstance(value, dict)}
    return DistillConfig(**{**values, **nested})


@dataclass
class TimedReport(Report):
    """A report with a time budget, in shares of which the parts end."""

    budget_seconds: float = 0.0

    def left(self, share: float) -> float:
        """Seconds until `share` of the budget is spent; negative afterwards."""
        return self.budget_seconds * share - self.elapsed


def release_memory() -> None:
    """Decoders and their captured graphs refer to themselves in circles: without this their caches would pile up."""
    gc.collect()
    torch.cuda.empty_cache()


def answer_prompts(
    small: PreTrainedModel, rows: list[EncodedPrompt], sampling: Sampling, prompts: SplitPrompts, work: Workload
) -> list[Answer]:
    """The target's answers to `rows` with its top probabilities, by the pipeline's own generation."""
    top = settings("generate", "default")["top_logprobs"]
    config = DecodeConfig(
        draft_length=1,
        max_new_tokens=work.new_tokens,
        eos_token_ids=prompts.eos_token_ids,
        allowed_token_ids=prompts.vocabulary,
        return_logprobs=top,
        prompt_logprobs=top,
        **vars(sampling),
    )
    total = len(rows) * work.new_tokens
    with tqdm(total=total, desc="answers (at most)", unit=" tokens", unit_scale=True, mininterval=2) as progress:
        answers = list(generate_answers(small, rows, config, work.slots, SEED, progress))
    release_memory()
    return answers


def answer_train_prompts(
    small: PreTrainedModel, prompts: SplitPrompts, work: Workload, report: TimedReport
) -> list[Answer]:
    """One greedy answer to every train prompt, then as many sampled ones as the time allows."""
    sampling = Sampling(**settings("generate", "default")["sampling"])
    started = time.perf_counter()
    answers = answer_prompts(small, prompts.train, Sampling(), prompts, work)
    for first in range(0, work.samples, work.samples_per_pass):
        numbers = range(first, min(first + work.samples_per_pass, work.samples))
        seconds_per_answer = (time.perf_counter() - started) / len(answers)
        if report.left(ANSWERS_END) < seconds_per_answer * len(numbers) * len(prompts.train):
            report.leave_out(f"sampled answers from number {first + 1} of {work.samples} on")
            break
        rows = [
            dataclasses.replace(prompt, prompt_id=f"{prompt.prompt_id}#{number}")
            for number, prompt in itertools.product(numbers, prompts.train)
        ]
        answers += answer_prompts(small, rows, sampling, prompts, work)
    tokens, seconds = sum(len(answer.answer_ids) for answer in answers), time.perf_counter() - started
    report.found["answers"] = {
        "prompts": len(prompts.train),
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
        "sampling": vars(sampling),
    }
    print(f"{len(answers):,} answers of {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s")
    return answers


def answer_dev_prompts(
    small: PreTrainedModel, prompts: SplitPrompts, work: Workload
) -> tuple[list[Answer], list[Answer]]:
    """Greedy answers to two halves of the target domain's dev prompts; in the second the longest prompt comes first."""
    own = [prompt for prompt in prompts.dev if prompt.domain == prompts.domain]
    answered = {answer.prompt_id: answer for answer in answer_prompts(small, own, Sampling(), prompts, work)}
    choice, timed = ([answered[prompt.prompt_id] for prompt in own[half::2]] for half in (0, 1))
    longest = max(range(len(timed)), key=lambda index: len(timed[index].prompt_ids))
    return choice, [timed[longest], *timed[:longest], *timed[longest + 1 :]]


class Stopwatch:
    """Notes when each training pass of a model begins; the trainer waits for the device in every one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.moments: list[float] = []
        self.handle = model.register_forward_pre_hook(self._note)

    def _note(self, model: PreTrainedModel, inputs: tuple) -> None:
        if model.training:
            self.moments.append(time.perf_counter())

    def stop(self) -> float:
        """Median seconds from one pass to the next, the first few left out."""
        self.handle.remove()
        gaps = [after - before for before, after in itertools.pairwise(self.moments)]
        return statistics.median(gaps[UNTIMED_STEPS:] or gaps or [0.0])


@dataclass
class Lesson:
    """What every draft is distilled on."""

    small: PreTrainedModel
    train: list[Answer]
    dev: list[Answer]
    head_token_ids: list[int]
    vocabulary: int

    @property
    def tokens(self) -> int:
        """Of an epoch: prompts and answers, without padding."""
        return sum(len(answer.prompt_ids) + len(answer.answer_ids) - 1 for answer in self.train)


@dataclass
class Trained:
    draft: PreTrainedModel
    history: list[dict]
    step_seconds: float
    seconds: float  # evaluations and checkpoints included


def run_distillation(lesson: Lesson, layers: list[int], config: DistillConfig) -> Trained:
    """Distil a new draft from `layers` of the small target."""
    draft = keep_layers(lesson.small, layers).float()
    watch, started = Stopwatch(draft), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        history = distill(
            draft,
            lesson.train,
            lesson.dev,
            lesson.head_token_ids,
            config,
            SEED,
            Path(folder) / "checkpoints",
            vocabulary=lesson.vocabulary,
        )
    return Trained(draft, history, watch.stop(), time.perf_counter() - started)


def train_draft(
    name: str, layers: list[int], lesson: Lesson, work: Workload, seconds: float, report: TimedReport
) -> PreTrainedModel:
    """Distil for about `seconds`: a short run tells the time of a step and of everything around the steps."""
    ends = time.perf_counter() + seconds
    step = work.tokens_per_forward / lesson.tokens  # epochs of one optimiser step
    config = recipe(
        tokens_per_step=work.tokens_per_forward,
        tokens_per_forward=work.tokens_per_forward,
        chunk_tokens=work.chunk_tokens,
        head_tokens=work.head_tokens,
        train_on_prompts=False,  # every answer to a prompt repeats it
        evaluations=1,
        epochs=PROBE_STEPS * step,
    )
    probe = run_distillation(lesson, layers, config)
    around = probe.seconds - PROBE_STEPS * probe.step_seconds
    left = max(0.0, ends - time.perf_counter())
    within = max(left - 2 * around, left / 2)  # a long run evaluates more often, but nothing is cold any more
    epochs = max(step, min(work.epochs, within / probe.step_seconds * step))
    evaluations = settings("distill", "default")["evaluations"]
    config = dataclasses.replace(config, epochs=epochs, evaluations=evaluations)
    trained = run_distillation(lesson, layers, config)
    report.found.setdefault("distillation", {})[name] = _training_facts(layers, lesson, trained, config)
    return trained.draft


def _training_facts(layers: list[int], lesson: Lesson, trained: Trained, config: DistillConfig) -> dict[str, Any]:
    history = trained.history
    best = max((row for row in history if "dev_token_acceptance" in row), key=lambda row: row["dev_token_acceptance"])
    tokens = round(config.epochs * lesson.tokens)
    padded_per_step = history[-1]["tokens"] / history[-1]["step"]
    facts = {
        "layers": layers,
        "parameters": trained.draft.num_parameters(),
        "recipe": dataclasses.asdict(config),
        "steps": history[-1]["step"],
        "tokens_seen": tokens,
        "tokens_per_second": tokens / trained.seconds,
        "tokens_per_second_within_steps": padded_per_step / trained.step_seconds if trained.step_seconds else None,
        "seconds": trained.seconds,
        "dev_token_acceptance": best["dev_token_acceptance"],
        "dev_token_acceptance_full_head": best["dev_token_acceptance_full_head"],
        "history": history,
    }
    print(
        f"{facts['steps']:,} steps, {tokens:,} tokens seen, {facts['tokens_per_second']:,.0f} tokens/s;"
        f" dev token acceptance {facts['dev_token_acceptance']:.3f}"
    )
    return facts


def train_drafts(lesson: Lesson, work: Workload, report: TimedReport) -> dict[str, PreTrainedModel]:
    """The drafts of `work` that the time allows, each with its share of it; at least one."""
    drafts: dict[str, PreTrainedModel] = {}
    dtype, device = lesson.small.dtype, lesson.small.device
    for index, (name, layers) in enumerate(work.drafts.items()):
        seconds = report.left(TRAINING_END) / (len(work.drafts) - index)
        if drafts and seconds < LEAST_TRAINING_SECONDS:
            report.leave_out(f"the draft of {name}")
            continue
        with report.part(f"distillation, {name}"):
            try:
                draft = train_draft(name, layers, lesson, work, seconds, report)
            except PipelineError as error:
                report.leave_out(f"the draft of {name}", str(error))
                continue
        drafts[name] = cast_parameters(draft, dtype).to(device)
        release_memory()
    return drafts


@dataclass
class Pair:
    """The twin, the small target whose function it has, and what decodes with it."""

    small: PreTrainedModel
    target: PreTrainedModel
    drafts: dict[str, PreTrainedModel]
    head_token_ids: list[int]
    vocabulary: range

    def drafter(self, name: str) -> ModelDrafter:
        return ModelDrafter(self.drafts[name], self.head_token_ids)

    def config(self, work: Workload, draft_length: int) -> DecodeConfig:
        """Greedy, EOS ignored."""
        return DecodeConfig(draft_length, work.new_tokens, allowed_token_ids=self.vocabulary)


def accepted_by_position(pair: Pair, name: str, answers: list[Answer], work: Workload) -> list[float]:
    """Share of rounds of the longest k in which each position was accepted."""
    k = max(work.draft_lengths)
    decoder = Decoder(pair.target, pair.drafter(name), pair.config(work, k))
    sequences = []
    for answer in answers:
        rounds = time_one(decoder, answer.prompt_ids.tolist(), SEED).sequence.rounds
        sequences.append([(block.accepted, block.drafted) for block in rounds])
    return acceptance_by_position(sequences, k) or [0.0]


def choose_draft_length(by_position: list[float], costs: Costs, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The k with the best predicted speedup of those whose acceptance rate should reach the bound, else of all."""
    rows = [
        {
            "k": k,
            "expected_acceptance_rate": sum(by_position[:k]) / k,
            "predicted_speedup": measured_cost_speedup(tokens_per_round(by_position, k), k, costs),
        }
        for k in lengths
    ]
    reaching = [row["k"] for row in rows if row["expected_acceptance_rate"] >= LEAST_RATE]
    chosen = best_draft_length(by_position, reaching or list(lengths), costs)
    fastest = best_draft_length(by_position, list(lengths), costs)
    return {"k": chosen, "fastest_k": fastest, "lengths": rows, "costs": costs.document()}


def choose_draft_lengths(pair: Pair, answers: list[Answer], work: Workload, report: TimedReport) -> dict[str, dict]:
    """k for every draft as it is and grown, which accept alike and cost differently; later ones are left out when
    time is up."""
    context = round(statistics.mean(len(answer.prompt_ids) for answer in answers) + work.new_tokens / 2)
    chosen: dict[str, dict] = {}
    for name in list(pair.drafts):
        if chosen and report.left(CHOICE_END) < 0:
            report.leave_out(f"decoding with the draft of {name}")
            continue
        by_position = accepted_by_position(pair, name, answers, work)
        for candidate in (name, f"{name}, grown"):
            if candidate not in pair.drafts:
                pair.drafts[candidate] = grow_draft(pair.drafts[name], pair.target, len(pair.head_token_ids))
            costs = measure_costs(pair.target, pair.drafter(candidate), list(work.draft_lengths), context, repeats=9)
            chosen[candidate] = choose_draft_length(by_position, costs, work.draft_lengths)
            title = f"{candidate}: cost ratio {costs.cost_ratio:.4f}, chosen k = {chosen[candidate]['k']}"
            columns = {"k": "d", "expected_acceptance_rate": ".2f", "predicted_speedup": ".2f"}
            print_table(title, columns, chosen[candidate]["lengths"])
    return chosen


def time_drafts(
    pair: Pair, chosen: dict[str, dict], answers: list[Answer], work: Workload, report: TimedReport
) -> tuple[list[Request], list[Timed]]:
    """Every prompt decoded plainly and with every draft at its k; prompts after the first lot are left out when time is
    up. The longest prompt comes first, so that the warm-up makes room for all."""
    engine = Engine(decoding_view(pair.target), pair.config(work, 1))
    engine.add(PLAIN, None)
    for name, choice in chosen.items():
        engine.decoders[name] = Decoder(engine.target, pair.drafter(name), pair.config(work, choice["k"]))
    requests, plain = [], []
    for start in range(0, len(answers), work.lot):
        if start and report.left(DECODING_END) < 0:
            report.leave_out(f"{len(answers) - start} of {len(answers)} timed prompts")
            break
        lot = answers[start : start + work.lot]
        found, runs = time_candidates(engine, lot, lambda _: list(chosen), SEED, "decode")
        requests += found
        plain += runs
    return requests, plain


def speeds(chosen: dict[str, dict], requests: list[Request], looping: set[str]) -> dict[str, dict]:
    """Acceptance, speedup and waiting times of every draft; also without the prompts `looping`, whose texts repeat
    themselves, which any draft guesses."""
    samples = settings("evaluate", "quick")["bootstrap_samples"]
    rows, found = [], {}
    for name, choice in chosen.items():
        own = [request for request in requests if request.candidate == name]
        metrics = served_metrics(own, choice["k"], samples)
        straight = served_metrics([r for r in own if r.prompt_id not in looping], choice["k"], samples)
        found[name] = {"k": choice["k"], "choice": choice, **metrics, "without_loops": straight}
        names = ("acceptance_rate", "mean_acceptance_length", "tokens_per_second", "plain_tokens_per_second", "speedup")
        rows.append({"draft": name, "k": choice["k"], **{key: metrics[key]["value"] for key in names}})
    columns = {
        "draft": "", "k": "d", "acceptance_rate": ".3f", "mean_acceptance_length": ".2f", "tokens_per_second": ".1f",
        "plain_tokens_per_second": ".1f", "speedup": ".2f",
    }  # fmt: skip
    print_table("Plain and speculative decoding of the twin, batch 1", columns, rows)
    print(f"{len(looping)} texts repeat themselves; without these:")
    for name, metrics in found.items():
        if straight := metrics["without_loops"]:
            rate, speedup = straight["acceptance_rate"]["value"], straight["speedup"]["value"]
            print(f"    {name}: acceptance rate {rate:.3f}, speedup {speedup:.2f}")
    return found


def float32_judge(pair: Pair) -> tuple[PreTrainedModel, str]:
    """A float32 copy of the twin, or where memory does not allow one, of the small target."""
    release_memory()
    needed = weight_bytes(pair.target, torch.float32) + weight_bytes(pair.target, pair.target.dtype)
    free = free_memory_bytes(pair.target.device)
    if free is not None and needed < free:
        return copy.deepcopy(pair.target).float(), "float32 copy of the twin"
    return copy.deepcopy(pair.small).float(), "float32 copy of the small target"


def judge_lossless(
    pair: Pair, answers: list[Answer], requests: list[Request], plain_tokens: dict[str, list[int]]
) -> dict[str, Any]:
    """Each draft's tokens against the twin's plain ones. In float32 they are equal; in half precision the first departure of
    a prompt is legal where float32 sees both tokens tie for the best."""
    names = list(dict.fromkeys(request.candidate for request in requests))
    equal = {name: lossless_measure([r for r in requests if r.candidate == name])["value"] for name in names}
    departures: list[dict] = []
    judge = None
    if pair.target.dtype != torch.float32 and any(request.first_departure is not None for request in requests):
        model, judge = float32_judge(pair)
        prompts = {answer.prompt_id: answer.prompt_ids.tolist() for answer in answers}
        gap = settings("evaluate", "quick")["near_tie_gap"]
        departures = judge_departures(model, requests, prompts, plain_tokens, gap)
    illegal = sum(not departure["legal"] for departure in departures)
    share = 1 - illegal / len(requests) if judge else statistics.mean(equal.values())
    for name in names:
        print(f"{name}: tokens equal the plain ones on {equal[name]:.1%} of the prompts")
    print(f"{len(departures)} departures, {illegal} of them no near tie{f', judged by a {judge}' if judge else ''}")
    return {"equal_share": equal, "judge": judge, "departures": departures, "lossless": share}


def judge_goals(found: dict[str, dict], lossless: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals for every draft at its k, all of which are at least 3."""
    goals = []
    for name, metrics in found.items():
        at = f"{name}, k = {metrics['k']}"
        rate, speedup = metrics["acceptance_rate"]["value"], metrics["speedup"]["value"]
        goals.append(goal(f"acceptance rate, {at}", rate, LEAST_RATE, AIMED_RATE))
        goals.append(goal(f"speedup, {at}", speedup, LEAST_SPEEDUP, AIMED_SPEEDUP))
    return [*goals, goal("lossless, share of runs", lossless["lossless"], 1.0, None)]


def best_draft(found: dict[str, dict]) -> str:
    """The fastest of the drafts that reach the acceptance rate, else of all."""
    reaching = [name for name, metrics in found.items() if metrics["acceptance_rate"]["value"] >= LEAST_RATE]
    return max(reaching or found, key=lambda name: found[name]["speedup"]["value"])


def prepare(arguments: argparse.Namespace, device: torch.device) -> tuple[PreTrainedModel, SplitPrompts]:
    if arguments.tiny:
        return build_tiny()[0].to(device), build_tiny_splits()
    return load_target(arguments.bundle).to(device), load_splits(arguments.bundle)


def measure_decoding(
    small: PreTrainedModel,
    drafts: dict[str, PreTrainedModel],
    lesson: Lesson,
    prompts: SplitPrompts,
    dev: list[Answer],
    work: Workload,
    report: TimedReport,
) -> None:
    """Plain against speculative decoding on prompts that neither the checkpoints nor k were chosen on."""
    with report.part("twin"):
        pair = Pair(small, grow_target(small, work.twin), dict(drafts), lesson.head_token_ids, prompts.vocabulary)
        agreement = argmax_agreement(small, pair.target, [answer.prompt_ids.tolist() for answer in dev])
        print(f"twin's argmax equals the small target's at {agreement:.1%} of prompt positions")
        report.found["argmax_agreement"] = agreement
    with report.part("draft lengths"):
        chosen = choose_draft_lengths(pair, lesson.dev[: work.choice_prompts], work, report)
        shapes = {name: pair.drafts[name] for name in chosen}
        report.found["models"] = describe(pair.target, shapes, len(lesson.head_token_ids))
    timed = dev[: work.timed_prompts]
    with report.part("decoding"):
        requests, plain = time_drafts(pair, chosen, timed, work, report)
        texts = {a.prompt_id: run.sequence.token_ids for a, run in zip(timed, plain, strict=False)}
        found = speeds(chosen, requests, {prompt for prompt, ids in texts.items() if is_looping(ids)})
        report.found |= {"decoding": found, "best_draft": best_draft(found), "timed_prompts": len(plain)}
    with report.part("lossless"):
        lossless = judge_lossless(pair, timed, requests, texts)
        report.found |= {"lossless": lossless, "goals": judge_goals(found, lossless)}


def measure(small: PreTrainedModel, prompts: SplitPrompts, work: Workload, report: TimedReport) -> None:
    """Everything, one part after the other. Dev prompts of the domain serve in two halves: checkpoints and k are chosen on
    the one, decoding is timed on the other."""
    with report.part("answers"):
        train = answer_train_prompts(small, prompts, work, report)
        choice, timed = answer_dev_prompts(small, prompts, work)
        head = domain_token_ids(train, work.head_tokens, prompts.eos_token_ids, prompts.vocabulary)
    lesson = Lesson(small, train, choice, head, len(prompts.vocabulary))
    drafts = train_drafts(lesson, work, report)
    if drafts:
        measure_decoding(small, drafts, lesson, prompts, timed, work, report)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--output", type=Path, help="JSON file; default: in benchmarks/results")
    options.add_argument("--minutes", type=float, default=7.5, help="time budget")
    arguments = options.parse_args(argv)
    path = results_path(arguments, "gpu_headline")
    report = TimedReport(path, "domain-draft/gpu-headline", budget_seconds=arguments.minutes * 60)
    work = TINY if arguments.tiny else LARGE
    try:
        device = check_device(arguments)
        small, prompts = prepare(arguments, device)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 1
    report.found = {
        "machine": machine(),
        "budget_minutes": arguments.minutes,
        "workload": dataclasses.asdict(work),
    }
    measure(small, prompts, work, report)
    if device.type == "cuda":
        report.found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    report.write()
    print_goals(report.found.get("goals", []))
    print(f"\n{report.elapsed:.0f} s in all; written to {report.path}")
    return 0 if "goals" in report.found else 1


if __name__ == "__main__":
    sys.exit(main())
