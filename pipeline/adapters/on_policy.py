"""On-policy distillation through TRL: the draft answers the train prompts itself, the target scores every token.

At each token of the draft's answers, its end-of-answer token included, the loss is the generalised Jensen-Shannon
divergence (Agarwal et al., On-Policy Distillation of Language Models, 2023) of the target's p and the draft's q:

    beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q        0 < beta < 1
    KL(p || q)                                                                  beta = 0
    KL(q || p)                                                                  beta = 1

The three do not meet: the first vanishes towards both ends. TRL counts tokens from lengths, not from their values, and
does not scale the loss with the temperature. Prompts and answers are ids throughout.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from pipeline.adapters.targets import Target
from pipeline.adapters.trainer import (
    SHOWN_PROMPTS,
    Completion,
    FiniteGradients,
    newest_whole_checkpoint,
    optimizer_arguments,
)
from pipeline.core.answers import Answer
from pipeline.core.batches import AnswerBatches
from pipeline.core.errors import PipelineError
from pipeline.core.losses import forward_kl
from pipeline.core.models import (
    default_device,
    eos_token_ids,
    max_positions,
    quiet_transformers,
    resolve_dtype,
)
from pipeline.core.objective import Objective
from pipeline.core.training import DistillConfig, OnPolicyConfig

if TYPE_CHECKING:
    from trl import DistillationConfig

logger = logging.getLogger(__name__)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # comes with TRL and tells of kernels that nothing uses here


def check_on_policy() -> None:
    """Raise `PipelineError` where this process is one of several or sees several accelerators: TRL would split the work."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.cuda.device_count() > 1:
        raise PipelineError(
            "distill.on_policy works in one process on one accelerator.",
            "set distill.on_policy.steps=0, or start it without a launcher and with CUDA_VISIBLE_DEVICES=0.",
        )


def on_policy_phase(
    draft: PreTrainedModel,
    target: Target,
    train: list[Answer],
    dev: list[Answer],
    head_token_ids: list[int],
    vocabulary: range,
    config: DistillConfig,
    seed: int,
    start: dict,
    folder: Path,
    on_log: Callable[[dict], None],
) -> list[dict]:
    """Go on from offline training; afterwards `draft` holds whichever weights have the higher dev token acceptance.

    The draft answers the prompts of `train`. Returns the rows of `train_on_policy`, step and tokens counted on from
    `start`, the last row of offline training. The last one also has what was measured on `dev` after the phase and
    on_policy_kept: 1 if the dev_token_acceptance is higher than before the phase, else 0. `on_log` gets the rows as the
    steps end.
    """

    def counted_on(row: dict) -> dict:
        return row | {name: start[name] + row[name] for name in ("step", "tokens")}

    batches = AnswerBatches(
        dev, head_token_ids, config.tokens_per_forward, seed, max_positions=max_positions(draft.config)
    )
    head = torch.tensor(head_token_ids, device=draft.device)
    measured = Objective(forward_kl, head, len(vocabulary), sampled_rows=None, chunk_tokens=config.chunk_tokens)
    before = measured.dev_figures(draft, batches)["dev_token_acceptance"]
    offline = {name: tensor.to("cpu", copy=True) for name, tensor in draft.state_dict().items()}
    prompts = {answer.prompt_id: answer.prompt_ids.tolist() for answer in train}
    draft.get_input_embeddings().requires_grad_(not config.freeze_embeddings)
    models = (draft, target.model, target.tokenizer, vocabulary)
    history = train_on_policy(*models, prompts, config, seed, folder, lambda row: on_log(counted_on(row)))
    draft.requires_grad_(True)
    found = measured.dev_figures(draft, batches)
    after = found["dev_token_acceptance"]
    kept = after > before
    if not kept:
        draft.load_state_dict(offline)
    line = "on-policy phase: dev token acceptance %.4f before, %.4f after; the %s weights are kept"
    logger.warning(line, before, after, "on-policy" if kept else "offline")
    history[-1] |= {**found, "on_policy_kept": int(kept)}
    return [counted_on(row) for row in history]


def train_on_policy(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: range,
    prompts: dict[str, list[int]],
    config: DistillConfig,
    seed: int,
    folder: Path,
    on_log: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train `draft` in place for `config.on_policy.steps` steps, with the optimiser of `config`, on its answers to `prompts`
    (token ids by prompt id). `target`, its `tokenizer` and all configs stay as they are.

    Only ids in `vocabulary`, which mean the same to both models, are sampled and compared: output heads may be padded to
    different sizes. Continues from the newest whole checkpoint under `folder`. Returns a row per step: step, tokens
    (prompts' and answers', so far), loss, learning_rate; `on_log` gets each as it comes. Raises `PipelineError` when no prompt can be used, when nothing in
    `vocabulary` ends an answer, or when the loss or a gradient is not finite.
    """
    ends = _ends(target, tokenizer, vocabulary)
    prompts = _usable(prompts, vocabulary, config.on_policy.max_new_tokens, (draft, target))
    order = _in_order(list(prompts), config.on_policy, seed)
    prompts_of_step = functools.partial(_prompts_of_step, order, config.on_policy.prompts_per_step)
    unknown = list(range(len(vocabulary), draft.get_output_embeddings().weight.shape[0]))
    own_tokenizer = copy.deepcopy(tokenizer)
    own_tokenizer.eos_token = own_tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ends[0])
    with quiet_transformers(), _restored(draft, target), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL uses deprecated names of transformers
        draft.generation_config = GenerationConfig(eos_token_id=ends)
        trainer = _trainer_class()(
            model=draft,
            target=target,
            shared_ids=len(vocabulary),
            prompts_of_step=prompts_of_step,
            args=_arguments(config, unknown, seed, folder),
            train_dataset=[{"prompt": prompts[name]} for name in order],
            processing_class=own_tokenizer,
            callbacks=[
                _Progress(on_log),
                FiniteGradients("distill.on_policy.learning_rate", prompts_of_step),
                Completion(),
            ],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=newest_whole_checkpoint(folder))
        trainer.accelerator.unwrap_model(draft, keep_fp32_wrapper=False)
    draft.eval()
    return [_row(entry) for entry in trainer.state.log_history if "loss" in entry]


def _row(entry: dict) -> dict:
    """What the history keeps of an entry of the Trainer's log."""
    names = {"step": "step", "num_tokens": "tokens", "loss": "loss", "learning_rate": "learning_rate"}
    row = {ours: entry[theirs] for theirs, ours in names.items()}
    return row | {"tokens": int(row["tokens"])}


def _ends(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocabulary: range) -> list[int]:
    ends = [token for token in eos_token_ids(target.generation_config, tokenizer) if token in vocabulary]
    if not ends:
        raise PipelineError(
            "The target has no end-of-answer token that the draft knows, so the draft's answers would never end.",
            "set distill.on_policy.steps=0.",
        )
    return ends


def _in_order(prompts: list[str], config: OnPolicyConfig, seed: int) -> list[str]:
    """The prompts of all steps, one after the other: each round through `prompts` has an order of its own.

    Laid out beforehand, so that a run that was killed goes on with the prompts that come next.
    """
    rng = np.random.default_rng(seed)
    count = config.steps * config.prompts_per_step
    rounds = [rng.permutation(len(prompts)) for _ in range(math.ceil(count / len(prompts)))]
    return [prompts[index] for index in np.concatenate(rounds)[:count]]


def _prompts_of_step(order: list[str], prompts_per_step: int, step: int) -> str:
    """The prompts of `step`, from 0, in words for an error."""
    prompts = dict.fromkeys(order[step * prompts_per_step : (step + 1) * prompts_per_step])
    return f"answers to {', '.join(list(prompts)[:SHOWN_PROMPTS])}"


def _trainer_class() -> type[Trainer]:
    from trl import DistillationTrainer

    class OnPolicyTrainer(DistillationTrainer):
        """TRL's trainer, for a target and a draft that share their first `shared_ids` token ids."""

        def __init__(
            self, *, target: PreTrainedModel, shared_ids: int, prompts_of_step: Callable[[int], str], **options
        ) -> None:
            super().__init__(**options)  # without the target: TRL refuses heads of different sizes
            self.teacher_model = target
            self.shared_ids = shared_ids
            self.prompts_of_step = prompts_of_step

        def _send_telemetry(self) -> None:
            """Nothing leaves the machine."""

        def create_model_card(self, *args, **options) -> None:
            """Checkpoints are for resuming only."""

        def _tokenize_prompts(self, prompts: list[list[int]]):
            return prompts, None, {}  # they are ids already

        def autocast_smart_context_manager(self, cache_enabled=True):
            """Half precision for the loss: TRL's calls the decoders, and accelerate covers `forward` alone."""
            return self.accelerator.autocast()

        def _get_last_hidden_state(self, unwrapped_model, input_ids, attention_mask, logits_to_keep):
            """The states before each answer token, [rows, answer, hidden], at the positions that generation used: TRL's
            own count the padding on the left."""
            states = unwrapped_model.base_model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
                use_cache=False,
            ).last_hidden_state
            return states[:, -logits_to_keep - 1 : -1]

        def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
            with _first_rows(unwrapped_student, self.shared_ids), _first_rows(self.teacher_model, self.shared_ids):
                loss, entropy, count = super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
            if not torch.isfinite(loss):
                step = self.state.global_step
                raise PipelineError(
                    f"The on-policy loss is not finite at step {step + 1}, on {self.prompts_of_step(step)}; the weights are"
                    " those of the step before.",
                    "lower distill.on_policy.learning_rate, or look at these prompts.",
                )
            return loss, entropy, count

    return OnPolicyTrainer


def _arguments(recipe: DistillConfig, unknown_ids: list[int], seed: int, folder: Path) -> DistillationConfig:
    from trl import DistillationConfig

    config = recipe.on_policy
    return DistillationConfig(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.prompts_per_step,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        **optimizer_arguments(recipe),
        beta=config.beta,
        temperature=config.kl_temperature,
        generation_kwargs={"temperature": config.sampling_temperature, "suppress_tokens": unknown_ids or None},
        max_completion_length=config.max_new_tokens,
        shuffle_dataset=False,
        seed=seed,
        data_seed=seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=math.ceil(config.steps / 10),
        save_total_limit=2,
        activation_checkpointing=False,
        use_cache=True,  # the Trainer writes it into the draft's config
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=resolve_dtype("auto", default_device()) == torch.bfloat16,
    )


class _Progress(TrainerCallback):
    """A bar over the phase's tokens (tokens/s, time left); how many it will take is estimated from the steps so far."""

    def __init__(self, on_log: Callable[[dict], None] | None) -> None:
        self.on_row = on_log

    def on_train_begin(self, args, state, control, **kwargs):
        tokens = state.num_input_tokens_seen
        self.bar = tqdm(initial=tokens, desc="on-policy", unit=" tokens", unit_scale=True, mininterval=2)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.total = round(state.num_input_tokens_seen / state.global_step * state.max_steps)
        self.bar.update(state.num_input_tokens_seen - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")
            if self.on_row:
                self.on_row(_row(state.log_history[-1]))

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def _usable(
    prompts: dict[str, list[int]], vocabulary: range, max_new_tokens: int, models: tuple[PreTrainedModel, ...]
) -> dict[str, list[int]]:
    """The prompts whose ids all models know and whose answers fit into their positions."""
    longest = min(max_positions(model.config) or math.inf for model in models) - max_new_tokens
    usable = {name: ids for name, ids in prompts.items() if len(ids) <= longest and max(ids) in vocabulary}
    left_out = len(prompts) - len(usable)
    if not usable:
        raise PipelineError(
            f"None of {left_out} train prompts leaves room for distill.on_policy.max_new_tokens={max_new_tokens}.",
            "lower it.",
        )
    if left_out:
        logger.warning("on-policy phase: %d prompts are too long, or have tokens that the draft lacks", left_out)
    return usable


@contextlib.contextmanager
def _restored(draft: PreTrainedModel, target: PreTrainedModel) -> Iterator[None]:
    """Undo at the end what TRL leaves in models: special tokens in the draft's configs (T07), a `forward` in both."""
    text = draft.config.get_text_config()
    tokens = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation_config = draft.generation_config
    forwards = [(model, vars(model).get("forward")) for model in (draft, target)]
    try:
        yield
    finally:
        draft.generation_config = generation_config
        for name, value in tokens.items():
            setattr(text, name, value)
        for model, forward in forwards:
            vars(model).pop("forward", None)
            if forward is not None:
                model.forward = forward


@contextlib.contextmanager
def _first_rows(model: nn.Module, rows: int) -> Iterator[None]:
    """The model's output head is its first `rows` rows while the block runs."""
    head = model.get_output_embeddings()
    view = SimpleNamespace(weight=head.weight[:rows], bias=None if head.bias is None else head.bias[:rows])
    model.get_output_embeddings = lambda: view  # shadows the method
    try:
        yield
    finally:
        del model.get_output_embeddings
