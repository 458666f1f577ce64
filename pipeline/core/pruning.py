"""A draft made from the target by keeping a few of its layers."""

from __future__ import annotations

import copy
import re

from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.core.errors import PipelineError

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # settings with one entry for each layer
LAYER_NUMBERS = ("moe_layers", "mlp_only_layers")  # settings that list layers by number
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")


def check_layers(keep: list[int], depth: int) -> None:
    """Raise `PipelineError` unless `keep` names distinct layers of a model of `depth` layers, in order."""
    if not keep or sorted(set(keep)) != list(keep) or keep[0] < 0 or keep[-1] >= depth:
        raise PipelineError(
            f"draft.keep_layers={list(keep)} does not fit a target of {depth} layers.",
            f"name distinct layers between 0 and {depth - 1} in rising order.",
        )


def check_layer_counts(counts: list[int], depth: int) -> None:
    """Raise `PipelineError` unless `counts` are numbers of layers that a model of `depth` layers can be pruned to."""
    if not counts or min(counts) < 1 or max(counts) >= depth:
        raise PipelineError(
            f"draft.layer_choice.layer_counts={list(counts)} does not fit a target of {depth} layers.",
            f"name numbers between 1 and {depth - 1}.",
        )


def outer_layers(count: int, depth: int) -> list[int]:
    """`count` of `depth` layers: the first ones, and the last ones, of which there are as many or one fewer.

    Layers in the middle change the residual stream least (Gromov et al., "The Unreasonable Ineffectiveness of the Deeper
    Layers", 2024); the first read the tokens and the last choose among them.
    """
    last = count // 2
    return [*range(count - last), *range(depth - last, depth)]


def keep_layers(model: PreTrainedModel, keep: list[int]) -> PreTrainedModel:
    """A new model with the layers `keep` of `model`, its embeddings, norm and head; `model` is left as it is."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    check_layers(keep, text.num_hidden_layers)
    place = {old: new for new, old in enumerate(keep)}
    for name in PER_LAYER:
        if values := getattr(text, name, None):
            setattr(text, name, [values[layer] for layer in keep])
    for name in LAYER_NUMBERS:
        if numbers := getattr(text, name, None):
            setattr(text, name, [place[layer] for layer in numbers if layer in place])
    text.num_hidden_layers = len(keep)
    pruned = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    weights = {}
    for name, tensor in model.state_dict().items():
        match = _LAYER.match(name)
        if match is None:
            weights[name] = tensor
        elif int(match[2]) in place:
            weights[f"{match[1]}.{place[int(match[2])]}.{match[3]}"] = tensor
    try:
        pruned.load_state_dict(weights)
    except RuntimeError as error:
        raise PipelineError(
            f"All but the layers {list(keep)} of a {text.model_type} target cannot be taken out: what is left is no model.",
            "keep layers of one kind, or start the draft from a pretrained sibling (draft.init=pretrained).",
        ) from error
    pruned.generation_config = copy.deepcopy(model.generation_config)
    return pruned.to(model.device).eval()
