"""How close does the decoder come to what one large GPU allows?

    PYTHONPATH=. python benchmarks/gpu_decoder.py                        # one CUDA GPU with 40 GB or more, under four minutes
    PYTHONPATH=. python benchmarks/gpu_decoder.py --device cpu --tiny    # the same code on a tiny model: does it run?

Needs torch, transformers and pipeline.core, and the folder that benchmarks/gpu_bundle.py writes. Grows the bundle's
target to an 8B model's shapes, prints tables and writes benchmarks/results/gpu_decoder.json. What the figures mean:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report, goal, print_goals, print_table, results_path
from gpu_twins import (
    LLAMA_3_8B,
    TINY_TWIN,
    TwinSize,
    argmax_agreement,
    build_tiny,
    check_device,
    describe,
    grow_draft,
    grow_target,
    load_bundle,
    parser,
)
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from pipeline.core.comparison import machine
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.cost_model import Costs, measured_cost_speedup
from pipeline.core.decoding import DecodeConfig, Decoder, GeneratedSequence
from pipeline.core.drafters import Drafter, ModelDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.footprint import active_parameters, kv_cache_bytes
from pipeline.core.scripted_drafter import ScriptedDrafter

SWEEP_SECONDS, CURVE_SECONDS, BATCH_SECONDS = 75, 130, 165  # since the start, after which a part begins nothing new
PLAIN, DISTILLED, GROWN = "plain", "distilled", "grown"
JUDGED_K, JUDGED_RATE, JUDGED_TOKEN_ACCEPTANCE = 4, 0.65, 0.85
PROFILED_ROUNDS = 8


@dataclass(frozen=True)
class Workload:
    """How much is measured, and what the target grows to."""

    twin: TwinSize
    new_tokens: int  # per prompt, EOS ignored
    prompts: int  # decoded one by one in the sweep over draft lengths
    curve_prompts: int  # of those, for the curve over acceptance
    repeats: int  # timed passes, after one that warms up
    draft_lengths: tuple[int, ...]
    curve_draft_lengths: tuple[int, ...]
    acceptances: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    copied_bytes: int  # size of the tensor copied to measure bandwidth


LARGE = Workload(
    twin=LLAMA_3_8B, new_tokens=128, prompts=3, curve_prompts=2, repeats=2, draft_lengths=(1, 2, 3, 4, 5, 6, 7, 8),
    curve_draft_lengths=(4, 8, 6, 2), acceptances=(0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95),
    batch_sizes=(1, 2, 4, 8, 16, 32), copied_bytes=4 << 30,
)  # fmt: skip
TINY = Workload(
    twin=TINY_TWIN, new_tokens=10, prompts=2, curve_prompts=1, repeats=1, draft_lengths=(1, 4),
    curve_draft_lengths=(4,), acceptances=(0.4, 0.85, 0.95), batch_sizes=(1, 2), copied_bytes=1 << 22,
)  # fmt: skip


@dataclass
class Models:
    """What decodes: a twin of the target, the draft as distilled and grown, and prompts as token ids."""

    small: PreTrainedModel
    target: PreTrainedModel
    drafts: dict[str, PreTrainedModel]
    head_token_ids: list[int]
    prompts: list[list[int]]

    def drafter(self, name: str) -> ModelDrafter:
        return ModelDrafter(self.drafts[name], self.head_token_ids)

    def decoder(self, drafter: Drafter | None, work: Workload, draft_length: int = 1, slots: int = 1) -> Decoder:
        """Greedy, EOS ignored."""
        config = DecodeConfig(draft_length=draft_length, max_new_tokens=work.new_tokens)
        return Decoder(self.target, drafter, config, slots=slots)

    def context(self, work: Workload) -> int:
        """Mean tokens that a round looks back on."""
        return round(statistics.mean(map(len, self.prompts[: work.prompts])) + work.new_tokens / 2)


@dataclass
class Timed:
    """One decoding of a batch of prompts."""

    seconds: float  # prefills included
    round_seconds: list[float]  # wall time of each step() that was a round
    sequences: list[GeneratedSequence]


@dataclass
class Timing:
    """Several batches: medians over repeats, summed over batches; `rounds` and counts are those of all rows."""

    tokens: int
    seconds: float
    decode_seconds: float
    steps: int
    rounds: int
    drafted: int
    accepted: int
    emitted: int

    def document(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "seconds": self.seconds,
            "decode_seconds": self.decode_seconds,
            "round_seconds": self.decode_seconds / self.steps,
            "tokens_per_round": self.emitted / self.rounds,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
        }


Batch = list[list[int]]
Runs = dict[Any, Callable[[Batch], Timed]]


def run_once(decoder: Decoder, batch: Batch) -> Timed:
    """Decode `batch`. Each step ends when its tokens are on the host, so wall time covers the device's work."""
    for prompt in batch:
        decoder.submit(prompt, seed=0)
    finished: dict[int, GeneratedSequence] = {}
    round_seconds = []
    started = time.perf_counter()
    while decoder.busy:
        before, prefilled = time.perf_counter(), decoder.stats.prefill_seconds
        events = decoder.step()
        if decoder.stats.prefill_seconds == prefilled:
            round_seconds.append(time.perf_counter() - before)
        finished.update({event.request: event.finished for event in events if event.finished})
    seconds = time.perf_counter() - started
    return Timed(seconds, round_seconds, [finished[request] for request in sorted(finished)])


def warm_up(runs: Runs, batches: list[Batch]) -> None:
    """Caches, kernels and graphs for every shape that the timed passes meet."""
    for run in runs.values():
        for batch in batches:
            run(batch)


def interleaved(runs: Runs, batches: list[Batch], repeats: int, deadline: float) -> dict[Any, Timing]:
    """Time all `runs` in turn on every batch, `repeats` times, or as often (at least once) as ends before `deadline`."""
    found: dict[Any, list[list[Timed]]] = {name: [[] for _ in batches] for name in runs}
    started = time.perf_counter()
    for repeat in range(repeats):
        now = time.perf_counter()
        if repeat and now + (now - started) / repeat > deadline:
            break
        for index, batch in enumerate(batches):
            for name, run in runs.items():
                found[name][index].append(run(batch))
    return {name: _combined(repeated) for name, repeated in found.items()}


def _combined(batches: list[list[Timed]]) -> Timing:
    sequences = [sequence for repeats in batches for sequence in repeats[0].sequences]
    rounds = [block for sequence in sequences for block in sequence.rounds]
    return Timing(
        tokens=sum(len(sequence.token_ids) for sequence in sequences),
        seconds=sum(statistics.median(run.seconds for run in repeats) for repeats in batches),
        decode_seconds=sum(statistics.median(sum(run.round_seconds) for run in repeats) for repeats in batches),
        steps=sum(len(repeats[0].round_seconds) for repeats in batches),
        rounds=len(rounds),
        drafted=sum(block.drafted for block in rounds),
        accepted=sum(block.accepted for block in rounds),
        emitted=sum(block.emitted for block in rounds),
    )


@torch.inference_mode()
def copy_bandwidth(size: int, device: torch.device) -> float:
    """Bytes per second, read and written, of copying a tensor of `size` bytes; median of ten."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    seconds = []
    for _ in range(11):
        synchronize(device)
        started = time.perf_counter()
        destination.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bytes(model: PreTrainedModel, rows: int, context: int, head_tokens: int | None = None) -> int:
    """Bytes of weights and of cached keys and values that a pass of `rows` rows at `context` tokens reads."""
    weights = active_parameters(model, head_tokens) * model.dtype.itemsize
    return weights + kv_cache_bytes(model.config, rows, context, model.dtype)


def round_bytes(models: Models, draft: str | None, k: int, rows: int, context: int) -> int:
    """Bytes that a round reads: one target pass and k steps of the draft."""
    total = read_bytes(models.target, rows, context)
    if draft is not None:
        total += k * read_bytes(models.drafts[draft], rows, context, len(models.head_token_ids))
    return total


def sweep_draft_lengths(models: Models, work: Workload, deadline: float) -> dict[str, Any]:
    """Batch size 1: plain decoding, and both drafts at every draft length, beside what measured costs predict."""
    batches = [[prompt] for prompt in models.prompts[: work.prompts]]
    runs: Runs = {PLAIN: functools.partial(run_once, models.decoder(None, work))}
    for name, k in itertools.product(models.drafts, work.draft_lengths):
        runs[name, k] = functools.partial(run_once, models.decoder(models.drafter(name), work, k))
    warm_up(runs, batches)
    timings = interleaved(runs, batches, work.repeats, deadline)
    context = models.context(work)
    drafts = {}
    for name in models.drafts:
        costs = measure_costs(models.target, models.drafter(name), list(work.draft_lengths), context, repeats=9)
        rows = [_length_row(models, name, k, timings, costs, context) for k in work.draft_lengths]
        drafts[name] = {"costs": costs.document(), "lengths": rows, "best": max(rows, key=lambda row: row["speedup"])}
    plain = timings[PLAIN]
    rate = round_bytes(models, None, 0, 1, context) * plain.steps / plain.decode_seconds
    return {"context": context, PLAIN: {**plain.document(), "bytes_per_second": rate}, "drafts": drafts}


def _length_row(models: Models, name: str, k: int, timings: dict, costs: Costs, context: int) -> dict[str, Any]:
    plain, found = timings[PLAIN], timings[name, k]
    decode_speedup = plain.decode_seconds / found.decode_seconds
    predicted = measured_cost_speedup(found.emitted / found.rounds, k, costs)
    return {
        "k": k,
        **found.document(),
        "bytes_per_second": round_bytes(models, name, k, 1, context) * found.steps / found.decode_seconds,
        "speedup": plain.seconds / found.seconds,
        "decode_speedup": decode_speedup,
        "predicted_speedup": predicted,
        "measured_over_predicted": decode_speedup / predicted,
    }


def acceptance_curve(models: Models, work: Workload, deadline: float) -> list[dict[str, Any]]:
    """Batch size 1: speedup of a draft with the grown draft's cost and a chosen token acceptance, for several k; those
    after the first are left out when time is up."""
    batches = [[prompt] for prompt in models.prompts[: work.curve_prompts]]
    plain = functools.partial(run_once, models.decoder(None, work))
    known = {tuple(batch[0]): plain(batch).sequences[0].token_ids for batch in batches}
    rows = []
    for k in work.curve_draft_lengths:
        if rows and time.perf_counter() > deadline:
            print(f"acceptance at k = {k} is left out: the time for measuring is spent")
            continue
        drafter = ScriptedDrafter(models.drafter(GROWN), dict(known))
        decoder = models.decoder(drafter, work, k)
        settle(decoder, drafter, batches)
        runs: Runs = {a: functools.partial(run_scripted, decoder, drafter, a) for a in work.acceptances}
        timings = interleaved({PLAIN: plain, **runs}, batches, work.repeats, deadline)
        base = timings.pop(PLAIN)
        for acceptance, timing in timings.items():
            speedups = {
                "speedup": base.seconds / timing.seconds,
                "decode_speedup": base.decode_seconds / timing.decode_seconds,
            }
            rows.append({"k": k, "token_acceptance": acceptance, **timing.document(), **speedups})
    return sorted(rows, key=lambda row: (row["k"], row["token_acceptance"]))


def settle(decoder: Decoder, drafter: ScriptedDrafter, batches: list[Batch]) -> None:
    """Teach the drafter the target's text in passes of this width, and warm up on the way.

    In half precision a pass over several tokens may decide a near tie otherwise than a pass over one.
    """
    for batch in batches:
        for _ in range(3):
            tokens = run_scripted(decoder, drafter, 1.0, batch).sequences[0].token_ids
            if drafter.continuations[tuple(batch[0])] == tokens:
                break
            drafter.continuations[tuple(batch[0])] = tokens


def run_scripted(decoder: Decoder, drafter: ScriptedDrafter, acceptance: float, batch: Batch) -> Timed:
    drafter.token_acceptance = acceptance
    return run_once(decoder, batch)


def host_time(models: Models, work: Workload, k: int) -> dict[str, dict[str, float | str | None]]:
    """Per round at batch size 1: wall time, time in which the device worked, and the difference, which the host costs."""
    if models.target.device.type != "cuda":
        return {"reason": "the device is the host"}
    decoders = {PLAIN: models.decoder(None, work), GROWN: models.decoder(models.drafter(GROWN), work, k)}
    batch = [models.prompts[0]]
    found = {}
    for name, decoder in decoders.items():
        run_once(decoder, batch)
        wall = statistics.median(run_once(decoder, batch).round_seconds)
        busy = device_seconds(decoder, batch)
        found[name] = {
            "wall_seconds": wall,
            "device_seconds": busy,
            "host_seconds": None if busy is None else wall - busy,
        }
    return found


def device_seconds(decoder: Decoder, batch: Batch) -> float | None:
    """Seconds per round in which a kernel or a copy ran, from the profiler; None where it sees no device events."""
    for prompt in batch:
        decoder.submit(prompt, seed=0)
    decoder.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        rounds = 0
        while decoder.busy and rounds < PROFILED_ROUNDS:
            decoder.step()
            rounds += 1
        synchronize(decoder.target.device)
    while decoder.busy:
        decoder.step()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    intervals = [(event.time_range.start, event.time_range.end) for event in events]
    return covered(intervals) * 1e-6 / rounds if intervals else None


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def sweep_batch_sizes(models: Models, work: Workload, k: int, deadline: float) -> list[dict[str, Any]]:
    """Plain and speculative decoding of 1, 2, ... prompts at once with the grown draft; sizes left out when time is up."""
    rows = []
    for size in work.batch_sizes:
        if time.perf_counter() > deadline:
            print(f"batch sizes from {size} on are left out: the time for measuring is spent")
            break
        batch = list(itertools.islice(itertools.cycle(models.prompts), size))
        decoders = {
            PLAIN: models.decoder(None, work, slots=size),
            GROWN: models.decoder(models.drafter(GROWN), work, k, slots=size),
        }
        runs: Runs = {name: functools.partial(run_once, decoder) for name, decoder in decoders.items()}
        warm_up(runs, [batch])
        timings = interleaved(runs, [batch], 1, deadline)
        plain, speculative = timings[PLAIN], timings[GROWN]
        context = round(statistics.mean(map(len, batch)) + work.new_tokens / 2)
        rows.append(
            {
                "batch_size": size,
                PLAIN: plain.document(),
                "speculative": speculative.document(),
                "speedup": plain.seconds / speculative.seconds,
                "plain_bytes_per_second": round_bytes(models, None, 0, size, context)
                * plain.steps
                / plain.decode_seconds,
            }
        )
    return rows


def speedup_at_rate(curve: list[dict[str, Any]], k: int, rate: float) -> float | None:
    """Speedup at draft length k where the share `rate` of drafted tokens is accepted, between the measured points; a
    round's tokens, and so the speedup, are linear in that rate."""
    points = sorted((row["acceptance_rate"], row["speedup"]) for row in curve if row["k"] == k)
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if low <= rate <= high and low < high:
            return slow + (fast - slow) * (rate - low) / (high - low)
    return None


def judge(bandwidth: float, sweep: dict[str, Any], curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, each with what was measured."""
    at_acceptance = [row["speedup"] for row in curve if row["token_acceptance"] == JUDGED_TOKEN_ACCEPTANCE]
    grown = sweep["drafts"][GROWN]["best"]
    return [
        goal("plain decoding / copy bandwidth, batch 1", sweep[PLAIN]["bytes_per_second"] / bandwidth, 0.65, 0.8),
        goal("measured / predicted speedup, best k", grown["measured_over_predicted"], 0.95, None),
        goal("speedup, 65 % of four drafted accepted", speedup_at_rate(curve, JUDGED_K, JUDGED_RATE), 2.5, 3.0),
        goal("speedup, token acceptance 0.85, best k", max(at_acceptance, default=None), 3.5, None),
    ]


def print_sweep(sweep: dict[str, Any], bandwidth: float) -> None:
    plain = sweep[PLAIN]
    share = plain["bytes_per_second"] / bandwidth
    print(
        f"\nPlain decoding, batch 1, {sweep['context']} tokens of context: {plain['tokens_per_second']:.1f} tokens/s,"
        f" {plain['round_seconds'] * 1e3:.2f} ms a step, {plain['bytes_per_second'] / 1e9:.0f} GB/s"
        f" = {share:.0%} of the copy bandwidth"
    )
    columns = {
        "k": "d", "tokens_per_second": ".1f", "acceptance_rate": ".2f", "tokens_per_round": ".2f", "GB/s": ".0f",
        "speedup": ".2f", "decode_speedup": ".2f", "predicted_speedup": ".2f", "measured_over_predicted": ".2f",
    }  # fmt: skip
    for name, draft in sweep["drafts"].items():
        title = f"Draft as {name}: cost ratio {draft['costs']['cost_ratio']:.4f}"
        rows = [{**row, "GB/s": row["bytes_per_second"] / 1e9} for row in draft["lengths"]]
        print_table(title, columns, rows)


def print_curve(curve: list[dict[str, Any]]) -> None:
    columns = {
        "k": "d", "token_acceptance": ".2f", "acceptance_rate": ".2f", "tokens_per_round": ".2f", "speedup": ".2f",
    }  # fmt: skip
    print_table("Scripted acceptance at the grown draft's cost", columns, curve)


def print_batches(rows: list[dict[str, Any]], k: int, bandwidth: float) -> None:
    table = [
        {
            "batch": row["batch_size"],
            "plain tokens/s": row[PLAIN]["tokens_per_second"],
            "plain GB/s": row["plain_bytes_per_second"] / 1e9,
            "of copy": row["plain_bytes_per_second"] / bandwidth,
            "speculative tokens/s": row["speculative"]["tokens_per_second"],
            "speedup": row["speedup"],
        }
        for row in rows
    ]
    columns = {
        "batch": "d", "plain tokens/s": ".1f", "plain GB/s": ".0f", "of copy": ".0%", "speculative tokens/s": ".1f",
        "speedup": ".2f",
    }  # fmt: skip
    print_table(f"Batch sizes, grown draft, k = {k}", columns, table)


def print_host_time(found: dict[str, Any]) -> None:
    if "reason" in found:
        print(f"\nHost time per round: not defined, {found['reason']}")
        return
    rows = [{"decoding": name, **values} for name, values in found.items()]
    columns = {"decoding": "", "wall_seconds": ".6f", "device_seconds": ".6f", "host_seconds": ".6f"}
    print_table("Host time per round", columns, rows)


def prepare(arguments: argparse.Namespace, work: Workload, device: torch.device) -> Models:
    """Load or build the small pair and grow it."""
    small, draft, head_token_ids, prompts = build_tiny() if arguments.tiny else load_bundle(arguments.bundle)
    small, draft = small.to(device), draft.to(device)
    target = grow_target(small, work.twin)
    drafts = {GROWN: grow_draft(draft, target, len(head_token_ids)), DISTILLED: draft}
    return Models(small, target, drafts, head_token_ids, prompts)


def measure(models: Models, work: Workload, report: Report) -> None:
    """Everything, most important first; each part is printed and written as soon as it is known."""
    started = time.perf_counter()
    with report.part("device"):
        agreement = argmax_agreement(models.small, models.target, models.prompts)
        bandwidth = copy_bandwidth(work.copied_bytes, models.target.device)
        print(f"twin's argmax equals the small target's at {agreement:.1%} of prompt positions")
        print(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s, read and written")
        report.found |= {"argmax_agreement": agreement, "copy_bytes_per_second": bandwidth}
    with report.part("draft lengths"):
        sweep = report.found["draft_lengths"] = sweep_draft_lengths(models, work, started + SWEEP_SECONDS)
        print_sweep(sweep, bandwidth)
    k = sweep["drafts"][GROWN]["best"]["k"]
    with report.part("acceptance curve"):
        curve = report.found["acceptance_curve"] = acceptance_curve(models, work, started + CURVE_SECONDS)
        print_curve(curve)
        report.found["goals"] = judge(bandwidth, sweep, curve)
    with report.part("host time"):
        report.found["host_time"] = host_time(models, work, k)
        print_host_time(report.found["host_time"])
    with report.part("batch sizes"):
        rows = sweep_batch_sizes(models, work, k, started + BATCH_SECONDS)
        report.found["batch_sizes"] = {"k": k, "rows": rows}
        print_batches(rows, k, bandwidth)
    print_goals(report.found["goals"])


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--output", type=Path, help="JSON file; default: in benchmarks/results")
    arguments = options.parse_args(argv)
    report = Report(results_path(arguments, "gpu_decoder"), "domain-draft/gpu-decoder")
    try:
        device = check_device(arguments)
        work = TINY if arguments.tiny else LARGE
        models = prepare(arguments, work, device)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 1
    shapes = describe(models.target, models.drafts, len(models.head_token_ids))
    report.found = {
        "machine": machine(),
        "models": {**shapes, "prompts": len(models.prompts)},
        "new_tokens": work.new_tokens,
    }
    measure(models, work, report)
    if device.type == "cuda":
        report.found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    report.write()
    print(f"\n{report.elapsed:.0f} s in all; written to {report.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
