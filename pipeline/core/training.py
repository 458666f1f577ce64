"""Distillation of a draft from stored target probabilities, on transformers' Trainer.

Rows of similar length share a micro-batch, padded on the right: under causal attention no real token sees the padding,
so no mask is needed. The loss is computed only at answer positions, over the draft's trimmed head, and normalised by the
answer tokens of the whole optimiser step.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path
from pipeline.core.errors import PipelineError
from pipeline.core.losses import forward_kl_top
from pipeline.core.models import default_device, quiet_transformers, resolve_dtype


@dataclass
class DistillConfig:
    """How the draft is trained."""

    epochs: float  # passes over the train answers
    learning_rate: float  # peak; warm-up is linear, decay a cosine to 0
    warmup_share: float  # of all optimiser steps
    weight_decay: float
    adam_beta2: float
    max_grad_norm: float
    tokens_per_step: int  # tokens of an optimiser step, prompts and padding included
    tokens_per_forward: int  # tokens of one forward pass; gradients accumulate up to tokens_per_step
    evaluations: int  # times that dev token acceptance is measured; the best checkpoint is kept
    head_tokens: int  # size of the draft's trimmed head
    freeze_embeddings: bool  # keep the initial token embeddings (and the head, where it is tied to them)


class AnswerBatches(Dataset):
    """Answers grouped into micro-batches of at most `tokens_per_forward` tokens, similar lengths together.

    Item i: input_ids [rows, length]; query [n], flat index of the position that predicts each answer token; labels [n],
    the answer tokens; target [n], the target's most probable token; top_index [n, top], column of each stored entry in
    the trimmed head or -1; top_logprobs [n, top].
    """

    def __init__(self, answers: list[Answer], head_token_ids: list[int], tokens_per_forward: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = sorted(rng.permutation(len(answers)), key=lambda i: _length(answers[i]))
        self.groups: list[list[Answer]] = [[]]
        for index in order:
            answer = answers[index]
            if self.groups[-1] and (len(self.groups[-1]) + 1) * _length(answer) > tokens_per_forward:
                self.groups.append([])
            self.groups[-1].append(answer)
        size = 1 + max(int(max(a.top_ids.max(), a.answer_ids.max())) for a in answers)
        self.column = np.full(max(size, max(head_token_ids) + 1), -1, dtype=np.int64)
        self.column[head_token_ids] = np.arange(len(head_token_ids))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        group = self.groups[index]
        width = max(map(_length, group))
        input_ids = np.zeros((len(group), width), dtype=np.int64)
        query = []
        for row, answer in enumerate(group):
            ids = np.concatenate([answer.prompt_ids, answer.answer_ids[:-1]])
            input_ids[row, : len(ids)] = ids
            start = row * width + len(answer.prompt_ids) - 1
            query.append(np.arange(start, start + len(answer.answer_ids)))
        top_ids = np.concatenate([answer.top_ids for answer in group])
        labels = torch.from_numpy(np.concatenate([answer.answer_ids for answer in group]).astype(np.int64))
        return {
            "input_ids": torch.from_numpy(input_ids),
            "query": torch.from_numpy(np.concatenate(query)),
            "labels": labels,
            "shift_labels": labels,  # tells the Trainer that labels are aligned already, when it counts them
            "target": torch.from_numpy(top_ids[:, 0].astype(np.int64)),
            "top_index": torch.from_numpy(self.column[top_ids]),
            "top_logprobs": torch.from_numpy(np.concatenate([answer.top_logprobs for answer in group])),
        }


def _length(answer: Answer) -> int:
    return len(answer.prompt_ids) + len(answer.answer_ids) - 1


def check_plain_head(model: PreTrainedModel) -> None:
    """Raise `PipelineError` for a draft that changes its logits after the output head (soft cap, scale)."""
    text = model.config.get_text_config()
    changes = [
        name
        for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1))
        if getattr(text, name, neutral) not in (neutral, None)
    ]
    if changes:
        raise PipelineError(
            f"A {text.model_type} draft changes its logits after the head ({', '.join(changes)}), which distillation"
            " does not reproduce.",
            "choose a draft of another family.",
        )


def answer_logits(model: PreTrainedModel, batch: dict[str, Tensor], head_token_ids: Tensor | None) -> Tensor:
    """The draft's logits before each answer token, [n, head]; the whole head when `head_token_ids` is None."""
    hidden = model.get_decoder()(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1])[batch["query"]]
    head = model.get_output_embeddings()
    if head_token_ids is None:
        return head(hidden)
    bias = None if head.bias is None else head.bias[head_token_ids]
    return F.linear(hidden, head.weight[head_token_ids], bias)


class DistillationTrainer(Trainer):
    """transformers' Trainer over ready micro-batches, with the distillation loss and acceptance as the metric."""

    loss_is_scaled_for_ga = True

    def __init__(self, *, head_token_ids: Tensor, dev_batches: AnswerBatches, **options) -> None:
        super().__init__(**options)
        self.head_token_ids = head_token_ids
        self.dev_batches = dev_batches

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, batch_size=1, shuffle=True, collate_fn=lambda items: items[0])
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = answer_logits(model, inputs, self.head_token_ids)
        losses = forward_kl_top(logits, inputs["top_index"], inputs["top_logprobs"])
        if not torch.isfinite(losses).all():
            raise PipelineError("The distillation loss is not finite.", "lower distill.learning_rate.")
        loss = losses.sum() / num_items_in_batch
        return (loss, logits) if return_outputs else loss

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Greedy token acceptance on dev: share of answer positions where both argmax agree."""
        acceptance = greedy_agreement(self.model, self.dev_batches, self.head_token_ids)
        metrics = {f"{metric_key_prefix}_token_acceptance": acceptance}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@torch.inference_mode()
def greedy_agreement(model: PreTrainedModel, batches: AnswerBatches, head_token_ids: Tensor) -> float:
    """Share of answer positions where the draft's best token in its trimmed head is the target's best token."""
    training = model.training
    model.eval()
    agreed = total = 0
    for index in range(len(batches)):
        batch = {name: tensor.to(model.device) for name, tensor in batches[index].items()}
        best = head_token_ids[answer_logits(model, batch, head_token_ids).argmax(dim=-1)]
        agreed += (best == batch["target"]).sum().item()
        total += len(best)
    model.train(training)
    return agreed / total


class _Progress(TrainerCallback):
    """A bar over the run's tokens (tokens/s, time left) with the newest loss and dev acceptance."""

    def __init__(self, tokens_per_optimiser_step: float) -> None:
        self.tokens_per_step = tokens_per_optimiser_step

    def on_train_begin(self, args, state, control, **kwargs):
        done, total = (int(steps * self.tokens_per_step) for steps in (state.global_step, state.max_steps))
        self.bar = tqdm(total=total, initial=done, desc="distill", unit=" tokens", unit_scale=True, mininterval=2)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(int(state.global_step * self.tokens_per_step) - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        names = {"loss": "kl", "eval_token_acceptance": "dev_acceptance"}
        self.bar.set_postfix({**getattr(self, "shown", {}), **{names[n]: f"{v:.3f}" for n, v in logs.items() if n in names}})

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def distill(
    draft: PreTrainedModel,
    train: list[Answer],
    dev: list[Answer],
    head_token_ids: list[int],
    config: DistillConfig,
    seed: int,
    checkpoints: Path,
) -> list[dict]:
    """Train `draft` in place; afterwards it holds the weights of the best dev token acceptance.

    Continues from the newest checkpoint under `checkpoints`. Returns the history: dicts with step, tokens, loss,
    learning_rate, dev_token_acceptance (each present where measured).
    """
    check_plain_head(draft)
    torch.manual_seed(seed)
    draft.get_input_embeddings().requires_grad_(not config.freeze_embeddings)
    batches = AnswerBatches(train, head_token_ids, config.tokens_per_forward, seed)
    dev_batches = AnswerBatches(dev, head_token_ids, config.tokens_per_forward, seed)
    accumulation = min(len(batches), max(1, round(config.tokens_per_step / config.tokens_per_forward)))
    steps = math.ceil(config.epochs * len(batches) / accumulation)
    tokens = sum(batch["input_ids"].numel() for batch in (batches[i] for i in range(len(batches))))
    tokens_per_step = tokens / len(batches) * accumulation
    interval = max(1, math.ceil(steps / config.evaluations))
    with quiet_transformers():
        trainer = DistillationTrainer(
            model=draft,
            args=_training_arguments(config, seed, checkpoints, steps, accumulation, interval),
            train_dataset=batches,
            eval_dataset=dev_batches,
            head_token_ids=torch.tensor(head_token_ids, device=draft.device),
            dev_batches=dev_batches,
            callbacks=[_Progress(tokens_per_step)],
        )
        trainer.remove_callback(PrinterCallback)
        checkpoint = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
        trainer.train(resume_from_checkpoint=checkpoint)
    draft.requires_grad_(True).eval()
    return _history(trainer.state.log_history, tokens_per_step)


def _training_arguments(
    config: DistillConfig, seed: int, checkpoints: Path, steps: int, accumulation: int, interval: int
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=1,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(config.warmup_share * steps)),
        weight_decay=config.weight_decay,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        seed=seed,
        data_seed=seed,
        logging_steps=max(1, interval // 4),
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=interval,
        save_strategy="steps",
        save_steps=interval,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="token_acceptance",
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=resolve_dtype("auto", default_device()) == torch.bfloat16,
    )


def _history(log: list[dict], tokens_per_step: float) -> list[dict]:
    """The Trainer's log as one row per step that logged anything."""
    names = {"loss": "loss", "learning_rate": "learning_rate", "eval_token_acceptance": "dev_token_acceptance"}
    rows: dict[int, dict] = {}
    for entry in log:
        found = {names[key]: value for key, value in entry.items() if key in names}
        if found:
            row = rows.setdefault(entry["step"], {"step": entry["step"], "tokens": round(entry["step"] * tokens_per_step)})
            row.update(found)
    return [rows[step] for step in sorted(rows)]


def write_history(path: Path, history: list[dict]) -> None:
    """CSV with the columns step, tokens, loss, learning_rate, dev_token_acceptance; empty where not measured."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        columns = ["step", "tokens", "loss", "learning_rate", "dev_token_acceptance"]
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(history)
