"""What do the target's stored probabilities cost on disk, and what do they keep of the acceptance?

Every stored form is made from the same full log-probabilities of the same answers, written and read back by the pipeline's
own files, and a draft is trained from it with the same steps in the same order, normalised over the whole head. The forms:

- full: the whole distribution, from the target in the loop; nothing is stored.
- top k: the target's k most probable tokens; the loss keeps the rest in one bucket.
- sampled N: N tokens drawn from the target's distribution with replacement, each with the share of draws that it got, and
  nothing for the rest. Its forward KL has the full one's gradient in expectation (Anshumann et al., "Sparse Logit Sampling:
  Accelerating Knowledge Distillation in LLMs", ACL 2025, with the proposal at temperature 1). Tokens differ in how many
  distinct ids were drawn; the rows are filled up to N entries, which compression takes back.

Called by the storage table of benchmarks/distill.py.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.adapters.answer_files import read_shard, write_answers
from pipeline.adapters.targets import Target
from pipeline.adapters.trainer import distill
from pipeline.core.answers import Answer
from pipeline.core.training import DistillConfig
from pipeline.core.vocabulary import domain_token_ids

EMPTY = -50.0  # log-probability of an entry that only fills a row up: e^-50 weighs nothing, and is finite

# log-probabilities [tokens, vocab] -> ids and log-probabilities, both [tokens, entries]
Form = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class StorageSettings:
    tokens: int  # scored train tokens, prompts' and answers', that every form is made of
    top: list[int]  # entries of the top-k forms
    draws: list[int]  # draws of the sampled forms
    distill: DistillConfig
    seed: int


def storage_table(
    target: Target,
    train: list[Answer],
    dev: list[Answer],
    make_draft: Callable[[], PreTrainedModel],
    settings: StorageSettings,
) -> list[dict]:
    """One row per form: entries, bytes_per_token (file size / scored tokens), stored_mass (mean probability of all
    entries), dev_token_acceptance and its points_below_full, trained_tokens, seconds.

    The first row is the full distribution, from the target in the loop: nothing of it is stored. A file of a few thousand
    tokens compresses worse than a whole shard (67 against 55 bytes with 20 entries, for 1,500 against 20,000 tokens).
    `make_draft` gives the same untrained draft each time. The stored tops of `train` choose the draft's head, those of `dev` say what
    is accepted.
    """
    chosen = subset(train, settings.tokens, settings.seed)
    vocabulary = target.vocabulary_size
    head = domain_token_ids(train, settings.distill.head_tokens, target.eos_token_ids, range(vocabulary))
    generator = torch.Generator().manual_seed(settings.seed)
    forms = {f"top {k}": top_form(k) for k in settings.top}
    forms |= {f"sampled {draws}": sampled_form(draws, generator) for draws in settings.draws}
    full = {"form": "full, in the loop", "entries": vocabulary, "bytes_per_token": None, "stored_mass": 1.0}
    rows = [{**full, **trained(make_draft(), chosen, dev, head, settings, target, "online")}]
    for name, form in forms.items():
        stored, bytes_per_token = through_disk([reform(target.model, a, vocabulary, form) for a in chosen], vocabulary)
        facts = {"form": name, "entries": stored[0].top_ids.shape[1], "bytes_per_token": bytes_per_token}
        facts["stored_mass"] = stored_mass(stored)
        rows.append({**facts, **trained(make_draft(), stored, dev, head, settings, target, "stored")})
    reached = rows[0]["dev_token_acceptance"]
    return [{**row, "points_below_full": 100 * (reached - row["dev_token_acceptance"])} for row in rows]


def trained(
    draft: PreTrainedModel,
    train: list[Answer],
    dev: list[Answer],
    head: list[int],
    settings: StorageSettings,
    target: Target,
    probabilities: str,
) -> dict:
    """What a draft reaches on dev when it is trained from `train`; `probabilities` as distill.target."""
    started = time.perf_counter()
    config = dataclasses.replace(settings.distill, target=probabilities, sampled_rows=None)
    with tempfile.TemporaryDirectory() as folder:
        history = distill(
            draft,
            train,
            dev,
            head,
            config,
            settings.seed,
            Path(folder) / "checkpoints",
            vocabulary=target.vocabulary_size,
            target=target.model if probabilities == "online" else None,
        )
    return {
        "dev_token_acceptance": max(row["dev_token_acceptance"] for row in history if "dev_token_acceptance" in row),
        "trained_tokens": history[-1]["tokens"],
        "seconds": time.perf_counter() - started,
    }


def scored_tokens(answers: list[Answer]) -> int:
    return sum(len(answer.prompt_ids) - 1 + len(answer.answer_ids) for answer in answers)


def subset(answers: list[Answer], tokens: int, seed: int) -> list[Answer]:
    """Answers in random order until they have `tokens` scored tokens."""
    chosen: list[Answer] = []
    for index in np.random.default_rng(seed).permutation(len(answers)):
        if scored_tokens(chosen) >= tokens:
            break
        chosen.append(answers[index])
    return chosen


@torch.inference_mode()
def full_logprobs(model: PreTrainedModel, answer: Answer, vocabulary: int) -> Tensor:
    """The target's log-probabilities at each scored token, prompt first, float32 [m - 1 + n, vocabulary] on the CPU."""
    ids = torch.from_numpy(np.concatenate([answer.prompt_ids, answer.answer_ids]).astype(np.int64))
    logits = model(input_ids=ids[None, :-1].to(model.device), use_cache=False).logits[0, :, :vocabulary]
    return logits.float().log_softmax(dim=-1).cpu()


def reform(model: PreTrainedModel, answer: Answer, vocabulary: int, form: Form) -> Answer:
    """`answer` with its stored entries replaced by those that `form` takes of the full log-probabilities."""
    ids, logprobs = (tensor.numpy() for tensor in form(full_logprobs(model, answer, vocabulary)))
    ids = ids.astype(np.int32)
    first = len(answer.prompt_ids) - 1
    return dataclasses.replace(
        answer,
        top_ids=ids[first:],
        top_logprobs=logprobs[first:],
        prompt_top_ids=ids[:first],
        prompt_top_logprobs=logprobs[:first],
    )


def top_form(entries: int) -> Form:
    def form(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        top = logprobs.topk(entries, dim=-1)
        return top.indices, top.values

    return form


def sampled_form(draws: int, generator: torch.Generator) -> Form:
    """Most drawn first, then by id: what fills a row up are the lowest ids that were not drawn."""

    def form(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.multinomial(logprobs.exp(), draws, replacement=True, generator=generator)
        counts = torch.zeros(logprobs.shape, dtype=torch.float64).scatter_add_(
            -1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
        )
        order = counts - torch.arange(counts.shape[-1]) / counts.shape[-1]
        ids = order.topk(min(draws, counts.shape[-1]), dim=-1).indices
        return ids, (counts.gather(-1, ids) / draws).log().clamp(min=EMPTY).float()

    return form


def through_disk(answers: list[Answer], vocabulary: int) -> tuple[list[Answer], float]:
    """The answers as they come back from one shard, and the shard's bytes per scored token."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.parquet"
        write_answers(path, answers, {"vocabulary_size": vocabulary})
        return read_shard(path), path.stat().st_size / scored_tokens(answers)


def stored_mass(answers: list[Answer]) -> float:
    entries = [part for answer in answers for part in (answer.top_logprobs, answer.prompt_top_logprobs)]
    return float(sum(np.exp(part).sum() for part in entries) / scored_tokens(answers))
