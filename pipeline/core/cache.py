"""A preallocated key-value cache whose rows advance and roll back independently.

transformers' static cache keeps one length for the whole batch. Here the token at position p of a row lies in slot p of
that row, whatever was written there before, and a query at position p sees the slots up to p. So rolling back is free:
the next pass simply writes at smaller positions, and what lies beyond is never seen.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from pipeline.core.attention import GROUPED
from pipeline.core.errors import PipelineError
from pipeline.core.linear import is_dispatched
from pipeline.core.models import max_positions
from pipeline.core.packing import decoding_view
from pipeline.core.replay import padded_length

ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


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
    and for attention that `visibility_masks` does not cover (layers that ignore the mask or run in a loop).
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
        raise PipelineError(
            f"{getattr(config, 'name_or_path', '') or text.model_type}: its cache cannot be rolled back by position"
            f" (model type {text.model_type}: {', '.join(obstacles)}).",
            "choose a transformer whose layers are full, sliding-window or chunked attention only.",
        )
    return list(types)


def visibility_masks(config, positions: Tensor, visible: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Attention masks [rows, 1, queries, visible]: True where a query sees a slot, or for attention that adds its mask
    to the scores, 0 there and the lowest number of `dtype` elsewhere.

    `positions` [rows, queries]. One mask when all layers are of one kind, else a mask per kind as transformers takes it.
    """
    types, text = set(layer_types(config)), config.get_text_config()
    slots = torch.arange(visible, device=positions.device)
    query = positions[:, None, :, None]
    masks = {"full_attention": slots <= query}
    if "sliding_attention" in types:
        masks["sliding_attention"] = masks["full_attention"] & (slots > query - text.sliding_window)
    if "chunked_attention" in types:
        chunk = text.attention_chunk_size or visible
        masks["chunked_attention"] = masks["full_attention"] & (slots // chunk == query // chunk)
    masks = {name: masks[name] for name in types}
    if text._attn_implementation in ("eager", GROUPED):
        lowest = torch.finfo(dtype).min
        masks = {
            name: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
            for name, mask in masks.items()
        }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def input_device(model: PreTrainedModel) -> torch.device:
    """Where `model` takes its token ids; accelerate says it for embeddings that it keeps elsewhere between passes."""
    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return embedding.weight.device
    return torch.device(embedding._hf_hook.execution_device)


@contextlib.contextmanager
def tuned_to_positions(layers: list[nn.Module], positions: Tensor, visible: int) -> Iterator[None]:
    """Let `layers`, those of Llama 4 without rotary embeddings, scale their queries by position.

    They scale by s(p) = 1 + attn_scale ln(1 + floor((p + 1) / floor_scale)) and count p from the cache's one length,
    which is 0 here: within the block. While the context lasts, queries are multiplied by s(position) / s(index).
    `positions` [rows, queries]; `visible` as in `CachedModel.forward`.
    """
    handles = []
    for layer in layers:
        if visible >= layer.floor_scale:
            index = torch.arange(positions.shape[1], device=positions.device)
            own, counted = (1 + layer.attn_scale * ((p + 1) // layer.floor_scale).log1p() for p in (positions, index))
            scale = (own / counted)[..., None]
            handles.append(layer.q_proj.register_forward_hook(partial(_scaled, scale)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled(scale: Tensor, module: nn.Module, inputs: tuple, queries: Tensor) -> Tensor:
    """A forward hook: [rows, queries, width] times [rows, queries, 1]."""
    return (queries * scale.to(queries.device)).to(queries.dtype)


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
        self.device = input_device(model)
        self.is_whole = not any(map(is_dispatched, model.modules()))  # on one device, in one process
        self.dtype = model.dtype
        self.max_positions = max_positions(model.config)
        self.wants_head_input = False
        self.head_input: Tensor | None = None
        self._layers: list[RaggedLayer] = []
        tuned = (layer for layer in self.model.modules() if getattr(layer, "attn_temperature_tuning", False))
        self._tuned = [layer for layer in tuned if not layer.use_rope]
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def reserve(self, length: int) -> bool:
        """Make room for `length` positions per row; returns whether the cache had to move to larger memory."""
        if length <= self.capacity:
            return False
        self.capacity = padded_length(length, self.device)
        if self._layers:
            for layer in self._layers:
                layer.grow(self.capacity)
        else:
            depth = self.config.get_text_config().num_hidden_layers
            self._layers = [RaggedLayer(self.rows, self.capacity) for _ in range(depth)]
        return True

    def visible(self, longest: int) -> int:
        """How many positions a pass has to see whose largest position is `longest` - 1."""
        return min(padded_length(longest, self.device), self.capacity)

    def forward(
        self, first_row: int, token_ids: Tensor, positions: Tensor, visible: int, logits_to_keep: int | Tensor = 0
    ) -> Tensor:
        """Run rows [first_row, first_row + rows) over `token_ids` [rows, queries] at `positions` [rows, queries].

        `visible` positions from the first on are looked at. Returns logits [rows, kept, vocab]; `logits_to_keep` as in
        transformers (0 keeps all queries). A block may reach beyond the model's last position with tokens that no row has
        room for; they share that position, which no token that counts ever sees.
        """
        if self.max_positions:
            positions = positions.clamp(max=self.max_positions - 1)
        place = Placement(first_row, first_row + token_ids.shape[0], positions, visible)
        for layer in self._layers:
            layer.placement = place
        with tuned_to_positions(self._tuned, positions, visible), self._noting_head_input():
            output = self.model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=visibility_masks(self.config, positions, visible, self.dtype),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_argument: Cache(layers=self._layers)},
            )
        return output.logits

    @contextlib.contextmanager
    def _noting_head_input(self) -> Iterator[None]:
        """Leave in `head_input` what the output head is given, [rows, kept, hidden], if that is wanted."""
        if not self.wants_head_input:
            yield
            return

        def note(head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.head_input = inputs[0]

        handle = self.model.get_output_embeddings().register_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def move_row(self, source: int, destination: int) -> None:
        """Copy the cache of row `source` over row `destination`."""
        for layer in self._layers:
            layer.move_row(source, destination)
