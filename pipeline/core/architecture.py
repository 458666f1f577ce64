"""A draft built from a model's configuration: its architecture, random weights, and the target's vocabulary."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pipeline.core.errors import PipelineError
from pipeline.core.models import quiet_transformers

OF_THE_VOCABULARY = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def for_vocabulary(config: PreTrainedConfig, target_config: PreTrainedConfig) -> PreTrainedConfig:
    """The text model of `config` with as many embedding rows as the target, padding included, and its special ids."""
    text = copy.deepcopy(config.get_text_config())
    for name in OF_THE_VOCABULARY:
        setattr(text, name, getattr(target_config.get_text_config(), name, None))
    if hasattr(text, "quantization_config"):  # of weights that are not used
        del text.quantization_config
    return text


def has_width_of(config: PreTrainedConfig, target_config: PreTrainedConfig) -> bool:
    """Whether the target's embeddings fit a draft of `config`."""
    return config.get_text_config().hidden_size == target_config.get_text_config().hidden_size


def random_draft(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The model that `config` describes, float32, on the CPU, initialised as its family is before pretraining.

    Raises `PipelineError` when transformers cannot build a causal language model from `config`.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except Exception as error:  # whatever a model's constructor raises about its config
            line = " ".join(str(error).split())[:200]
            raise PipelineError(
                f"No draft can be built from the configuration {config.name_or_path or config.model_type}: {line}",
                "choose the configuration of a decoder-only transformer that AutoModelForCausalLM loads.",
            ) from error


@torch.no_grad()
def copy_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `draft` the target's token embeddings, and the rows of its output head where the draft's is one of its own,
    each where the shapes are equal."""
    embeddings, head = draft.get_input_embeddings(), draft.get_output_embeddings()
    pairs = [(embeddings.weight, target.get_input_embeddings().weight)]
    if head.weight is not embeddings.weight:
        pairs.append((head.weight, target.get_output_embeddings().weight))
    for own, other in pairs:
        if own.shape == other.shape and other.is_floating_point():
            own.copy_(other)
