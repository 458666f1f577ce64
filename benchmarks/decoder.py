"""How fast is the decoder beside the others, and how true are the cost model's predictions?

    python benchmarks/decoder.py

Reads data/draft and data/answers/dev (run `dvc repro distill` first) and the values of conf/; golden prompts play no part.
Every leg decodes the same dev prompts greedily to the same length, end-of-sequence tokens ignored; all legs take a prompt in
turn before the next prompt comes, and medians over the repeats count. The first data type (by default the one that
the pipeline uses on this machine) is measured in full, a further one briefly: its main legs on a few prompts at the
draft length of the first. Prints tables and writes benchmarks/results/decoder.json. benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoder_tables import TARGETS, print_tables, target_row
from engines import Leg, Run, VllmProcess, llama_cpp_leg, our_leg, packaged_gguf, transformers_leg
from hydra import compose, initialize_config_dir
from tqdm import tqdm
from transformers import PreTrainedModel

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.drafts import load_draft
from pipeline.adapters.targets import Target
from pipeline.core import cost_model
from pipeline.core.artifacts import write_json
from pipeline.core.comparison import machine
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.draft_length import AdaptiveDraftLength
from pipeline.core.drafters import LookupThenModelDrafter, ModelDrafter, PromptLookupDrafter
from pipeline.core.errors import PipelineError
from pipeline.core.metrics import acceptance_by_position
from pipeline.core.models import (
    DTYPES,
    ModelConfig,
    cast_parameters,
    default_device,
    load_model,
    quiet_transformers,
    resolve_dtype,
)
from pipeline.core.packing import decoding_view
from pipeline.core.pruning import keep_layers
from pipeline.core.tiny import save_tiny_target
from pipeline.evaluate import Config

RESULTS = Path(__file__).parent / "results" / "decoder.json"
OUR_PLAIN, OUR_LOOKUP, OUR_ADAPTIVE = "ours, plain", "ours, prompt lookup", "ours, adaptive k"
OUR_LOOKUP_MODEL = "ours, lookup then model"
THEIR_PLAIN, THEIR_ASSISTED, THEIR_LOOKUP = (
    "transformers, plain",
    "transformers, assisted",
    "transformers, prompt lookup",
)
VLLM_PLAIN, VLLM_DRAFT, LLAMA_PLAIN = "vLLM, plain", "vLLM, draft model", "llama.cpp, plain (4-bit weights)"

Timings = dict[str, list[list[Run]]]  # leg -> prompt -> repeat


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    new_tokens: int  # decoded per prompt
    prompts: int  # of the target domain
    brief_prompts: int  # of those, for a data type that is not measured in full
    sweep_prompts: int  # of those, for the choice of the draft length
    mixed_prompts: int  # of each domain, for the mixed set
    repeats: int  # of the main legs; the choice of the draft length takes one
    cost_repeats: int  # passes of each shape around each prompt
    batches: tuple[int, ...]  # rows of the batched runs
    contexts: tuple[int, int]  # tokens of the short and the long prompt
    draft_lengths: list[int]  # candidates for k
    lookup_ngram: int  # longest n-gram that prompt lookup matches


FULL = Settings(48, 4, 1, 2, 2, 2, 2, (1, 2, 4, 8), (200, 2000), [1, 2, 3, 4], 3)
QUICK = Settings(16, 2, 1, 1, 1, 2, 1, (1, 3), (40, 400), [1, 2], 3)


@dataclass(frozen=True)
class Pair:
    """A target, its draft as it is served, and where both lie for engines that load them themselves."""

    target: PreTrainedModel
    draft: PreTrainedModel
    head_token_ids: list[int]
    half_weights: bool
    vocabulary: range
    target_folder: str
    draft_folder: str
    gguf: Path | None

    def drafter(self, adaptive: AdaptiveDraftLength | None = None) -> ModelDrafter:
        return ModelDrafter(self.draft, self.head_token_ids, self.half_weights, adaptive)


@dataclass(frozen=True)
class Texts:
    """Token ids to decode from: prompts of the target domain and of the others, and one long text of the target domain."""

    domain: list[list[int]]
    others: list[list[int]]
    long: list[int]


@dataclass(frozen=True)
class VllmOptions:
    """The Python that has vLLM, None to leave its legs out, and whether it compiles the models before it serves."""

    python: Path | None
    compile: bool


class CostProbe:
    """Pass times of a pair, taken again and again beside the timed legs at the context lengths of their prompts."""

    def __init__(self, pair: Pair, draft_lengths: list[int], settings: Settings) -> None:
        self.pair = pair
        self.draft_lengths = draft_lengths
        self.settings = settings
        self.found: list[cost_model.Costs] = []

    def measure(self, prompt: list[int]) -> None:
        """Costs halfway through the answer to `prompt`."""
        context = len(prompt) + self.settings.new_tokens // 2
        drafter = self.pair.drafter()
        repeats = self.settings.cost_repeats
        self.found.append(measure_costs(self.pair.target, drafter, self.draft_lengths, context, repeats))

    def median(self) -> cost_model.Costs:
        passes = {
            k: statistics.median(costs.target_pass_seconds[k] for costs in self.found) for k in [0, *self.draft_lengths]
        }
        return cost_model.Costs(statistics.median(costs.draft_step_seconds for costs in self.found), passes)


def interleaved(
    legs: dict[str, Leg], prompts: list[list[int]], repeats: int, new_tokens: int, title: str, probe: CostProbe
) -> Timings:
    """Let all legs decode one prompt before the next comes, `repeats` times over; one warm-up run of each is discarded."""
    runs: Timings = {name: [[] for _ in prompts] for name in legs}
    for leg in legs.values():
        leg(min(prompts, key=len))
    with tqdm(total=repeats * len(prompts) * len(legs), desc=title, unit=" runs", mininterval=2) as progress:
        for _ in range(repeats):
            for index, prompt in enumerate(prompts):
                probe.measure(prompt)
                for name, leg in legs.items():
                    run = leg(prompt)
                    if len(run.token_ids) != new_tokens:
                        raise PipelineError(
                            f"{name} returned {len(run.token_ids)} tokens, not {new_tokens}.",
                            "make it ignore the end of sequence: equal lengths are the base of the comparison.",
                        )
                    runs[name][index].append(run)
                    progress.update()
        probe.measure(prompts[-1])
    return runs


def middle(runs: list[Run]) -> Run:
    """The run of median seconds."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def summary(prompts: list[list[Run]], reference: list[list[Run]]) -> dict:
    """Rates of a leg from the median run of each prompt; `same_tokens`: share of prompts decoded as by `reference`."""
    runs = [middle(repeats) for repeats in prompts]
    same = [run.token_ids == repeats[0].token_ids for run, repeats in zip(runs, reference, strict=True)]
    decode_tokens = sum(run.decode_tokens for run in runs)
    rounds = None if runs[0].rounds is None else sum(run.rounds for run in runs)
    seconds = sum(run.seconds for run in runs)
    return {
        "tokens_per_second": sum(len(run.token_ids) for run in runs) / seconds,
        "decode_ms_per_token": 1000 * sum(run.decode_seconds for run in runs) / decode_tokens,
        "tokens_per_round": sum(run.emitted for run in runs) / rounds if rounds else None,
        "same_tokens": sum(same) / len(same),
        "seconds": seconds,
        "prompts": len(prompts),
        "repeats": len(prompts[0]),
    }


def summaries(timings: Timings, prompts: Sequence[int], reference: str = OUR_PLAIN) -> dict[str, dict]:
    """The summary of every leg over the prompts with these numbers; `reference` is the leg whose tokens count as right."""
    chosen = {name: [runs[index] for index in prompts] for name, runs in timings.items()}
    return {name: summary(runs, chosen[reference]) for name, runs in chosen.items()}


def prediction(leg: dict, plain: dict, k: int, costs: cost_model.Costs) -> dict:
    """The measured-cost prediction for draft length `k` beside what was measured."""
    predicted = cost_model.measured_cost_speedup(leg["tokens_per_round"], k, costs)
    measured = plain["seconds"] / leg["seconds"]
    return {
        "draft_length": k,
        "tokens_per_round": leg["tokens_per_round"],
        "verify_cost": costs.verify_cost(k),
        "predicted_speedup": predicted,
        "speedup": measured,
        "decode_only_speedup": plain["decode_ms_per_token"] / leg["decode_ms_per_token"],
        "speedup_to_predicted": measured / predicted,
        "tokens_per_second": leg["tokens_per_second"],
    }


def our_name(k: int) -> str:
    return f"ours, k = {k}"


def decode_config(pair: Pair, settings: Settings, draft_length: int) -> DecodeConfig:
    return DecodeConfig(draft_length, settings.new_tokens, allowed_token_ids=pair.vocabulary)


def our_legs(pair: Pair, settings: Settings, draft_lengths: list[int]) -> dict[str, Leg]:
    """Plain decoding and every draft length."""
    legs = {OUR_PLAIN: our_leg(pair.target, None, decode_config(pair, settings, 1))}
    for k in draft_lengths:
        legs[our_name(k)] = our_leg(pair.target, pair.drafter(), decode_config(pair, settings, k))
    return legs


def adaptive_legs(pair: Pair, settings: Settings, costs: cost_model.Costs) -> dict[str, Leg]:
    """The draft length chosen token by token, up to the longest of the sweep, from the costs that the sweep measured."""
    drafter = pair.drafter(AdaptiveDraftLength(costs))
    return {OUR_ADAPTIVE: our_leg(pair.target, drafter, decode_config(pair, settings, max(settings.draft_lengths)))}


def lookup_legs(pair: Pair, stock: PreTrainedModel, settings: Settings) -> dict[str, Leg]:
    """Prompt lookup, ours and transformers', with the same n-gram, at the longest draft length: copies cost nothing. And
    ours with the draft where nothing can be copied."""
    k = max(settings.draft_lengths)
    drafter = PromptLookupDrafter(settings.lookup_ngram)
    both = LookupThenModelDrafter(PromptLookupDrafter(settings.lookup_ngram, settings.lookup_ngram), pair.drafter())
    return {
        OUR_LOOKUP: our_leg(pair.target, drafter, decode_config(pair, settings, k)),
        OUR_LOOKUP_MODEL: our_leg(pair.target, both, decode_config(pair, settings, k)),
        THEIR_LOOKUP: transformers_leg(stock, settings.new_tokens, None, k, settings.lookup_ngram),
    }


def transformers_legs(pair: Pair, stock: PreTrainedModel, settings: Settings, k: int) -> dict[str, Leg]:
    return {
        THEIR_PLAIN: transformers_leg(stock, settings.new_tokens),
        THEIR_ASSISTED: transformers_leg(stock, settings.new_tokens, pair.draft, k),
    }


def llama_legs(pair: Pair, settings: Settings, longest: int, skipped: dict[str, str]) -> dict[str, Leg]:
    """llama.cpp's plain decoding of the file that the target was made from."""
    if importlib.util.find_spec("llama_cpp") is None:
        skipped[LLAMA_PLAIN] = "the package llama_cpp is not installed"
    elif pair.gguf is None:
        skipped[LLAMA_PLAIN] = "the target has no GGUF file"
    else:
        return {LLAMA_PLAIN: llama_cpp_leg(pair.gguf, longest, settings.new_tokens)}
    return {}


def vllm_legs(
    pair: Pair, settings: Settings, options: VllmOptions, k: int, longest: int, skipped: dict[str, str]
) -> dict[str, VllmProcess]:
    """vLLM's plain decoding and its draft-model speculation; a failed start is no reason to lose the other legs."""
    legs: dict[str, VllmProcess] = {}
    dtype = str(pair.target.dtype).removeprefix("torch.")
    for name, draft in ((VLLM_PLAIN, None), (VLLM_DRAFT, pair.draft_folder)):
        if options.python is None:
            skipped[name] = "no --vllm-python given"
            continue
        print(f"Starting {name} in {dtype} ...", file=sys.stderr)
        try:
            engine = {"model": pair.target_folder, "dtype": dtype, "max_model_len": longest}
            leg = VllmProcess(options.python, engine, draft, k, options.compile, settings.new_tokens)
            leg([1, 2, 3])
            legs[name] = leg
        except PipelineError as error:
            print(f"warning: {name}: {error}", file=sys.stderr)
            skipped[name] = error.reason
    return legs


def sweep(pair: Pair, stock: PreTrainedModel, texts: Texts, settings: Settings, result: dict) -> tuple[int, int]:
    """Time every draft length and prompt lookup once; returns the fastest k on the target domain and on the mixed set.

    Adds `draft_lengths` (predictions beside measurements), `costs` and `prompt_lookup` to `result`.
    """
    lengths = settings.draft_lengths
    probe = CostProbe(pair, lengths, settings)
    own = texts.domain[: settings.sweep_prompts]
    legs = our_legs(pair, settings, lengths) | lookup_legs(pair, stock, settings)
    title = f"draft lengths, {result['dtype']}"
    runs = interleaved(legs, own + texts.others, 1, settings.new_tokens, title, probe)
    others = range(len(own), len(own) + len(texts.others))
    domain = summaries(runs, range(len(own)))
    mixed = summaries(runs, [*range(min(settings.mixed_prompts, len(own))), *others])
    costs = probe.median()
    result["costs"] = costs.document()
    result["draft_lengths"] = [prediction(domain[our_name(k)], domain[OUR_PLAIN], k, costs) for k in lengths]
    result["prompt_lookup"] = {name: domain[name] for name in (OUR_LOOKUP, OUR_LOOKUP_MODEL, THEIR_LOOKUP)}
    best, best_mixed = (
        max(lengths, key=lambda k: found[our_name(k)]["tokens_per_second"]) for found in (domain, mixed)
    )
    return best, best_mixed


def main_legs(
    pair: Pair, stock: PreTrainedModel, texts: Texts, settings: Settings, k: int, options: VllmOptions, result: dict
) -> None:
    """Time the legs that the comparison is about; adds `legs` and `prediction` to `result`."""
    longest = max(map(len, texts.domain)) + settings.new_tokens + k + 1
    servers = vllm_legs(pair, settings, options, k, longest, result["skipped"])
    legs = {
        **our_legs(pair, settings, [k]),
        **(adaptive_legs(pair, settings, cost_model.Costs.from_document(result["costs"])) if "costs" in result else {}),
        **transformers_legs(pair, stock, settings, k),
        **servers,
        **llama_legs(pair, settings, longest, result["skipped"]),
    }
    probe = CostProbe(pair, [k], settings)
    try:
        runs = interleaved(
            legs, texts.domain, settings.repeats, settings.new_tokens, f"main legs, {result['dtype']}", probe
        )
    finally:
        for server in servers.values():
            server.close()
    result["legs"] = summaries(runs, range(len(texts.domain)))
    result["prediction"] = prediction(result["legs"][our_name(k)], result["legs"][OUR_PLAIN], k, probe.median())
    mode = "compiled" if options.compile else "eager"
    result["vllm"] = next(({"version": server.version, "mode": mode} for server in servers.values()), None)


def adaptive_ratio(pair: Pair, texts: Texts, settings: Settings, best_fixed: int, result: dict) -> float:
    """Tokens per second of adaptive k over those of the best fixed one on the mixed set."""
    fixed = our_name(best_fixed)
    legs = {
        fixed: our_leg(pair.target, pair.drafter(), decode_config(pair, settings, best_fixed)),
        **adaptive_legs(pair, settings, cost_model.Costs.from_document(result["costs"])),
    }
    prompts = texts.domain[: settings.mixed_prompts] + texts.others
    probe = CostProbe(pair, [best_fixed], settings)
    runs = interleaved(legs, prompts, settings.repeats, settings.new_tokens, f"mixed set, {result['dtype']}", probe)
    result["mixed"] = {"best_fixed_draft_length": best_fixed, "legs": summaries(runs, range(len(prompts)), fixed)}
    found = result["mixed"]["legs"]
    return found[OUR_ADAPTIVE]["tokens_per_second"] / found[fixed]["tokens_per_second"]


def batch_speedups(pair: Pair, texts: Texts, settings: Settings, result: dict) -> float:
    """For every batch size the costs, the best k that they predict with its speedup, and that speedup measured; returns
    plain tokens per second of the largest batch over those of the smallest.

    Acceptance by position is that of the longest draft on the same prompts; they are repeated in turn to fill a batch.
    Adds `batches` and `largest_paying_batch` to `result`.
    """
    lengths, longest = settings.draft_lengths, max(settings.draft_lengths)
    drafted = decode(pair.target, pair.drafter(), texts.domain, decode_config(pair, settings, longest), seed=0, slots=1)
    rounds = [[(block.accepted, block.drafted) for block in sequence.rounds] for sequence in drafted.sequences]
    by_position = acceptance_by_position(rounds, longest) or [0.0] * longest
    context = round(statistics.mean(map(len, texts.domain))) + settings.new_tokens // 2
    measured: dict[int, cost_model.Costs] = {}
    rows = []
    for batch in settings.batches:
        costs = measured[batch] = measure_costs(pair.target, pair.drafter(), lengths, context, 3, rows=batch)
        k = cost_model.best_draft_length(by_position, lengths, costs)
        prompts = [texts.domain[row % len(texts.domain)] for row in range(batch)]
        plain, speculative = batch_seconds(pair, settings, prompts, k)
        rows.append(
            {
                "batch": batch,
                "costs": costs.document(),
                "best_draft_length": k,
                "break_even_acceptance": cost_model.break_even_acceptance(k, costs),
                "predicted_speedup": cost_model.measured_cost_speedup(
                    cost_model.tokens_per_round(by_position, k), k, costs
                ),
                "speedup": plain / speculative,
                "plain_tokens_per_second": batch * settings.new_tokens / plain,
            }
        )
    paying = [row["batch"] for row in itertools.takewhile(lambda row: row["speedup"] > 1, rows)]
    predicted = cost_model.largest_paying_batch(by_position, lengths, measured)
    result["batches"] = rows
    result["largest_paying_batch"] = {"predicted_speedup": predicted, "speedup": max(paying, default=None)}
    return rows[-1]["plain_tokens_per_second"] / rows[0]["plain_tokens_per_second"]


def batch_seconds(pair: Pair, settings: Settings, prompts: list[list[int]], k: int) -> tuple[float, float]:
    """Median seconds of decoding all `prompts` at once, plainly and with `k` drafted tokens, in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(settings.repeats):
        for found, drafter in zip(seconds, (None, pair.drafter()), strict=True):
            started = time.perf_counter()
            decode(pair.target, drafter, prompts, decode_config(pair, settings, k), seed=0)
            found.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def round_seconds(pair: Pair, texts: Texts, settings: Settings, k: int) -> dict[int, float]:
    """Median seconds of a round at draft length `k` by tokens of context, prefill left out.

    A round does the same work whatever it accepts, so rounds compare where tokens would not.
    """
    leg = our_leg(pair.target, pair.drafter(), decode_config(pair, settings, k))
    found: dict[int, list[float]] = {context: [] for context in settings.contexts}
    for repeat in range(settings.repeats + 1):
        for context, seconds in found.items():
            run = leg(texts.long[:context])
            if repeat:
                seconds.append(run.decode_seconds / run.rounds)
    return {context: statistics.median(seconds) for context, seconds in found.items()}


def measure(
    pair: Pair, texts: Texts, settings: Settings, options: VllmOptions, draft_length: int | None, dtype: str
) -> dict:
    """Everything about one data type; briefly where the `draft_length` is given."""
    stock, brief = pair.target, draft_length is not None
    pair = dataclasses.replace(pair, target=decoding_view(stock))
    result: dict = {"dtype": dtype, "measured": "briefly" if brief else "in full", "skipped": {}}
    values: dict[str, float | None] = {}
    if brief:
        texts = dataclasses.replace(texts, domain=texts.domain[: settings.brief_prompts])
    else:
        draft_length, best_mixed = sweep(pair, stock, texts, settings, result)
    result["draft_length"] = draft_length
    main_legs(pair, stock, texts, settings, draft_length, options, result)
    if not brief:
        values["adaptive"] = adaptive_ratio(pair, texts, settings, best_mixed, result)
        values["batch"] = batch_speedups(pair, texts, settings, result)
        rounds = round_seconds(pair, texts, settings, draft_length)
        result["round_ms_by_context"] = {str(context): 1000 * seconds for context, seconds in rounds.items()}
        values["context"] = rounds[settings.contexts[1]] / rounds[settings.contexts[0]]
    values |= ratios(result["legs"], draft_length)
    values["prediction"] = result["prediction"]["speedup_to_predicted"]
    result["targets"] = [target_row(name, values.get(name)) for name in TARGETS]
    return result


def ratios(legs: dict[str, dict], k: int) -> dict[str, float | None]:
    """Our tokens per second over the others'."""

    def over(ours: str, theirs: str) -> float | None:
        return legs[ours]["tokens_per_second"] / legs[theirs]["tokens_per_second"] if theirs in legs else None

    return {
        "plain": over(OUR_PLAIN, THEIR_PLAIN),
        "vllm": over(our_name(k), VLLM_DRAFT),
        "assisted": over(our_name(k), THEIR_ASSISTED),
    }


def load_texts(settings: Settings, seed: int) -> Texts:
    """Prompts drawn from the dev answers, and a long text made of them."""
    folder = stage.input_path("data/answers/dev")
    domain = read_facts(folder)["target_domain"]
    answers = read_answers(folder)
    own = [answer for answer in answers if answer.domain == domain]
    others = sorted({answer.domain for answer in answers} - {domain})
    draw = random.Random(seed)
    chosen = draw.sample(own, min(settings.prompts, len(own)))
    rest = [
        answer
        for name in others
        for answer in draw.sample([answer for answer in answers if answer.domain == name], settings.mixed_prompts)
    ]
    long = [token for answer in own for ids in (answer.prompt_ids, answer.answer_ids) for token in ids.tolist()]
    if len(long) < max(settings.contexts):
        raise PipelineError(
            f"The dev texts of {domain} have {len(long)} tokens, {max(settings.contexts)} are needed.",
            "raise the number of dev prompts and run `dvc repro distill`.",
        )
    return Texts([a.prompt_ids.tolist() for a in chosen], [a.prompt_ids.tolist() for a in rest], long)


def load_pair(config: Config, dtype: str) -> Pair:
    """The configured target and the distilled draft, both in `dtype`."""
    target = Target(dataclasses.replace(config.target, dtype=dtype), stage.input_path(""))
    folder = stage.input_path("data/draft")
    draft, head = load_draft(folder, target)
    cast_parameters(draft, DTYPES[dtype])
    half, gguf = config.decode.draft_half_weights, packaged_gguf(config.target.id)
    return Pair(target.model, draft, head, half, range(target.vocabulary_size), target.location, str(folder), gguf)


def tiny_pair(folder: Path, dtype: str) -> Pair:
    """The tiny target with three of its four layers as the draft."""
    save_tiny_target(folder)
    target = load_model(str(folder), ModelConfig(id=str(folder), dtype=dtype))
    head = list(range(target.config.vocab_size))
    return Pair(target, keep_layers(target, [0, 1, 2]), head, False, range(len(head)), str(folder), str(folder), None)


def tiny_texts(settings: Settings) -> Texts:
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 259) for _ in range(length)] for length in (20, 30, 25, 35)]
    return Texts(prompts[: settings.prompts], prompts[settings.prompts :], draw.choices(range(3, 259), k=400))


def vllm_python(text: str) -> Path:
    """Check, before anything is measured, that this Python has vLLM."""
    python = Path(text).absolute()
    probe = [python, "-c", "import importlib.metadata; importlib.metadata.version('vllm')"]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise argparse.ArgumentTypeError(f"{text} is no Python that has vLLM installed") from None
    return python


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    native = str(resolve_dtype("auto", default_device())).removeprefix("torch.")
    both = sorted(["float32", "bfloat16"], key=lambda name: name != native)
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=both,
        help="data types, the first one measured in full; default: %(default)s",
    )
    parser.add_argument("--vllm-python", type=vllm_python, help="the Python of a virtual environment that has vLLM")
    parser.add_argument(
        "--vllm-compile", action="store_true", help="let vLLM compile the models first: minutes, then somewhat faster"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the figures go; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="try every step on a tiny model; the figures mean nothing")
    arguments = parser.parse_args()
    if arguments.quick and arguments.output == RESULTS:
        parser.error("--quick needs --output: its figures must not replace the results")
    return arguments


def command(arguments: argparse.Namespace) -> str:
    """The command line, without the place of vLLM's Python."""
    place = arguments.vllm_python
    return " ".join("PATH" if place and Path(word).absolute() == place else word for word in sys.argv)


def run(arguments: argparse.Namespace) -> dict:
    """Measure each data type; returns what the JSON file holds."""
    settings = QUICK if arguments.quick else FULL
    with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
        config = stage.typed_config(compose("config"), Config)
    options = VllmOptions(arguments.vllm_python, arguments.vllm_compile)
    with tempfile.TemporaryDirectory() as folder:
        texts = tiny_texts(settings) if arguments.quick else load_texts(settings, config.seed)
        found: list[dict] = []
        for dtype in arguments.dtypes:
            k = found[0]["draft_length"] if found else None
            with quiet_transformers():
                pair = tiny_pair(Path(folder), dtype) if arguments.quick else load_pair(config, dtype)
                found.append(measure(pair, texts, settings, options, k, dtype))
            print_tables(found[-1])
    return {
        "command": command(arguments),
        "machine": machine(),
        "model": "tiny" if arguments.quick else config.target.name,
        "settings": dataclasses.asdict(settings),
        "prompt_tokens": [len(prompt) for prompt in texts.domain],
        "dtypes": found,
    }


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    try:
        result = run(arguments)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    result["seconds"] = round(time.perf_counter() - started)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, "domain-draft/decoder-benchmark", 1, result)


if __name__ == "__main__":
    main()
