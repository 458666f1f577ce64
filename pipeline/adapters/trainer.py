"""Distillation of a draft from stored target probabilities, on transformers' Trainer.

The loss is computed at the answers' tokens, and the prompts' if asked for (pipeline.core.objective), and normalised
by the number of those tokens in the whole optimiser step. The Trainer brings heavy optional packages along where they are
installed, hence its place here.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import json
import logging
import math
import shutil
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from pipeline.adapters.processes import join, sharding
from pipeline.core.answers import Answer
from pipeline.core.artifacts import atomic_path, file_sizes
from pipeline.core.batches import AnswerBatches, check_plain_head
from pipeline.core.errors import PipelineError
from pipeline.core.losses import divergence
from pipeline.core.models import default_device, max_positions, quiet_transformers, resolve_dtype
from pipeline.core.objective import Objective, agreement_figures
from pipeline.core.sampling import row_seed
from pipeline.core.training import DistillConfig

logger = logging.getLogger(__name__)

HISTORY = (
    "step",
    "tokens",
    "loss",
    "learning_rate",
    "dev_token_acceptance",
    "dev_token_acceptance_full_head",
    "dev_overlap",
    "dev_acceptance_rate",
    "on_policy_kept",
)
SHOWN_PROMPTS = 8  # in an error
COMPLETE = "complete.json"  # sizes of a checkpoint's files, put into it last


class DraftTrainer(Trainer):
    """transformers' Trainer over ready micro-batches; the draft's forward pass computes the distillation loss.

    The loss is part of the forward pass so that whatever wraps the draft (DDP, FSDP, DeepSpeed, autocast) sees it all.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *, dev_batches: AnswerBatches, **options) -> None:
        super().__init__(**options)
        self.model_accepts_loss_kwargs = True  # whatever the draft's class says: the loss is this class's own
        self.dev_batches = dev_batches
        self.objective: Objective | None = None

    def install(self, objective: Objective) -> None:
        """Make the draft's forward pass that of `objective`: its loss in training mode, else its agreement."""

        def forward(draft, **batch):
            return objective.loss(draft, batch) if draft.training else objective.agreement(draft, batch)

        self.objective = objective
        self.model.forward = types.MethodType(forward, self.model)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled and self.args.bf16:
            # accelerate's own policy rounds the stored log-probabilities, the loss and the summed gradients too
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """To this process's device as they are: for DeepSpeed the Trainer would round log-probabilities to bfloat16."""
        return {name: tensor.to(self.args.device) for name, tensor in inputs.items()}

    def get_train_dataloader(self) -> DataLoader:
        """Batches in one random order, dealt out to the processes in turn; where they do not go round, the last ones get
        the epoch's first again."""
        loader = DataLoader(self.train_dataset, batch_size=1, shuffle=True, collate_fn=lambda items: items[0])
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The batch's losses over the scored tokens of the whole optimiser step, on all processes.

        DDP and its like average gradients over processes, hence the factor.
        """
        self.objective.draw_rows(row_seed(self.args.seed, self.state.global_step))
        total, losses = model(**inputs)
        if not torch.isfinite(losses).all():
            index = int(inputs["index"])
            tokens = (~torch.isfinite(losses)).nonzero().squeeze(-1).cpu().numpy()
            prompts = self.train_dataset.prompt_ids(index, tokens)
            raise PipelineError(
                f"The distillation loss is not finite at optimiser step {self.state.global_step + 1}, on the answers to"
                f" {', '.join(prompts[:SHOWN_PROMPTS])}; the weights are those of the step before.",
                "lower distill.learning_rate, or look at these answers.",
            )
        loss = total / num_items_in_batch * self.accelerator.num_processes
        return (loss, losses) if return_outputs else loss

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Teacher-forced agreement on dev. Every process measures all of it and finds the same."""
        model = self.model_wrapped
        model.eval()
        found = agreement_figures(lambda batch: model(**self._prepare_inputs(batch)), self.dev_batches)
        model.train()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _EarlyStop(TrainerCallback):
    """Ends training once `patience` evaluations in a row were no better than the best before them.

    Counted from the history, which a checkpoint holds, so that a resumed run ends where the straight one does.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, args, state, control, **kwargs):
        found = [entry["eval_token_acceptance"] for entry in state.log_history if "eval_token_acceptance" in entry]
        if found and len(found) - 1 - found.index(max(found)) >= self.patience:
            control.should_training_stop = True

    on_train_begin = on_evaluate


class FiniteGradients(TrainerCallback):
    """Stops before an optimiser step that would write something else than numbers into the weights."""

    def __init__(self, learning_rate: str, prompts_of_step: Callable[[int], str] | None = None) -> None:
        """`learning_rate`: the name of its setting; `prompts_of_step`: number of a step, from 0 -> its prompts in words."""
        self.learning_rate = learning_rate
        self.prompts_of_step = prompts_of_step

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients:  # DeepSpeed keeps them to itself, and checks them
            return
        norms = torch._foreach_norm([getattr(gradient, "_local_tensor", gradient) for gradient in gradients])
        if not torch.isfinite(torch.stack(norms)).all():
            where = f", on {self.prompts_of_step(state.global_step)}" if self.prompts_of_step else ""
            raise PipelineError(
                f"The gradients are not finite at optimiser step {state.global_step + 1}{where}; the weights are those of"
                " the step before.",
                f"lower {self.learning_rate}.",
            )


class _Progress(TrainerCallback):
    """A bar over the run's tokens (tokens/s, time left) with the newest loss and dev acceptance."""

    def __init__(self, tokens_per_optimiser_step: float, on_log: Callable[[dict], None] | None) -> None:
        self.tokens_per_step = tokens_per_optimiser_step
        self.shown: dict[str, str] = {}
        self.on_row = on_log

    def on_train_begin(self, args, state, control, **kwargs):
        done, total = (int(steps * self.tokens_per_step) for steps in (state.global_step, state.max_steps))
        self.bar = tqdm(
            total=total,
            initial=done,
            desc="distill",
            unit=" tokens",
            unit_scale=True,
            mininterval=2,
            disable=not state.is_world_process_zero,
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(int(state.global_step * self.tokens_per_step) - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.on_row:
            for row in _history(state.log_history[-1:], self.tokens_per_step):
                self.on_row(row)
        names = {"loss": "loss", "eval_token_acceptance": "dev_acceptance"}
        self.shown |= {names[name]: f"{value:.3f}" for name, value in logs.items() if name in names}
        self.bar.set_postfix(self.shown)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class Completion(TrainerCallback):
    """Marks a checkpoint as whole, once all processes have written their part."""

    def on_save(self, args, state, control, **kwargs):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            with atomic_path(folder / COMPLETE) as temporary:
                temporary.write_text(json.dumps(file_sizes(folder, COMPLETE)), encoding="utf-8")


class BestHere(TrainerCallback):
    """Lets a run that continues look for its best checkpoint in its own folder.

    The Trainer notes the absolute path, where after a move or under another mount there is nothing or, worse, another
    run's checkpoint; without one, the last weights would be taken for the best.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        if state.best_global_step:
            state.best_model_checkpoint = str(Path(args.output_dir) / f"checkpoint-{state.best_global_step}")


def newest_whole_checkpoint(checkpoints: Path) -> str | None:
    """The newest checkpoint whose files are all there in full, as are those of the best one so far, which it names; others
    are named and, newer ones, removed."""
    folders = sorted(checkpoints.glob("checkpoint-*"), key=lambda folder: -int(folder.name.split("-")[-1]))
    for folder in folders:
        if not _is_whole(folder):
            logger.warning("%s is not whole (a killed save or a damaged file): it is passed over.", folder)
        elif (best := _best_of(folder)) and not _is_whole(best):
            logger.warning("%s builds on %s, which is not whole: it is passed over.", folder, best.name)
        else:
            return str(folder)
        shutil.rmtree(folder)
    return None


def _is_whole(folder: Path) -> bool:
    try:
        whole = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(whole) and whole == file_sizes(folder, COMPLETE)


def _best_of(folder: Path) -> Path | None:
    """The best checkpoint so far, as the checkpoint in `folder` knows it."""
    best = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["best_model_checkpoint"]
    return folder.parent / Path(best).name if best else None


def distill(
    draft: PreTrainedModel,
    train: list[Answer],
    dev: list[Answer],
    head_token_ids: list[int],
    config: DistillConfig,
    seed: int,
    checkpoints: Path,
    *,
    vocabulary: int,
    target: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    on_log: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train `draft` in place; afterwards it holds the weights of the best dev token acceptance.

    Continues from the newest checkpoint under `checkpoints`. Ids below `vocabulary` are those that target and draft share.
    `target` is needed for config.target=online, `reference` for config.selected_share < 1. Returns the history: dicts
    with step, tokens, loss, learning_rate, dev_token_acceptance, dev_token_acceptance_full_head, dev_overlap,
    dev_acceptance_rate (each present where measured). `on_log` gets such rows as they are measured, those of one step in parts.
    """
    for role, model in (("draft", draft), ("target", target), ("reference draft", reference)):
        if model is not None:
            check_plain_head(model.config, role, "choose a model of another family.")
    processes = join()
    share = max(1, config.tokens_per_step // processes.num_processes)
    config = replace(config, tokens_per_forward=min(config.tokens_per_forward, share))
    torch.manual_seed(seed)
    common = (head_token_ids, config.tokens_per_forward, seed)
    batches = AnswerBatches(train, *common, config.train_on_prompts, max_positions=max_positions(draft.config))
    dev_batches = AnswerBatches(dev, *common, max_positions=max_positions(draft.config))
    plan = _plan(config, batches, processes.num_processes)
    with _training_form(draft, config.freeze_embeddings), quiet_transformers():
        trained = copy.deepcopy(draft.cpu()) if sharding() else draft  # split in place, a model is one no more
        arguments = _training_arguments(config, seed, checkpoints, plan)
        trainer = _trainer(trained, arguments, batches, dev_batches, plan, config.patience, on_log)
        trainer.install(_objective(config, head_token_ids, vocabulary, target, reference, trainer.args.device))
        with processes.main_process_first():
            newest = newest_whole_checkpoint(checkpoints)
        trainer.train(resume_from_checkpoint=newest)
        if sharding():
            _load_gathered(draft.to(trainer.args.device), Path(trainer.state.best_model_checkpoint))
        else:
            trainer.accelerator.unwrap_model(draft, keep_fp32_wrapper=False)
            del draft.forward
    processes.wait_for_everyone()  # none still reads the checkpoints, which the caller may remove
    return _history(trainer.state.log_history, plan.tokens_per_step)


@contextlib.contextmanager
def _training_form(draft: PreTrainedModel, freeze_embeddings: bool) -> Iterator[None]:
    """Set what differs while a draft is trained; afterwards it is as before, every weight trainable, in evaluation mode."""
    attention, use_cache = draft.config._attn_implementation, draft.config.use_cache
    draft.get_input_embeddings().requires_grad_(not freeze_embeddings)
    if default_device().type == "cpu":
        draft.set_attn_implementation("eager")  # the backward pass of fused attention is slower there
    try:
        yield
    finally:
        draft.set_attn_implementation(attention)
        draft.config.use_cache = use_cache  # the Trainer switches it off
        draft.requires_grad_(True).eval()


def _trainer(
    draft: PreTrainedModel,
    arguments: TrainingArguments,
    batches: AnswerBatches,
    dev_batches: AnswerBatches,
    plan: _Plan,
    patience: int | None,
    on_log: Callable[[dict], None] | None,
) -> DraftTrainer:
    trainer = DraftTrainer(
        model=draft,
        args=arguments,
        train_dataset=batches,
        eval_dataset=dev_batches,
        dev_batches=dev_batches,
        callbacks=[
            _Progress(plan.tokens_per_step, on_log),
            FiniteGradients("distill.learning_rate"),
            Completion(),
            BestHere(),
        ],
    )
    if patience:
        trainer.add_callback(_EarlyStop(patience))
    trainer.remove_callback(PrinterCallback)
    return trainer


def _load_gathered(draft: PreTrainedModel, checkpoint: Path) -> None:
    """Take the weights of a checkpoint whose model was split over processes; they were gathered when it was saved."""
    weights = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - set(draft.all_tied_weights_keys):
        raise PipelineError(
            f"{checkpoint} does not hold the whole draft ({len(missing)} weights are missing).",
            "gather the weights when saving: fsdp_state_dict_type: FULL_STATE_DICT, or zero3_save_16bit_model: true.",
        )


@dataclass
class _Plan:
    steps: int  # optimiser steps
    accumulation: int  # forward passes of a step on each process
    tokens_per_step: float  # on average, padding included
    interval: int  # steps between evaluations


def _plan(config: DistillConfig, batches: AnswerBatches, processes: int) -> _Plan:
    wanted = config.tokens_per_step / config.tokens_per_forward / processes
    passes = math.ceil(len(batches) / processes)  # of each process in an epoch
    accumulation = min(passes, max(1, round(wanted)))
    steps_per_epoch = math.ceil(passes / accumulation)  # the Trainer ends an epoch with a short step
    steps = math.ceil(config.epochs * steps_per_epoch)
    tokens_per_step = batches.padded_tokens / steps_per_epoch
    return _Plan(steps, accumulation, tokens_per_step, max(1, math.ceil(steps / config.evaluations)))


def _objective(
    config: DistillConfig,
    head_token_ids: list[int],
    vocabulary: int,
    target: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    device: torch.device,
) -> Objective:
    return Objective(
        divergence(config.loss, config.jensen_shannon_beta),
        torch.tensor(head_token_ids, device=device),
        vocabulary,
        sampled_rows=config.sampled_rows,
        chunk_tokens=config.chunk_tokens,
        kl_temperature=config.kl_temperature,
        target=target if config.target == "online" else None,
        reference=reference,
        selected_share=config.selected_share,
    )


def optimizer_arguments(config: DistillConfig) -> dict[str, Any]:
    """The optimiser's settings, as arguments of transformers' TrainingArguments."""
    return {
        "optim": {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}[config.optimizer],
        "weight_decay": config.weight_decay,
        "adam_beta2": config.adam_beta2,
        "max_grad_norm": config.max_grad_norm,
    }


def _training_arguments(config: DistillConfig, seed: int, checkpoints: Path, plan: _Plan) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=plan.steps,
        gradient_accumulation_steps=plan.accumulation,
        per_device_train_batch_size=1,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(config.warmup_share * plan.steps),
        **optimizer_arguments(config),
        seed=seed,
        data_seed=seed,
        logging_steps=max(1, plan.interval // 4),
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=plan.interval,
        save_strategy="steps",
        save_steps=plan.interval,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="token_acceptance",
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        log_level_replica="error",
        report_to="none",
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=resolve_dtype("auto", default_device()) == torch.bfloat16,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process trains on one: nn.DataParallel would cut batches in pieces
    return arguments


def _history(log: list[dict], tokens_per_step: float) -> list[dict]:
    """The Trainer's log as one row per step that logged anything."""
    names = {"loss": "loss", "learning_rate": "learning_rate"}
    names |= {name.replace("dev_", "eval_"): name for name in HISTORY if name.startswith("dev_")}
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
    """CSV with the columns `HISTORY`; empty where not measured."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, HISTORY)
        writer.writeheader()
        writer.writerows(history)
