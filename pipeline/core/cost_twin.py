"""A small Llama grown to a large one's shapes, its function preserved: what a large model costs, on real text.

The residual stream of width d is padded with zeros to width D, x' = [x, 0]. A norm divides by sqrt(mean(x^2) + eps); since
mean(x'^2) = (d / D) mean(x^2), eps' = (d / D) eps makes the divisor sqrt(d / D) times the old one, and the weights
w' = sqrt(d / D) w give the old result. What writes to the stream (embeddings, o_proj, down_proj) has zeros wherever
anything new would reach it: in the rows of new channels, and in the columns of new heads and new MLP units. New layers
write nothing at all, so they pass the stream on. Everything else that is new multiplies zeros or is multiplied by zeros;
it is filled with small random numbers, so that no kernel meets special values.

Heads keep their size, since rotary frequencies depend on it, and query heads their number per key-value head.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.core.errors import PipelineError
from pipeline.core.footprint import meta_model

WIDTH_STEP = 128  # chosen widths are multiples of this, as those of large models are
FILL_SEED = 0


@dataclass(frozen=True)
class TwinShape:
    """What is chosen about a twin; everything else is the small model's."""

    hidden_size: int  # width of the residual stream
    intermediate_size: int  # units of each MLP
    num_hidden_layers: int
    num_attention_heads: int  # query heads

    def check(self, config: LlamaConfig) -> None:
        """Raise `PipelineError` unless a model of `config` can grow to this shape."""
        for name, size in vars(self).items():
            if size < getattr(config, name):
                raise PipelineError(
                    f"{name}={size} is smaller than the small model's {getattr(config, name)}.",
                    f"choose {name} >= {getattr(config, name)}.",
                )
        group = query_group(config)
        below = self.num_attention_heads // group * group
        if below != self.num_attention_heads:
            raise PipelineError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of the {group} query heads that share a"
                " key-value head.",
                f"choose {below} or {below + group} heads.",
            )
        if self.hidden_size % self.num_attention_heads:
            raise PipelineError(
                f"hidden_size={self.hidden_size} is no multiple of num_attention_heads={self.num_attention_heads}, which"
                " transformers asks for.",
                f"choose hidden_size={self.num_attention_heads * head_size(config)}.",
            )


def query_group(config: LlamaConfig) -> int:
    """Query heads per key-value head."""
    return config.num_attention_heads // config.num_key_value_heads


def head_size(config: LlamaConfig) -> int:
    """Channels of a head."""
    return config.head_dim or config.hidden_size // config.num_attention_heads


def grow(model: LlamaForCausalLM, shape: TwinShape, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A model of `shape` on `device` whose logits [batch, length, vocab] are those of `model` up to rounding in `dtype`.

    `model` is left as it is. Tensors are made one by one in their final type and place: the peak is the twin itself and,
    for a moment, one float32 copy of a small tensor.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise PipelineError(
            f"{type(model).__name__} cannot be grown.",
            "give a LlamaForCausalLM: other architectures differ in their norms.",
        )
    shape.check(model.config)
    twin = meta_model(grown_config(model.config, shape, dtype))
    small = dict(model.named_parameters())
    norm_scale = math.sqrt(model.config.hidden_size / shape.hidden_size)
    generator = torch.Generator(device).manual_seed(FILL_SEED)
    for name, parameter in list(twin.named_parameters()):
        values = torch.empty(parameter.shape, dtype=dtype, device=device)
        _fill(name, values, model.config.initializer_range, generator)
        if name in small:
            _place(small[name].detach(), values, norm_scale if _is_norm(name) else 1.0)
        owner, _, attribute = name.rpartition(".")
        setattr(twin.get_submodule(owner), attribute, nn.Parameter(values, requires_grad=False))
    if twin.config.tie_word_embeddings:
        twin.lm_head.weight = twin.model.embed_tokens.weight
    twin.model.rotary_emb = copy.deepcopy(model.model.rotary_emb).to(device)
    twin.generation_config = copy.deepcopy(model.generation_config)
    return twin.eval()


def grown_config(config: LlamaConfig, shape: TwinShape, dtype: torch.dtype) -> LlamaConfig:
    """The twin's config: the small one's with `shape`, the heads and rotary frequencies of old, and eps (d / D)."""
    grown = copy.deepcopy(config)
    grown.head_dim = head_size(config)
    for name, size in vars(shape).items():
        setattr(grown, name, size)
    grown.num_key_value_heads = shape.num_attention_heads // query_group(config)
    grown.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    grown.dtype = dtype
    return grown


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _fill(name: str, values: Tensor, std: float, generator: torch.Generator) -> None:
    """What a new tensor holds before the small model's values are placed in it."""
    if _is_norm(name):
        values.fill_(1.0)
    elif name.split(".")[-2] in ("embed_tokens", "o_proj", "down_proj"):  # they write to the residual stream
        values.zero_()
    else:
        values.normal_(0.0, std, generator=generator)


def _place(small: Tensor, values: Tensor, scale: float) -> None:
    """Write `small` times `scale` to the first rows and columns of `values`, rounding once."""
    corner = tuple(slice(size) for size in small.shape)
    values[corner] = small if scale == 1.0 else small.float() * scale


def layer_parameters(config: LlamaConfig, hidden_size: int, intermediate_size: int, heads: int) -> int:
    """Weights of one layer's matrices."""
    attention = 2 * hidden_size * (heads + heads // query_group(config)) * head_size(config)
    return attention + 3 * hidden_size * intermediate_size


def _head_counts(config: LlamaConfig, width: int) -> list[int]:
    """Admissible numbers of query heads up to about `width` channels, fewest first; each gives a width of whole steps."""
    group, size = query_group(config), head_size(config)
    counts = range(group, (width + group * WIDTH_STEP) // size + group, group)
    return [n for n in counts if n * size % WIDTH_STEP == 0 and n * size >= config.hidden_size]


def shape_near(config: LlamaConfig, hidden_size: int, intermediate_size: int, parameters: int) -> TwinShape:
    """The admissible shape nearest to a large model's: its width first, then as many layers as its parameters take."""
    heads = min(_head_counts(config, hidden_size), key=lambda n: abs(n * head_size(config) - hidden_size))
    width = heads * head_size(config)
    embeddings = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    layers = round((parameters - embeddings) / layer_parameters(config, width, intermediate_size, heads))
    return TwinShape(width, intermediate_size, max(layers, config.num_hidden_layers), heads)


def widened_shape(config: LlamaConfig, weights: int, head_tokens: int) -> TwinShape:
    """The shape of as many layers and like proportions in which a step over a head of `head_tokens` rows reads about
    `weights` weights."""

    def shape(heads: int) -> TwinShape:
        width = heads * head_size(config)
        units = round(width * config.intermediate_size / config.hidden_size / WIDTH_STEP) * WIDTH_STEP
        return TwinShape(width, max(units, config.intermediate_size), config.num_hidden_layers, heads)

    def distance(candidate: TwinShape) -> float:
        layer = layer_parameters(
            config, candidate.hidden_size, candidate.intermediate_size, candidate.num_attention_heads
        )
        return abs(layer * candidate.num_hidden_layers + head_tokens * candidate.hidden_size - weights)

    widest = math.isqrt(weights) + config.hidden_size  # a layer has more than width^2 weights
    return min((shape(heads) for heads in _head_counts(config, widest)), key=distance)
