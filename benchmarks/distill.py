"""Distillation, measured: which recipe, how much data, which storage, against which trainer?

    python benchmarks/distill.py recipes            # screening at equal training time, then the best three at full length
    python benchmarks/distill.py data               # dev token acceptance against distinct answer tokens
    python benchmarks/distill.py storage            # bytes per token and acceptance of stored target probabilities
    python benchmarks/distill.py trl                # against TRL's DistillationTrainer at equal wall-clock time
    python benchmarks/distill.py memory             # peak of a training step, chunked against not
    python benchmarks/distill.py domains --generic-answers FOLDER   # the domain's draft against a generic one, on every domain
    python benchmarks/distill.py limits             # data/draft by temperature and on free writing, and what the gate says

Reads data/answers/{train,dev} (`dvc repro generate`) and params.yaml. Every finished row is at once in
benchmarks/results/distill_<table>.json, and a table that was interrupted goes on with the rows that it lacks. Golden answers
play no part.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import torch
from distill_domains import CREATIVE, CREATIVE_PROMPTS, creative_answers, judged
from distill_lab import EVALUATIONS, Lab, Results, Trained, show, tokens_of
from distill_on_policy import trl_leg
from distill_storage import StorageSettings, storage_table
from transformers import PreTrainedModel

from pipeline import stage
from pipeline.adapters.answer_files import read_answers
from pipeline.adapters.drafts import load_draft, read_draft_facts
from pipeline.core.artifacts import fingerprint
from pipeline.core.evaluation_settings import DISTILLED, Contestants, Draft
from pipeline.core.training import DistillConfig

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
CREATIVE_TEMPERATURES = (0.0, 1.0)
LIMIT_PROMPTS = 12
CREATIVE_TOKENS = 96
STORAGE_TOKENS = 20_000
STORAGE_EPOCHS = 3.0
TRL_BETAS = (0.0, 1.0)  # forward and reverse KL
TRL_LEARNING_RATES = (1e-4, 5e-4, 2e-3)
FULL_LENGTH = 3  # so many of the screened recipes are trained at full length

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
    "trimmed head alone": {"sampled_rows": 0},
    "whole head": {"sampled_rows": None},
    "data: original text": {"data": "text"},
    "data: half answers, half text": {"data": "mixture"},
    "token selection: 40 %": {"selected_share": 0.4, "reference_draft": "default"},
}
COLUMNS = ["name", "tokens_per_second", "dev_token_acceptance", "dev_token_acceptance_full_head", "dev_overlap", "dev_speedup", "draft_length"]  # fmt: skip


def recipes(lab: Lab, minutes: float, only: list[str] | None) -> None:
    """Screening at equal training time; the best by dev speedup are then trained for as long as the default recipe takes."""
    results = Results("recipes", {"minutes": minutes, "train_answer_tokens": tokens_of(lab.train), **lab.facts})
    screened = [(name, *_variant(lab, RECIPES[name])) for name in only or RECIPES]
    rows = []
    for name, settings, options in screened:
        facts = {**dataclasses.asdict(settings), **options, "length": "screening"}
        rows.append(results.row(name, facts, lambda s=settings, o=options: _screened(lab, minutes * 60, s, **o)))
    rows.sort(key=lambda row: -row["dev_speedup"])
    show(rows, COLUMNS)
    if only:
        return
    full = []
    for row in rows[:FULL_LENGTH]:
        settings, options = _variant(lab, RECIPES[row["name"]])
        epochs = settings.epochs * row["tokens_per_second"] / _default_speed(rows)
        settings = dataclasses.replace(settings, epochs=epochs)
        facts = {**dataclasses.asdict(settings), **options, "length": "full"}
        name = f"{row['name']} (full length)"
        full.append(results.row(name, facts, lambda s=settings, o=options: _full_length(lab, s, **o)))
    show(full, COLUMNS)


def _screened(lab: Lab, seconds: float, settings: DistillConfig, layers: list[int], data: str) -> dict:
    """A row of the screening. The reference draft of token selection is a default one, trained as long: not counted."""
    reference = None
    if settings.selected_share < 1:
        reference = lab.run_for(seconds, lab.settings).draft.eval()
    return _judged(lab, lab.run_for(seconds, settings, layers=layers, train=lab.corpus(data), reference=reference))


def _full_length(lab: Lab, settings: DistillConfig, layers: list[int], data: str) -> dict:
    reference = lab.run(lab.settings).draft.eval() if settings.selected_share < 1 else None
    return _judged(lab, lab.run(settings, layers=layers, train=lab.corpus(data), reference=reference))


def _default_speed(rows: list[dict]) -> float:
    return next(row["tokens_per_second"] for row in rows if row["name"] == "default")


def _variant(lab: Lab, changes: dict) -> tuple[DistillConfig, dict]:
    """The settings of a recipe, and the layers and data that it trains."""
    changes = dict(changes)
    options = {"layers": list(lab.config.draft.keep_layers), "data": changes.pop("data", "answers")}
    if "layers" in changes:
        first, last = changes.pop("layers")
        depth = lab.target.model_config.get_text_config().num_hidden_layers
        options["layers"] = [*range(first), *range(depth - last, depth)]
    if "learning_rate" in changes:
        changes["learning_rate"] *= lab.settings.learning_rate
    return dataclasses.replace(lab.settings, **changes), options


def _judged(lab: Lab, trained: Trained) -> dict:
    return {**trained.figures(), **lab.dev_speed(trained)}


def data(lab: Lab, minutes: float) -> None:
    """Dev token acceptance against distinct answer tokens, at equal training time, and what the curve predicts for more."""
    results = Results("data", {"minutes": minutes, **lab.facts})
    rows, size = [], len(lab.train)
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        chosen = sorted(lab.train, key=lambda answer: fingerprint(answer.prompt_id))[: round(share * size)]
        facts = {**dataclasses.asdict(lab.settings), "answer_tokens": tokens_of(chosen), "prompts": len(chosen)}
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
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from pipeline.core.losses import forward_kl
from pipeline.core.objective import Objective
rows, length, vocabulary, chunk = map(int, sys.argv[1:])
config = LlamaConfig(
    vocab_size=vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True,
)
draft = LlamaForCausalLM(config).train()
draft.get_input_embeddings().requires_grad_(False)
top = torch.randint(vocabulary, (rows * length, 20))
batch = {
    "input_ids": torch.randint(vocabulary, (rows, length)), "query": torch.arange(rows * length),
    "top_ids": top, "top_index": top, "top_logprobs": torch.full(top.shape, 0.04).log(),
}
objective = Objective(forward_kl, torch.arange(vocabulary), vocabulary, sampled_rows=None, chunk_tokens=chunk)
def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
before = kib("VmRSS")
objective.loss(draft, batch)[0].backward()
print((kib("VmHWM") - before) * 1024)
"""
PEAK_LENGTH = 256  # tokens of a row


def memory() -> None:
    """Peak memory that a training step adds, in a fresh process each: logits of 512 tokens at a time, and of all at once."""
    results = Results("memory", {"script": fingerprint(PEAK_SCRIPT)})
    rows = []
    for vocabulary in (16_384, 49_152):
        for count in (4, 8, 16):
            for name, chunk in (("512 at a time", 512), ("all at once", count * PEAK_LENGTH)):
                facts = {"vocabulary": vocabulary, "tokens": count * PEAK_LENGTH, "chunk": chunk}
                arguments = (count, PEAK_LENGTH, vocabulary, chunk)
                title = f"{facts['tokens']} tokens x {vocabulary}, {name}"
                rows.append(results.row(title, facts, lambda a=arguments: {"peak_mib": _peak_bytes(a) / 2**20}))
    show(rows, ["name", "tokens", "vocabulary", "chunk", "peak_mib"])


def _peak_bytes(arguments: tuple[int, ...]) -> int:
    command = [sys.executable, "-c", PEAK_SCRIPT, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(stage.PROJECT_ROOT)}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def storage(lab: Lab) -> None:
    """Bytes per scored token and acceptance of the forms in which the target's probabilities can be stored."""
    settings = StorageSettings(
        tokens=STORAGE_TOKENS,
        top=[8, 16, 20, 32, 64],
        draws=[20, 50],
        distill=dataclasses.replace(lab.settings, epochs=STORAGE_EPOCHS, evaluations=EVALUATIONS),
        seed=lab.config.seed,
    )
    results = Results("storage", {"tokens": STORAGE_TOKENS, "epochs": STORAGE_EPOCHS, **lab.facts})
    rows = results.table(lambda: storage_table(lab.target, lab.train, lab.dev, lab.initial_draft, settings), "form")
    show(rows, ["form", "entries", "bytes_per_token", "stored_mass", "dev_token_acceptance", "points_below_full"])


def trl(lab: Lab, minutes: float) -> None:
    """Ours against TRL's DistillationTrainer, and both in turn: same initial draft, train prompts and wall-clock budget."""
    results = Results("trl", {"minutes": minutes, **lab.facts})
    seconds = minutes * 60
    ours = results.row("ours", {}, lambda: lab.run_for(seconds, lab.settings).figures())
    theirs, both = [], []
    for beta in TRL_BETAS:
        for rate in TRL_LEARNING_RATES:
            facts = {"beta": beta, "learning_rate": rate}
            name = f"TRL, beta {beta:g}, learning rate {rate:g}"
            theirs.append(results.row(name, facts, lambda f=facts: _trl(lab, lab.initial_draft(), seconds, **f)))
        facts = {"beta": beta, "learning_rate": TRL_LEARNING_RATES[0]}
        name = f"ours for half the time, then TRL, beta {beta:g}"
        both.append(results.row(name, facts, lambda f=facts: _offline_then_trl(lab, seconds / 2, **f)))
    show([ours, *theirs, *both], ["name", "tokens_per_second", "answer_tokens_per_second", "dev_token_acceptance"])
    best = max(theirs, key=lambda row: row["dev_token_acceptance"])
    print(
        f"ours / TRL: {ours['tokens_per_second'] / best['tokens_per_second']:.1f} times the tokens per second, "
        f"{100 * (ours['dev_token_acceptance'] - best['dev_token_acceptance']):+.1f} points of dev token acceptance"
    )


def _trl(lab: Lab, draft: PreTrainedModel, seconds: float, beta: float, learning_rate: float) -> dict:
    prompts = [answer.prompt_ids.tolist() for answer in lab.train]
    row = trl_leg(draft, lab.target.model, lab.target.tokenizer, prompts, seconds, learning_rate, beta)
    return {**row, **lab.agreement(draft, lab.head(lab.train), lab.dev)}


def _offline_then_trl(lab: Lab, seconds: float, **settings: float) -> dict:
    return _trl(lab, lab.run_for(seconds, lab.settings).draft, seconds, **settings)


def domains(lab: Lab, minutes: float, generic_answers: Path) -> None:
    """A draft distilled on the domain and one on other text, same initial draft and training time, on every domain's dev.

    Generic answers to texts that dev has too are left out.
    """
    results = Results("domains", {"minutes": minutes, **lab.facts})
    held_out = {name for answer in lab.all_dev for name in (answer.prompt_id, answer.cluster)}
    generic = [a for a in read_answers(generic_answers) if not {a.prompt_id, a.cluster} & held_out]
    corpora = {lab.domain: lab.train, "generic": generic}
    rows = []
    for name, train in corpora.items():
        facts = {**dataclasses.asdict(lab.settings), "answer_tokens": tokens_of(train)}
        rows.append(
            results.row(
                f"{name} draft",
                facts,
                lambda t=train: _by_domain(lab, lab.run_for(minutes * 60, lab.settings, train=t)),
            )
        )
    show(rows, ["name", "answer_tokens", "trained_tokens", *sorted({answer.domain for answer in lab.all_dev})])


def _by_domain(lab: Lab, trained: Trained) -> dict:
    row = trained.figures()
    for domain in sorted({answer.domain for answer in lab.all_dev}):
        own = [answer for answer in lab.all_dev if answer.domain == domain]
        row[domain] = lab.agreement(trained.draft, trained.head, own)["dev_token_acceptance"]
    return row


def limits(lab: Lab) -> None:
    """The pipeline's own draft on dev prompts by temperature, and on free writing, where it should be refused."""
    draft, head = load_draft(stage.input_path("data/draft"), lab.target)
    drafts = {DISTILLED: Draft(draft, head)}
    models = Contestants(lab.target.model, drafts, True, range(lab.vocabulary), lab.domain)
    made = read_draft_facts(stage.input_path("data/draft"))
    results = Results("limits", {"draft": made["fingerprint"], **lab.facts})
    rows = []
    for temperature in TEMPERATURES:
        facts = {"domain": lab.domain, "temperature": temperature}
        rows.append(
            results.row(
                f"{lab.domain}, temperature {temperature:g}",
                facts,
                lambda t=temperature: judged(models, lab.dev, lab.domain, t, LIMIT_PROMPTS),
            )
        )
    creative = creative_answers(lab.target, CREATIVE_TOKENS, len(CREATIVE_PROMPTS), lab.config.seed)
    for temperature in CREATIVE_TEMPERATURES:
        facts = {"domain": CREATIVE, "temperature": temperature}
        rows.append(
            results.row(
                f"creative, temperature {temperature:g}",
                facts,
                lambda t=temperature: judged(models, creative, CREATIVE, t, LIMIT_PROMPTS),
            )
        )
    show(
        rows,
        [
            "name",
            "draft_length",
            "token_acceptance",
            "acceptance_rate",
            "speedup",
            "speedup_lower",
            "gate",
            "failed_checks",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["recipes", "data", "storage", "trl", "memory", "domains", "limits"])
    parser.add_argument("--minutes", type=float, default=2.0, help="training time of each row")
    parser.add_argument("--only", nargs="*", choices=RECIPES, help="recipes to screen; default: all")
    parser.add_argument(
        "--generic-answers", type=Path, help="domains: train answers of other text, data/answers/train of a run"
    )
    arguments = parser.parse_args()
    if arguments.table == "domains" and not arguments.generic_answers:
        parser.error("domains needs --generic-answers")
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
    elif arguments.table == "domains":
        domains(lab, arguments.minutes, arguments.generic_answers)
    elif arguments.table == "limits":
        limits(lab)


if __name__ == "__main__":
    main()
