"""The target of a run: resolved, checked and identified from its config and tokenizer, weights loaded on demand."""

from __future__ import annotations

import functools
from pathlib import Path

from transformers import PreTrainedModel

from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.quantization import quantization_config
from pipeline.core.cache import layer_types
from pipeline.core.models import (
    ModelConfig,
    eos_token_ids,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from pipeline.core.templates import template_fingerprint


class Target:
    """Facts about the target that need no weights, and `model`, loaded when first used."""

    def __init__(self, config: ModelConfig, project_root: Path) -> None:
        self.config = config
        self.location = resolve_model(config.id, project_root)
        self._quantization = quantization_config(config)
        self.model_config = load_config(self.location, config.revision, config.trust_remote_code)
        layer_types(self.model_config)
        self.tokenizer = load_tokenizer(self.location, config.revision, config.trust_remote_code)
        self.generation_config = load_generation_config(self.location, config.revision)
        self.eos_token_ids = eos_token_ids(self.generation_config, self.tokenizer)
        self.template = template_fingerprint(self.tokenizer)
        self.max_positions = getattr(self.model_config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary_size(self) -> int:
        """Real token ids are below this; embedding rows beyond it are padding."""
        return min(len(self.tokenizer), self.model_config.get_text_config().vocab_size)

    @functools.cached_property
    def compatibility_key(self) -> dict[str, str]:
        """What a draft of this target is valid for: weights, tokenizer, quantisation."""
        return {
            "target": self.config.id,
            "target_fingerprint": weights_fingerprint(self.location, self.model_config, self.config.revision),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "quantization": self.config.quantization,
        }

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        return load_model(self.location, self.config, self._quantization)
