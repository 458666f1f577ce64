"""What the models of an evaluation take in memory, and what the draft's share buys."""

from __future__ import annotations

import resource
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.core.answers import Answer
from pipeline.core.decoding import DecodeConfig
from pipeline.core.evaluation_settings import DISTILLED, Contestants
from pipeline.core.footprint import GIB, kv_cache_bytes
from pipeline.core.metrics import measure, no_data


def memory(
    models: Contestants, timed: list[Answer], settings: DecodeConfig, distilled: dict[str, dict]
) -> dict[str, Any]:
    """Bytes of target and distilled draft with the caches of one longest request, the draft's share of these, the peak of
    the whole evaluation, and the memory efficiency; `distilled` are the draft's metrics on the target domain."""
    draft = models.drafts[DISTILLED].model
    positions = max(len(answer.prompt_ids) for answer in timed) + settings.max_new_tokens + settings.draft_length
    found = {}
    for name, model in (("target", models.target), ("draft", draft)):
        found[f"{name}_weight_bytes"] = weight_bytes(model)
        found[f"{name}_cache_bytes"] = kv_cache_bytes(model.config, 1, positions, model.dtype)
    extra = found["draft_weight_bytes"] + found["draft_cache_bytes"]
    everything = sum(found.values())
    saved = distilled.get("target_passes_saved") or no_data("not measured in this domain")
    efficiency = no_data(saved["reason"])
    if saved["value"] is not None:
        interval = saved["interval"] and [end / extra * GIB for end in saved["interval"]]
        efficiency = measure(saved["value"] / extra * GIB, interval, saved["count"])
    return {
        **found,
        "cache_positions": positions,
        "draft_share": extra / everything,
        "peak_bytes": peak_bytes(),
        "memory_efficiency": efficiency,
    }


def weight_bytes(model: PreTrainedModel) -> int:
    """Of all weights, tied ones once."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def peak_bytes() -> int:
    """Most that this process has taken so far: on its accelerators, else resident."""
    if torch.cuda.is_available():
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
