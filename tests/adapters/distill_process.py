"""One process of the launches in test_many_processes.py: `distill_process.py <what> <folder>`."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from omegaconf import OmegaConf
from tiny_answers import answers_of
from tiny_models import tiny_llama
from tiny_settings import distill_config
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from pipeline.adapters import trainer
from pipeline.adapters.processes import join, split_target
from pipeline.adapters.trainer import DraftTrainer
from pipeline.core.pruning import keep_layers
from pipeline.stage import execute

HEAD = list(range(0, 100, 2)) + [1, 3]
SETTINGS = {
    "epochs": 2, "learning_rate": 2e-4, "tokens_per_step": 128, "evaluations": 4, "train_on_prompts": True, "sampled_rows": 8,
    "chunk_tokens": 32,
}  # fmt: skip
STEPS = 8  # four in an epoch
SAVED, INTERRUPTED = 6, 7  # the last checkpoint of a run that is ended, inside its second epoch, and its last step


class Begun(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == INTERRUPTED:
            os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == INTERRUPTED:
            raise KeyboardInterrupt


def distilled(checkpoints: Path, *callbacks: TrainerCallback, online: bool = False, broken: bool = False):
    """(draft, history, the step from which it began) of one run in float32; a launch that splits models splits its target."""
    begun = Begun()

    class Watched(DraftTrainer):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            for callback in (begun, *callbacks):
                self.add_callback(callback)

    target = tiny_llama(std=0.1, num_hidden_layers=4)
    answers = answers_of(target, 32)
    if broken:
        answers[5].top_logprobs[1] = float("nan")
    draft = keep_layers(target, [0, 3])
    config = distill_config(**SETTINGS, target="online" if online else "stored")
    with (
        mock.patch.object(trainer, "DraftTrainer", Watched),
        mock.patch.object(trainer, "resolve_dtype", lambda *_: torch.float32),
    ):
        history = trainer.distill(
            draft, answers, answers[:4], HEAD, config, 0, checkpoints, vocabulary=100,
            target=split_target(target) if online else None,
        )  # fmt: skip
    return draft, history, begun.step


def result(draft: PreTrainedModel, history: list[dict], begun: int, folder: Path | None = None) -> dict:
    """What is compared; with a folder, from which the draft is read again, whether it is there what it is in memory."""
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        logits = draft(ids).logits
        again = AutoModelForCausalLM.from_pretrained(folder)(ids).logits if folder else logits
    weights = torch.cat([parameter.detach().flatten() for parameter in draft.parameters()])
    return {"weights": weights, "history": history, "begun": begun, "reloads": torch.equal(logits, again)}


def allow_fsdp_on_cpu() -> None:
    """accelerate applies FSDP to accelerators only: let it take the CPU for one."""
    torch.distributed.init_process_group("gloo")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def straight_then_killed(folder: Path) -> None:
    processes = join()
    draft, *found = distilled(folder / "straight")
    if processes.is_main_process:
        draft.save_pretrained(folder / "draft")
    processes.wait_for_everyone()
    torch.save(result(draft, *found, folder / "draft"), folder / f"straight-{processes.process_index}.pt")
    distilled(folder / "killed", Killed())


def resumed_then_failing(folder: Path) -> None:
    torch.save(result(*distilled(folder / "killed")), folder / f"resumed-{join().process_index}.pt")

    @dataclass
    class Config:
        pass

    execute(lambda _: distilled(folder / "broken", broken=True), Config, OmegaConf.create({}))


def fsdp(folder: Path) -> None:
    allow_fsdp_on_cpu()
    torch.save(result(*distilled(folder / "straight", online=True)), folder / f"straight-{join().process_index}.pt")
    try:
        distilled(folder / "killed", Interrupted(), online=True)
    except KeyboardInterrupt:
        torch.save(result(*distilled(folder / "killed", online=True)), folder / f"resumed-{join().process_index}.pt")


if __name__ == "__main__":
    os.umask(0o077 if os.environ["RANK"] == "0" else 0o022)  # a file that others may read is not the first process's
    globals()[sys.argv[1]](Path(sys.argv[2]))
