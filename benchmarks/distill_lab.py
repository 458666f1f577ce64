"""What the tables of benchmarks/distill.py share: a draft trained and judged, and rows that are kept once measured."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from distill_text import scored_text
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts, shards
from pipeline.adapters.targets import Target
from pipeline.adapters.trainer import distill
from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path, fingerprint, fingerprint_files
from pipeline.core.batches import AnswerBatches
from pipeline.core.comparison import machine
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.cost_model import best_draft_length
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import ModelDrafter
from pipeline.core.evaluation import Engine, time_candidates, time_one
from pipeline.core.losses import forward_kl
from pipeline.core.metrics import acceptance_by_position
from pipeline.core.models import cast_parameters
from pipeline.core.objective import Objective
from pipeline.core.pruning import keep_layers
from pipeline.core.training import DistillConfig
from pipeline.core.vocabulary import domain_token_ids
from pipeline.distill import Config

RESULTS = Path(__file__).parent / "results"
PROBE_EPOCHS = 0.1  # of the first run of a variant
PROBE_SHARE = 0.1  # of the wall-clock budget, for the second
TOLERANCE = 0.03  # of the wall-clock budget
TRIES = 4  # runs by such a prediction, until one is within the tolerance
EVALUATIONS = 2
DRAFT_LENGTHS = [1, 2, 3, 4, 5, 6]
COST_CONTEXT_TOKENS, COST_REPEATS = 256, 15
SPEED_PROMPTS, SPEED_TOKENS = 8, 64


@dataclass
class Trained:
    """A draft with what its training took."""

    draft: PreTrainedModel
    head: list[int]
    history: list[dict]
    seconds: float

    @property
    def best(self) -> dict:
        """The history's row of the best dev token acceptance."""
        return max(
            (row for row in self.history if "dev_token_acceptance" in row), key=lambda row: row["dev_token_acceptance"]
        )

    def figures(self) -> dict:
        dev = {name: value for name, value in self.best.items() if name.startswith("dev_")}
        tokens = self.history[-1]["tokens"]
        return {"trained_tokens": tokens, "seconds": self.seconds, "tokens_per_second": tokens / self.seconds, **dev}


class Lab:
    """The target, its answers and the values of params.yaml, and how a draft is trained and judged with them."""

    def __init__(self) -> None:
        self.config = stage.typed_config(OmegaConf.load(stage.input_path("params.yaml")), Config)
        self.target = Target(self.config.target, stage.input_path(""))
        facts = read_facts(stage.input_path("data/answers/train"))
        self.train = read_answers(stage.input_path("data/answers/train"))
        self.all_dev = read_answers(stage.input_path("data/answers/dev"))
        self.domain = facts["target_domain"]
        self.dev = [answer for answer in self.all_dev if answer.domain == self.domain]
        self.warm = False

    @cached_property
    def facts(self) -> dict:
        """What every trained row depends on beside its own settings, as fingerprints."""
        files = [path for split in ("train", "dev") for path in shards(stage.input_path(f"data/answers/{split}"))]
        answers = fingerprint([fingerprint_files([path]) for path in files])
        return {"configuration": fingerprint(dataclasses.asdict(self.config)), "answers": answers}

    def corpus(self, name: str) -> list[Answer]:
        """What a draft is trained on: `answers` of the target, as much `text` of the prompts' documents, or half of each."""
        if name == "answers":
            return self.train
        if name == "text":
            return self.text
        return halves(self.train, 0) + halves(self.text, 1)

    @cached_property
    def text(self) -> list[Answer]:
        return scored_text(self.target, self.train, stage.input_path("data/prompts/train.parquet"))

    @property
    def vocabulary(self) -> int:
        return self.target.vocabulary_size

    @property
    def settings(self) -> DistillConfig:
        return self.config.distill

    def initial_draft(self, layers: list[int] | None = None) -> PreTrainedModel:
        return keep_layers(self.target.model, layers or self.config.draft.keep_layers).float()

    def run(
        self,
        settings: DistillConfig,
        layers: list[int] | None = None,
        train: list[Answer] | None = None,
        dev: list[Answer] | None = None,
        reference: PreTrainedModel | None = None,
    ) -> Trained:
        train = train or self.train
        head = self.head(train)
        draft = self.initial_draft(layers)
        online = self.target.model if settings.target == "online" else None
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            history = distill(
                draft,
                train,
                dev or self.dev,
                head,
                settings,
                self.config.seed,
                Path(folder) / "checkpoints",
                vocabulary=self.vocabulary,
                target=online,
                reference=reference,
            )
        return Trained(draft, head, history, time.perf_counter() - started)

    def run_for(self, seconds: float, settings: DistillConfig, **options) -> Trained:
        """Train for `seconds` within `TOLERANCE`, as many epochs as that allows, to the end of the schedule.

        A run takes a constant (its evaluations and checkpoints) and so much for each epoch. Both are learnt from two short
        runs, then from the newest two; the last of `TRIES` counts even if the machine's speed kept changing.
        """

        def timed(epochs: float) -> Trained:
            return self.run(dataclasses.replace(settings, epochs=epochs, evaluations=EVALUATIONS), **options)

        if not self.warm:
            timed(PROBE_EPOCHS)  # the first run makes kernels for its shapes
            self.warm = True
        epochs = PROBE_EPOCHS
        earlier = (epochs, timed(epochs).seconds)
        epochs *= max(2.0, PROBE_SHARE * seconds / earlier[1])
        newest = (epochs, timed(epochs).seconds)
        for _ in range(TRIES):
            epochs = epochs_for(seconds, earlier, newest)
            trained = timed(epochs)
            if abs(trained.seconds / seconds - 1) <= TOLERANCE:
                break
            earlier, newest = newest, (epochs, trained.seconds)
        return trained

    def head(self, train: list[Answer]) -> list[int]:
        """The trimmed head of a draft that is trained on `train`."""
        size, eos = self.settings.head_tokens, self.target.eos_token_ids
        return domain_token_ids(train, size, eos, range(self.vocabulary))

    def agreement(self, draft: PreTrainedModel, head: list[int], answers: list[Answer]) -> dict:
        """Token acceptance of a trained draft on `answers`."""
        options = {"sampled_rows": None, "chunk_tokens": self.settings.chunk_tokens}
        objective = Objective(forward_kl, torch.tensor(head), self.vocabulary, **options)
        batches = AnswerBatches(answers, head, self.settings.tokens_per_forward, self.config.seed)
        return objective.dev_figures(draft, batches)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.target.model.dtype

    def dev_speed(self, trained: Trained) -> dict:
        """Measured speedup on dev prompts, k chosen on them by predicted speedup as the evaluation does."""
        draft = cast_parameters(trained.draft, self.dtype)
        drafter = ModelDrafter(draft, trained.head, half_weights=False)
        common = {"max_new_tokens": SPEED_TOKENS, "allowed_token_ids": range(self.vocabulary)}
        costs = measure_costs(self.target.model, drafter, DRAFT_LENGTHS, COST_CONTEXT_TOKENS, COST_REPEATS)
        answers = sorted(self.dev, key=lambda answer: fingerprint(answer.prompt_id))[:SPEED_PROMPTS]
        longest = Decoder(self.target.model, drafter, DecodeConfig(draft_length=DRAFT_LENGTHS[-1], **common))
        rounds = [time_one(longest, answer.prompt_ids.tolist(), 0).sequence.rounds for answer in answers]
        counts = [[(block.accepted, block.drafted) for block in blocks] for blocks in rounds]
        by_position = acceptance_by_position(counts, DRAFT_LENGTHS[-1])
        k = best_draft_length(by_position, DRAFT_LENGTHS, costs)
        engine = Engine(self.target.model, DecodeConfig(draft_length=k, **common))
        engine.add("plain", None)
        engine.add("draft", drafter)
        requests, _ = time_candidates(engine, answers, lambda answer: ["draft"], 0, "dev speedup")
        drafted, accepted = (sum(sum(getattr(r, name)) for r in requests) for name in ("drafted", "accepted"))
        return {
            "dev_speedup": sum(r.plain_seconds for r in requests) / sum(r.seconds for r in requests),
            "draft_length": k,
            "cost_ratio": costs.cost_ratio,
            "acceptance_rate": accepted / drafted,
        }


class Results:
    """Rows of one table on disk, each under the fingerprint of what it depends on."""

    def __init__(self, table: str, settings: dict) -> None:
        """`settings`: what every row depends on."""
        self.path = RESULTS / f"distill_{table}.json"
        self.settings = settings
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))["rows"]
        except FileNotFoundError:
            kept = []
        self.rows = {row["key"]: row for row in kept}

    def row(self, name: str, facts: dict, measure: Callable[[], dict]) -> dict:
        """The row called `name`: the one on disk if it was measured from the same `facts`, else measured now."""
        key = fingerprint(name, facts, self.settings)
        if key not in self.rows:
            row = {"key": key, "name": name, **facts, **measure(), "machine": machine()}
            self.rows = {k: kept for k, kept in self.rows.items() if kept["name"] != name} | {key: row}
            self._save()
        return self.rows[key]

    def table(self, measure: Callable[[], list[dict]], name: str) -> list[dict]:
        """All rows at once, from the disk if they are all there."""
        key = fingerprint(self.settings)
        if not self.rows or any(row["key"] != key for row in self.rows.values()):
            self.rows = {row[name]: {"key": key, **row, "machine": machine()} for row in measure()}
            self._save()
        return list(self.rows.values())

    def _save(self) -> None:
        document = {
            "command": f"python benchmarks/distill.py {' '.join(sys.argv[1:])}",
            "settings": self.settings,
            "rows": list(self.rows.values()),
        }
        RESULTS.mkdir(exist_ok=True)
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def epochs_for(seconds: float, earlier: tuple[float, float], newest: tuple[float, float]) -> float:
    """The epochs of a run of `seconds`, by the line through two runs, each (epochs, seconds).

    In proportion to the newest run where the two say nothing of what an epoch takes; never beyond twice that.
    """
    (epochs, took), (last_epochs, last_took) = earlier, newest
    proportional = last_epochs * seconds / last_took
    if last_epochs != epochs and (each := (last_took - took) / (last_epochs - epochs)) > 0:
        found = last_epochs + (seconds - last_took) / each
        return min(found, 2 * proportional) if found > 0 else proportional
    return proportional


def halves(answers: list[Answer], which: int) -> list[Answer]:
    """One half of `answers`, 0 or 1, by a hash of the prompt's id."""
    return [answer for answer in answers if int(fingerprint(answer.prompt_id), 16) % 2 == which]


def tokens_of(answers: list[Answer]) -> int:
    """Answer tokens, prompts left out."""
    return sum(len(answer.answer_ids) for answer in answers)


def show(rows: list[dict], columns: list[str]) -> None:
    """Print `rows` as a Markdown table."""
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        cells = [row.get(name) for name in columns]
        print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)
