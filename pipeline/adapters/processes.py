"""The processes of one launch (accelerate launch, torchrun), each with a GPU of its own; the first alone writes.

What is split over them (accelerate's FSDP2 or DeepSpeed) is the draft while it trains, and a target in the loop.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, disable_fsdp_ram_efficient_loading, is_deepspeed_available
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig, default_device
from pipeline.core.training import DistillConfig

if TYPE_CHECKING:  # its module brings targets and registries along
    from pipeline.adapters.drafts import DraftConfig

INSTALL_DEEPSPEED = "pip install deepspeed, or launch with conf/accelerate/fsdp2.yaml."


@dataclass
class LaunchConfig:
    """What stands before `-m pipeline.<stage>` in a stage's command."""

    distill: str  # python, or accelerate launch with a file of conf/accelerate/


def check_command(command: str, project_root: Path) -> None:
    """Raise `PipelineError` where accelerate would refuse the configuration file that `command` names."""
    words = shlex.split(command)
    if "--config_file" not in words[:-1]:
        return
    from accelerate.commands.config.config_args import load_config_from_file

    path = words[words.index("--config_file") + 1]
    try:
        config = load_config_from_file(str(project_root / path))
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise PipelineError(f"{path} cannot be used to launch: {line}", "name a file of conf/accelerate/.") from None
    if config.distributed_type == DistributedType.DEEPSPEED and not is_deepspeed_available():
        raise PipelineError(f"{path} asks for DeepSpeed, which is not installed.", INSTALL_DEEPSPEED)


def sharding() -> str | None:
    """What splits the draft's weights and its optimiser's state over the processes: FSDP, DeepSpeed, or nothing."""
    flags = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
    return next((name for name, flag in flags.items() if os.environ.get(flag, "").lower() == "true"), None)


def join() -> PartialState:
    """The processes of this launch; one, where none was launched.

    To be called before any weights load: from then on "cuda" is this process's own GPU, and every process loads all
    weights, which accelerate would leave to the first one.
    """
    if sharding() == "DeepSpeed" and not is_deepspeed_available():
        raise PipelineError("The launch asks for DeepSpeed, which is not installed.", INSTALL_DEEPSPEED)
    if sharding() == "FSDP" and os.environ.get("FSDP_VERSION") != "2":
        raise PipelineError(
            "The launch asks for the first version of FSDP.",
            "launch with conf/accelerate/fsdp2.yaml (fsdp_version: 2).",
        )
    disable_fsdp_ram_efficient_loading()
    return PartialState(cpu=not torch.cuda.is_available())


def fingerprint_parts(processes: PartialState) -> tuple:
    """What checkpoints depend on beyond the settings: nothing for one process, else how many there are and what is split."""
    return () if processes.num_processes == 1 else (processes.num_processes, sharding())


def check_settings(processes: PartialState, target: ModelConfig, draft: DraftConfig, distill: DistillConfig) -> None:
    """Raise `PipelineError` for what these processes cannot do together."""
    split = sharding()
    if processes.num_processes == 1:
        return
    if split == "FSDP" and distill.optimizer == "adamw_8bit":
        raise PipelineError(
            "distill.optimizer=adamw_8bit cannot work on weights that FSDP splits.",
            "set distill.optimizer=adamw, or launch with conf/accelerate/ddp.yaml.",
        )
    if split and draft.layer_choice:
        raise PipelineError(
            f"draft.layer_choice times the whole target on one device, where {split} splits it.",
            "choose the layers with launch=one_process or ddp first, and name them in draft.keep_layers.",
        )
    if split and distill.target == "online" and target.quantization != "none":
        raise PipelineError(
            f"A target with quantization={target.quantization} cannot be split over processes ({split}).",
            "set target.quantization=none, or launch with conf/accelerate/ddp.yaml.",
        )
    needed = distill.target == "online" or draft.init in ("pruned", "config")
    if not split and needed and target.device_map:
        raise PipelineError(
            f"With target.device_map={target.device_map} each of {processes.num_processes} processes would spread the"
            " target over all devices.",
            "launch with conf/accelerate/fsdp2.yaml, which splits it, or set target.device_map=null.",
        )


def target_device() -> torch.device | None:
    """Where a process loads the target: whole on the CPU if it is then split, else (None) as the target's config says."""
    return torch.device("cpu") if sharding() else None


def split_target(target: PreTrainedModel) -> PreTrainedModel:
    """Split the decoder layers of `target`, which lies on the CPU, over the processes of a launch that shards.

    A layer is whole on a process only while it runs (PyTorch's fully_shard); embeddings, norm and head, which are called
    from outside the decoder, are whole on every one.
    """
    if not sharding():
        return target
    decoder = target.get_decoder()
    for layer in decoder.layers:
        fully_shard(layer)
    split = {parameter for layer in decoder.layers for parameter in layer.parameters()}
    whole = set(target.parameters()) - split
    fully_shard(decoder, ignored_params=whole)
    for tensor in (*whole, *target.buffers()):
        tensor.data = tensor.data.to(default_device())
    return target
