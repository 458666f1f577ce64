"""Distillation, measured: which recipe, how much data, which storage, against which trainer?

    python benchmarks/distill.py recipes            # screening at equal training time, then the best three at full length
    python benchmarks/distill.py data               # dev token acceptance against distinct answer tokens
    python benchmarks/distill.py storage            # bytes per token and acceptance of stored target probabilities
    python benchmarks/distill.py trl                # against TRL's DistillationTrainer at equal wall-clock time
    python benchmarks/distill.py memory             # peak of a training step, chunked against not

Reads data/answers/{train,dev} (`dvc repro generate`) and the values of conf/. Every finished row is in
benchmarks/results/distill_<table>.json at once, and a table that was interrupted goes on with the rows that it lacks. Golden
answers play no part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from distill_on_policy import trl_leg
from distill_storage import StorageSettings, storage_table
from hydra import compose, initialize_config_dir
from transformers import PreTrainedModel

from pipeline import stage
from pipeline.adapters.answer_files import read_answers, read_facts
from pipeline.adapters.targets import Target
from pipeline.adapters.trainer import distill
from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path, fingerprint
from pipeline.core.batches import AnswerBatches
from pipeline.core.comparison import machine
from pipeline.core.cost_measurement import measure_costs
from pipeline.core.cost_model import best_draft_length
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import ModelDrafter
from pipeline.core.evaluation import Engine, time_candidates, time_one
from pipeline.core.losses import forward_kl
from pipeline.core.metrics import acceptance_by_position
from pipeline.core.objective import Objective
from pipeline.core.pruning import keep_layers
from pipeline.core.training import DistillConfig
from pipeline.core.vocabulary import domain_token_ids
from pipeline.distill import Config

RESULTS = Path(__file__).parent / "results"
PROBE_EPOCHS = 0.1  # trained to learn a variant's speed
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
    """The target, its answers and the values of conf/, and how a draft is trained and judged with them."""

    def __init__(self) -> None:
        with initialize_config_dir(stage.CONF_DIR, version_base="1.3"):
            self.config = stage.typed_config(compose("config"), Config)
        self.target = Target(self.config.target, stage.input_path(""))
        facts = read_facts(stage.input_path("data/answers/train"))
        self.train = read_answers(stage.input_path("data/answers/train"))
        self.all_dev = read_answers(stage.input_path("data/answers/dev"))
        self.dev = [answer for answer in self.all_dev if answer.domain == facts["target_domain"]]
        self.warm = False

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
        eos = self.target.eos_token_ids
        head = domain_token_ids(train, settings.head_tokens, eos, range(self.vocabulary))
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
        """Train for about `seconds`, as many epochs as that allows, to the end of the schedule."""
        probe = dataclasses.replace(settings, epochs=PROBE_EPOCHS, evaluations=1)
        if not self.warm:
            self.run(probe, dev=self.dev[:1], **options)  # the first run makes kernels for its shapes
            self.warm = True
        probed = self.run(probe, dev=self.dev[:1], **options)
        epochs = PROBE_EPOCHS * seconds / probed.seconds
        return self.run(dataclasses.replace(settings, epochs=epochs, evaluations=EVALUATIONS), **options)

    def agreement(self, draft: PreTrainedModel) -> dict:
        """Dev token acceptance of a draft that was trained elsewhere."""
        eos = self.target.eos_token_ids
        head = domain_token_ids(self.train, self.settings.head_tokens, eos, range(self.vocabulary))
        options = {"sampled_rows": None, "chunk_tokens": self.settings.chunk_tokens}
        objective = Objective(forward_kl, torch.tensor(head), self.vocabulary, **options)
        batches = AnswerBatches(self.dev, head, self.settings.tokens_per_forward, self.config.seed)
        count, trimmed, full, overlap = sum(
            objective.agreement(draft, batches[i]) for i in range(len(batches))
        ).tolist()
        names = ("dev_token_acceptance", "dev_token_acceptance_full_head", "dev_overlap")
        return dict(zip(names, (trimmed / count, full / count, overlap / count), strict=True))

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.target.model.dtype

    def dev_speed(self, trained: Trained) -> dict:
        """Measured speedup on dev prompts, k chosen on them by predicted speedup as the evaluation does."""
        draft = trained.draft.to(self.dtype)
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
            row = {"key": key, "name": name, **facts, **measure()}
            self.rows = {k: kept for k, kept in self.rows.items() if kept["name"] != name} | {key: row}
            self._save()
        return self.rows[key]

    def table(self, measure: Callable[[], list[dict]], name: str) -> list[dict]:
        """All rows at once, from the disk if they are all there."""
        key = fingerprint(self.settings)
        if not self.rows or any(row["key"] != key for row in self.rows.values()):
            self.rows = {row[name]: {"key": key, **row} for row in measure()}
            self._save()
        return list(self.rows.values())

    def _save(self) -> None:
        document = {
            "command": f"python benchmarks/distill.py {' '.join(sys.argv[1:])}",
            "machine": machine(),
            "settings": self.settings,
            "rows": list(self.rows.values()),
        }
        RESULTS.mkdir(exist_ok=True)
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def show(rows: list[dict], columns: list[str]) -> None:
    """Print `rows` as a Markdown table."""
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        cells = [row.get(name) for name in columns]
        print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def _tokens(answers: list[Answer]) -> int:
    return sum(len(answer.answer_ids) for answer in answers)


RECIPES: dict[str, dict] = {
    "default": {},
    "loss: reverse KL": {"loss": "reverse_kl"},
    "loss: Jensen-Shannon 0.5": {"loss": "jensen_shannon"},
    "loss: total variation": {"loss": "total_variation"},
    "loss: LK": {"loss": "lk"},
    "loss: LK hybrid": {"loss": "lk_hybrid"},
    "learning rate halved": {"learning_rate": 0.5},
    "learning rate 1.5 times": {"learning_rate": 1.5},
    "2 layers: first, last": {"layers": (1, 1)},
    "4 layers: first 2, last 2": {"layers": (2, 2)},
    "embeddings trained too": {"freeze_embeddings": False},
    "answers alone, no prompts": {"train_on_prompts": False},
    "trimmed head alone": {"sampled_rows": 1},
    "whole head": {"sampled_rows": None},
}
COLUMNS = ["name", "tokens_per_second", "dev_token_acceptance", "dev_token_acceptance_full_head", "dev_overlap", "dev_speedup", "draft_length"]  # fmt: skip
TRL_BETAS = (0.0, 1.0)  # forward and reverse KL
TRL_LEARNING_RATES = (1e-4, 5e-4)
FULL_LENGTH = 3  # so many of the screened recipes are trained at full length


def recipes(lab: Lab, minutes: float, only: list[str] | None) -> None:
    """Screening at equal training time; the best by dev speedup are then trained for as long as the default recipe takes."""
    results = Results("recipes", {"minutes": minutes, "train_answer_tokens": _tokens(lab.train)})
    rows = []
    for name in only or RECIPES:
        settings, layers = _variant(lab, RECIPES[name])
        facts = {**dataclasses.asdict(settings), "layers": layers, "length": "screening"}
        rows.append(
            results.row(
                name, facts, lambda s=settings, ls=layers: _judged(lab, lab.run_for(minutes * 60, s, layers=ls))
            )
        )
    rows.sort(key=lambda row: -row["dev_speedup"])
    show(rows, COLUMNS)
    if only:
        return
    full = []
    for row in rows[:FULL_LENGTH]:
        settings, layers = _variant(lab, RECIPES[row["name"]])
        epochs = settings.epochs * row["tokens_per_second"] / _default_speed(rows)
        settings = dataclasses.replace(settings, epochs=epochs)
        facts = {**dataclasses.asdict(settings), "layers": layers, "length": "full"}
        full.append(
            results.row(
                f"{row['name']} (full length)", facts, lambda s=settings, ls=layers: _judged(lab, lab.run(s, layers=ls))
            )
        )
    show(full, COLUMNS)


def _default_speed(rows: list[dict]) -> float:
    return next(row["tokens_per_second"] for row in rows if row["name"] == "default")


def _variant(lab: Lab, changes: dict) -> tuple[DistillConfig, list[int]]:
    changes = dict(changes)
    layers = lab.config.draft.keep_layers
    if "layers" in changes:
        first, last = changes.pop("layers")
        depth = lab.target.model_config.get_text_config().num_hidden_layers
        layers = [*range(first), *range(depth - last, depth)]
    if "learning_rate" in changes:
        changes["learning_rate"] *= lab.settings.learning_rate
    return dataclasses.replace(lab.settings, **changes), list(layers)


def _judged(lab: Lab, trained: Trained) -> dict:
    return {**trained.figures(), **lab.dev_speed(trained)}


def data(lab: Lab, minutes: float) -> None:
    """Dev token acceptance against distinct answer tokens, at equal training time, and what the curve predicts for more."""
    results = Results("data", {"minutes": minutes})
    rows, size = [], len(lab.train)
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        chosen = sorted(lab.train, key=lambda answer: fingerprint(answer.prompt_id))[: round(share * size)]
        facts = {**dataclasses.asdict(lab.settings), "answer_tokens": _tokens(chosen), "prompts": len(chosen)}
        row = results.row(
            f"{len(chosen)} prompts", facts, lambda a=chosen: lab.run_for(minutes * 60, lab.settings, train=a).figures()
        )
        rows.append(row)
    show(rows, ["answer_tokens", "prompts", "trained_tokens", "dev_token_acceptance", "dev_token_acceptance_full_head"])
    logs = torch.tensor([float(row["answer_tokens"]) for row in rows]).log2()
    reached = torch.tensor([row["dev_token_acceptance"] for row in rows])
    slope = ((logs - logs.mean()) * (reached - reached.mean())).sum() / ((logs - logs.mean()) ** 2).sum()
    last = rows[-1]["dev_token_acceptance"]
    print(
        f"{slope:+.3f} for every doubling: {last + slope * 3.32:.3f} expected at ten times as many (a straight line in log tokens)"
    )


PEAK_SCRIPT = """
import resource, sys, torch
from pipeline.core.objective import chunked_sum
tokens, vocabulary, width, chunk = map(int, sys.argv[1:])
hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width)
loss = lambda part, rows, weight, bias: (rows @ weight.T).log_softmax(-1)[:, 0]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chunked_sum(loss, chunk, torch.ones(tokens), hidden, weight)[0].backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def memory(vocabulary: int = 49_152, width: int = 576) -> None:
    """Peak memory that head and loss add, in a fresh process each: chunked, and all tokens at once."""
    results = Results("memory", {"vocabulary": vocabulary, "width": width})
    rows = []
    for tokens in (1024, 2048, 4096, 8192):
        for name, chunk in (("chunks of 512", 512), ("all at once", tokens)):
            facts = {"tokens": tokens, "chunk": chunk}

            def peak(tokens=tokens, chunk=chunk) -> dict:
                arguments = [str(number) for number in (tokens, vocabulary, width, chunk)]
                command = [sys.executable, "-c", PEAK_SCRIPT, *arguments]
                environment = {**os.environ, "PYTHONPATH": str(stage.PROJECT_ROOT)}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                return {"peak_mib": int(done.stdout) / 2**20}

            rows.append(results.row(f"{tokens} tokens, {name}", facts, peak))
    show(rows, ["name", "tokens", "chunk", "peak_mib"])


STORAGE_TOKENS = 40_000
STORAGE_EPOCHS = 4.0


def storage(lab: Lab) -> None:
    """Bytes per scored token and acceptance of the forms in which the target's probabilities can be stored."""
    settings = StorageSettings(
        tokens=STORAGE_TOKENS,
        top=[8, 16, 20, 32, 64],
        draws=[20, 50],
        distill=dataclasses.replace(lab.settings, epochs=STORAGE_EPOCHS, evaluations=EVALUATIONS),
        seed=lab.config.seed,
    )
    results = Results("storage", {"tokens": STORAGE_TOKENS, "epochs": STORAGE_EPOCHS})
    rows = results.table(lambda: storage_table(lab.target, lab.train, lab.dev, lab.initial_draft, settings), "form")
    show(rows, ["form", "entries", "bytes_per_token", "stored_mass", "dev_token_acceptance", "points_below_full"])


def trl(lab: Lab, minutes: float) -> None:
    """Ours against TRL's DistillationTrainer: same initial draft, same train prompts, same wall-clock budget."""
    results = Results("trl", {"minutes": minutes})
    rows = [results.row("ours", {}, lambda: lab.run_for(minutes * 60, lab.settings).figures())]
    prompts = [answer.prompt_ids.tolist() for answer in lab.train]
    for beta in TRL_BETAS:
        for rate in TRL_LEARNING_RATES:
            facts = {"beta": beta, "learning_rate": rate}
            rows.append(
                results.row(
                    f"TRL, beta {beta:g}, learning rate {rate:g}",
                    facts,
                    lambda f=facts: _trl(lab, prompts, minutes, **f),
                )
            )
    show(rows, ["name", "tokens_per_second", "answer_tokens_per_second", "dev_token_acceptance"])
    best = max(rows[1:], key=lambda row: row["dev_token_acceptance"])
    print(
        f"ours / TRL: {rows[0]['tokens_per_second'] / best['tokens_per_second']:.1f} times the tokens per second, "
        f"{100 * (rows[0]['dev_token_acceptance'] - best['dev_token_acceptance']):+.1f} points of dev token acceptance"
    )


def _trl(lab: Lab, prompts: list[list[int]], minutes: float, beta: float, learning_rate: float) -> dict:
    draft = lab.initial_draft()
    row = trl_leg(draft, lab.target.model, lab.target.tokenizer, prompts, minutes * 60, learning_rate, beta)
    return {**row, **lab.agreement(draft)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["recipes", "data", "storage", "trl", "memory"])
    parser.add_argument("--minutes", type=float, default=2.0, help="training time of each row")
    parser.add_argument("--only", nargs="*", choices=RECIPES, help="recipes to screen; default: all")
    arguments = parser.parse_args()
    if arguments.table == "memory":
        memory()
        return
    lab = Lab()
    if arguments.table == "recipes":
        recipes(lab, arguments.minutes, arguments.only)
    elif arguments.table == "data":
        data(lab, arguments.minutes)
    elif arguments.table == "storage":
        storage(lab)
    elif arguments.table == "trl":
        trl(lab, arguments.minutes)


if __name__ == "__main__":
    main()
