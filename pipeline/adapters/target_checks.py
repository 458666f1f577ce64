"""Whether a target can be used at all, from its config, tokenizer and generation config; no weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.adapters.model_sources import resolve_model
from pipeline.adapters.quantization import quantization_config
from pipeline.core.cache import layer_types
from pipeline.core.checks import Passed
from pipeline.core.errors import PipelineError
from pipeline.core.models import ModelConfig, eos_token_ids, load_config, load_generation_config, load_tokenizer

NOT_APPLIED = {  # settings of a generation config that change which tokens are allowed, with the values that mean "off"
    "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "bad_words_ids": (), "min_new_tokens": (0,),
    "min_length": (0,), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (),
    "sequence_bias": (), "exponential_decay_length_penalty": (),
}  # fmt: skip


def configuration(config: ModelConfig, root: Path) -> Passed:
    location = resolve_model(config.id, root)
    found = load_config(location, config.revision, config.trust_remote_code)
    text = found.get_text_config()
    layers = getattr(text, "num_hidden_layers", "?")
    return Passed((location, found), f"{config.id}: {text.model_type}, {layers} layers of width {text.hidden_size}")


def cache(found: tuple) -> Passed:
    counts = Counter(layer_types(found[1]))
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
    return Passed(None, f"{kinds}: can be rolled back by position")


def tokenizer(config: ModelConfig, location: str, found: Any) -> Passed:
    tokenizer = load_tokenizer(location, config.revision, config.trust_remote_code)
    rows, size = found.get_text_config().vocab_size, len(tokenizer)
    detail = f"{size} tokens, {rows} embedding rows"
    warning = ""
    if size < rows:
        detail += f", of which the last {rows - size} are padding and never emitted"
    elif size > rows:
        warning = f"{size - rows} tokens have no embedding row and must not occur in prompts"
    if max(tokenizer.get_vocab().values()) >= size:
        warning = f"its ids have holes, so real tokens from id {size} on are taken for padding"
    return Passed(tokenizer, detail, warning, warning and "check that tokenizer and model belong together.")


def end_of_answers(config: ModelConfig, found: tuple, tokenizer: Any) -> Passed:
    location, model_config = found
    ids = eos_token_ids(load_generation_config(location, config.revision), tokenizer)
    real = min(len(tokenizer), model_config.get_text_config().vocab_size)
    if beyond := [index for index in ids if index >= real]:
        raise PipelineError(
            f"The end-of-answer ids {beyond} lie beyond the {real} real tokens: no answer would end.",
            "correct eos_token_id in the target's generation_config.json.",
        )
    if not ids:
        return Passed(ids, "no token ends an answer", "all run to max_new_tokens", "give the target an eos_token_id.")
    detail = ", ".join(f"{index} {tokenizer.convert_ids_to_tokens(index)!r}" for index in ids)
    if tokenizer.eos_token_id in (None, *ids):
        return Passed(ids, detail)
    warning = f"the tokenizer's own, {tokenizer.eos_token!r}, is not among them"
    return Passed(ids, detail, warning, "check eos_token_id in the target's generation_config.json.")


def generation_rules(config: ModelConfig, found: tuple) -> Passed:
    """Rules of the target's generation config that answers and measurements do without (D09: never ignored silently)."""
    settings = load_generation_config(found[0], config.revision)
    rules = {name: getattr(settings, name, None) for name in NOT_APPLIED}
    rules = {name: value for name, value in rules.items() if value not in (None, *NOT_APPLIED[name])}
    if not rules:
        return Passed(None, "none beyond sampling")
    named = ", ".join(f"{name}={value}" for name, value in rules.items())
    remedy = "serve without them, or expect lower acceptance in production than is measured here."
    return Passed(None, "", f"generation_config.json asks for {named}, which answers here are made without", remedy)


def quantization(config: ModelConfig) -> Passed:
    quantized = quantization_config(config) is not None
    return Passed(None, f"{config.quantization}: bitsandbytes runs here" if quantized else "none")
