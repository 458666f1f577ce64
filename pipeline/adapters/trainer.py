"""Distillation of a draft from stored target probabilities, on transformers' Trainer.

The loss is computed at the answers' tokens, and the prompts' if asked for, over the draft's trimmed head, and normalised
by the number of those tokens in the whole optimiser step. The Trainer brings heavy optional packages along where they are
installed, hence its place here.
"""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path
from pipeline.core.batches import AnswerBatches, answer_logits, check_plain_head, greedy_agreement
from pipeline.core.errors import PipelineError
from pipeline.core.losses import forward_kl_top
from pipeline.core.models import default_device, max_positions, quiet_transformers, resolve_dtype
from pipeline.core.training import DistillConfig

COMPLETE = "complete"  # an empty file that is put into a checkpoint last


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

    def autocast_smart_context_manager(self, cache_enabled=True):
        """Half precision for the whole loss: the Trainer's own covers `model.forward`, which the loss does not call."""
        return self.accelerator.autocast()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = answer_logits(model, inputs, self.head_token_ids)
        losses = forward_kl_top(logits, inputs["top_index"], inputs["top_logprobs"])
        if not torch.isfinite(losses).all():
            raise PipelineError("The distillation loss is not finite.", "lower distill.learning_rate.")
        loss = losses.sum() / num_items_in_batch
        return (loss, logits) if return_outputs else loss

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Greedy token acceptance on dev: share of answer positions where both argmax agree."""
        with self.accelerator.autocast():
            acceptance = greedy_agreement(self.model, self.dev_batches, self.head_token_ids)
        metrics = {f"{metric_key_prefix}_token_acceptance": acceptance}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


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
        self.bar.set_postfix(
            {**getattr(self, "shown", {}), **{names[n]: f"{v:.3f}" for n, v in logs.items() if n in names}}
        )

    def on_save(self, args, state, control, **kwargs):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def newest_whole_checkpoint(checkpoints: Path) -> str | None:
    """The newest checkpoint that was written to its end; those that were not are removed."""
    for folder in checkpoints.glob("checkpoint-*"):
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder)
    return get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None


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
    common = (head_token_ids, config.tokens_per_forward, seed)
    batches = AnswerBatches(train, *common, config.train_on_prompts, max_positions=max_positions(draft.config))
    dev_batches = AnswerBatches(dev, *common, max_positions=max_positions(draft.config))
    accumulation = min(len(batches), max(1, round(config.tokens_per_step / config.tokens_per_forward)))
    steps = math.ceil(config.epochs * len(batches) / accumulation)
    tokens = sum(batch["input_ids"].numel() for batch in (batches[i] for i in range(len(batches))))
    tokens_per_step = tokens / len(batches) * accumulation
    interval = max(1, math.ceil(steps / config.evaluations))
    attention = draft.config._attn_implementation
    if draft.device.type == "cpu":
        draft.set_attn_implementation("eager")  # the backward pass of fused attention is slower there
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
        checkpoint = newest_whole_checkpoint(checkpoints)
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.accelerator.unwrap_model(draft, keep_fp32_wrapper=False)
    draft.set_attn_implementation(attention)
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
        warmup_steps=round(config.warmup_share * steps),
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
            row = rows.setdefault(
                entry["step"], {"step": entry["step"], "tokens": round(entry["step"] * tokens_per_step)}
            )
            row.update(found)
    return [rows[step] for step in sorted(rows)]


def write_history(path: Path, history: list[dict]) -> None:
    """CSV with the columns step, tokens, loss, learning_rate, dev_token_acceptance; empty where not measured."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        columns = ["step", "tokens", "loss", "learning_rate", "dev_token_acceptance"]
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(history)
