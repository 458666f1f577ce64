"""A preallocated key-value cache whose rows advance and roll back independently.

transformers' static cache keeps one length for the whole batch. Here the token at position p of a row lies in slot p of
that row, whatever was written there before, and a query at position p sees the slots up to p. So rolling back is free:
the next pass simply writes at smaller positions, and what lies beyond is never seen.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from pipeline.core.attention import GROUPED
from pipeline.core.errors import PipelineError
from pipeline.core.models import max_positions
from pipeline.core.packing import decoding_view

ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}
LENGTH_STEP = 32  # the cache grows, and the visible part of it is cut, in multiples of this many positions


@dataclass
class Placement:
    """Where the pass in progress reads and writes: rows [first_row, last_row), one position per query, visible slots."""

    first_row: int
    last_row: int
    positions: Tensor
    visible: int
    _slots: dict[tuple, Tensor] = field(default_factory=dict)

    def slots(self, heads: int, capacity: int, device: torch.device) -> Tensor:
        """Where the queries' vectors go when [rows, heads, capacity] is one line, int64 [rows * heads * queries].

        The layers of a pass share it.
        """
        key = (heads, capacity, device)
        if key not in self._slots:
            lines = torch.arange(self.positions.shape[0] * heads, device=device).view(-1, heads, 1)
            self._slots[key] = (lines * capacity + self.positions.to(device)[:, None]).flatten()
        return self._slots[key]


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, heads, capacity, head_dim], addressed by the shared `Placement`."""

    is_compileable = True
    is_sliding = False

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.placement: Placement | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads = key_states.shape[1]
        self.keys = key_states.new_zeros(self.rows, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(self.rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, queries, head_dim] at the placement's positions; return the visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.placement
        keys = self.keys[place.first_row : place.last_row]
        values = self.values[place.first_row : place.last_row]
        slots = place.slots(keys.shape[1], self.capacity, keys.device)
        keys.flatten(0, 2).index_copy_(0, slots, key_states.flatten(0, 2))
        values.flatten(0, 2).index_copy_(0, slots, value_states.flatten(0, 2))
        return keys[:, :, : place.visible], values[:, :, : place.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.placement.visible if self.placement else self.capacity), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    def grow(self, capacity: int) -> None:
        """Enlarge to `capacity` positions; what is stored stays."""
        self.capacity = capacity
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(old.shape[0], old.shape[1], capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def move_row(self, source: int, destination: int) -> None:
        if self.is_initialized:
            self.keys[destination] = self.keys[source]
            self.values[destination] = self.values[source]


def layer_types(config) -> list[str]:
    """The attention kind of every layer of a text model's config.

    Raises `PipelineError` for a model whose cache cannot be rolled back by position (recurrent or convolutional state)
    and for attention that `visibility_masks` does not cover (chunks, layers that ignore the mask or run in a loop).
    """
    text = config.get_text_config()
    depth = getattr(text, "num_hidden_layers", None)
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    obstacles = [name for name in ("attention_types", "n_recurrent_loops") if hasattr(text, name)]
    if types is None:
        states = ("ssm_cfg", "state_size", "mamba_d_state", "conv_L_cache", "rwkv_version")
        obstacles += [name for name in states if hasattr(text, name)]
        window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
        types = ["sliding_attention" if window else "full_attention"] * (depth or 0)
    obstacles += sorted(set(types) - ATTENTION_LAYER_TYPES)
    if not depth or not getattr(text, "num_attention_heads", None):
        obstacles.append("no attention layers")
    if obstacles:
        chunked = obstacles == ["chunked_attention"]
        reason = "chunked attention is not supported" if chunked else "its cache cannot be rolled back by position"
        raise PipelineError(
            f"{getattr(config, 'name_or_path', '') or text.model_type}: {reason} (model type {text.model_type}:"
            f" {', '.join(obstacles)}).",
            "choose a transformer whose layers are full or sliding-window attention only.",
        )
    return list(types)


def visibility_masks(config, positions: Tensor, visible: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Attention masks [rows, 1, queries, visible]: True where a query sees a slot, or for attention that adds its mask
    to the scores, 0 there and the lowest number of `dtype` elsewhere.

    `positions` [rows, queries]. One mask when all layers are of one kind, else a mask per kind as transformers takes it.
    """
    types = set(layer_types(config))
    slots = torch.arange(visible, device=positions.device)
    query = positions[:, None, :, None]
    masks = {"full_attention": slots <= query}
    if "sliding_attention" in types:
        masks["sliding_attention"] = masks["full_attention"] & (slots > query - config.get_text_config().sliding_window)
    masks = {name: masks[name] for name in types}
    if config.get_text_config()._attn_implementation in ("eager", GROUPED):
        lowest = torch.finfo(dtype).min
        masks = {
            name: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
            for name, mask in masks.items()
        }
    return masks if len(masks) > 1 else next(iter(masks.values()))


class CachedModel:
    """A causal language model together with a ragged cache of `rows` rows.

    The model given is left untouched; what runs is a view of it made for decoding, on a CPU with `half_weights` in half
    as many bytes.
    """

    def __init__(self, model: PreTrainedModel, rows: int, half_weights: bool = False) -> None:
        layer_types(model.config)
        self.model = decoding_view(model, half_weights)
        self.config = self.model.config
        self.rows = rows
        self.capacity = 0
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.max_positions = max_positions(model.config)
        self._layers: list[RaggedLayer] = []
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def reserve(self, length: int) -> None:
        """Make room for `length` positions per row."""
        if length <= self.capacity:
            return
        self.capacity = -(-length // LENGTH_STEP) * LENGTH_STEP
        if self._layers:
            for layer in self._layers:
                layer.grow(self.capacity)
        else:
            depth = self.config.get_text_config().num_hidden_layers
            self._layers = [RaggedLayer(self.rows, self.capacity) for _ in range(depth)]

    def forward(
        self, first_row: int, token_ids: Tensor, positions: Tensor, longest: int, logits_to_keep: int | Tensor = 0
    ) -> Tensor:
        """Run rows [first_row, first_row + rows) over `token_ids` [rows, queries] at `positions` [rows, queries].

        `longest` is one more than the largest position, known to the host. Returns logits [rows, kept, vocab];
        `logits_to_keep` as in transformers (0 keeps all queries). A block may reach beyond the model's last position with
        tokens that no row has room for; they share that position, which no token that counts ever sees.
        """
        if self.max_positions:
            positions = positions.clamp(max=self.max_positions - 1)
        visible = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.capacity)
        place = Placement(first_row, first_row + token_ids.shape[0], positions, visible)
        for layer in self._layers:
            layer.placement = place
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=visibility_masks(self.config, positions, visible, self.dtype),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: Cache(layers=self._layers)},
        )
        return output.logits

    def move_row(self, source: int, destination: int) -> None:
        """Copy the cache of row `source` over row `destination`."""
        for layer in self._layers:
            layer.move_row(source, destination)
