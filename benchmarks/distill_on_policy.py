"""The leg of benchmarks/distill.py that trains with TRL's own DistillationTrainer, by its own recipe.

TRL trains on-policy: the draft samples 128 tokens to each of 8 prompts, the target scores them, one optimiser step follows.
What differs from its defaults is named in `trl_leg`; the loss, the sampling and the masks are TRL's.
"""

from __future__ import annotations

import copy
import tempfile
import time

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import DistillationConfig, DistillationTrainer

from pipeline.core.models import quiet_transformers

PROMPTS_PER_STEP = 8
PROMPT_TOKENS = 64  # longer prompts keep their last tokens
NEW_TOKENS = 128
MOST_STEPS = 10**9  # the clock ends the run


class _IdsTrainer(DistillationTrainer):
    """TRL's trainer on prompts that are ids already, which sends no telemetry."""

    def _tokenize_prompts(self, prompts: list[list[int]]):
        return prompts, None, {}

    def _send_telemetry(self) -> None:
        pass


class _Clock(TrainerCallback):
    """Ends training after `seconds`, and counts the answers' tokens."""

    def __init__(self, seconds: float) -> None:
        self.budget = seconds
        self.answer_tokens = 0
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self.started
        control.should_training_stop = self.seconds >= self.budget

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "completions/mean_length" in logs:
            self.answer_tokens += round(logs["completions/mean_length"] * args.per_device_train_batch_size)

    def share_left(self, step: int) -> float:
        """Of the budget, in [0, 1]."""
        return max(0.0, 1 - self.seconds / self.budget)


def trl_leg(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_prompts: list[list[int]],
    seconds: float,
    learning_rate: float,
    beta: float,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict:
    """Train `draft` in place with TRL for about `seconds` (the step in progress is finished) and return its speed.

    Unlike TRL's defaults: `beta` is explicit (0 forward, 1 reverse KL); the learning rate, 1e-6 there, is the caller's and
    falls linearly to 0 with the time left instead of the steps left; no activation checkpointing, which is 20 % slower;
    on a CPU no mixed precision, which in one process reaches TRL's sampling only and is no faster there; no files.
    `temperature` is that of sampling and of the loss.

    Returns tokens_per_second (prompts and answers), answer_tokens_per_second, tokens, answer_tokens, steps, seconds (from
    the first step on) and the settings.
    """
    clock = _Clock(seconds)
    optimiser = torch.optim.AdamW(draft.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, clock.share_left)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        trainer = _IdsTrainer(
            model=draft,
            teacher_model=target,
            args=_arguments(folder, beta, temperature, seed),
            train_dataset=[{"prompt": ids[-PROMPT_TOKENS:]} for ids in train_prompts],
            processing_class=copy.deepcopy(tokenizer),
            callbacks=[clock],
            optimizers=(optimiser, schedule),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for model in (draft, target):
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        vars(model).pop("forward", None)  # TRL leaves one
    draft.eval()
    tokens = trainer.state.num_input_tokens_seen
    return {
        "tokens_per_second": tokens / clock.seconds,
        "answer_tokens_per_second": clock.answer_tokens / clock.seconds,
        "tokens": tokens,
        "answer_tokens": clock.answer_tokens,
        "steps": trainer.state.global_step,
        "seconds": clock.seconds,
        "settings": {
            "beta": beta,
            "temperature": temperature,
            "learning_rate": learning_rate,
            "prompts_per_step": PROMPTS_PER_STEP,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
        },
    }


def _arguments(folder: str, beta: float, temperature: float, seed: int) -> DistillationConfig:
    return DistillationConfig(
        output_dir=folder,
        max_steps=MOST_STEPS,
        per_device_train_batch_size=PROMPTS_PER_STEP,
        max_completion_length=NEW_TOKENS,
        beta=beta,
        temperature=temperature,
        activation_checkpointing=False,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        seed=seed,
    )
