"""What the models of an evaluation take in memory, and what the draft's share buys."""

from __future__ import annotations

import resource
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.core.answers import Answer
from pipeline.core.evaluation_settings import Contestants
from pipeline.core.footprint import GIB, kv_cache_bytes
from pipeline.core.metrics import no_data, ratio, scaled


def memory(
    models: Contestants,
    timed: list[Answer],
    new_tokens: int,
    draft_lengths: dict[str, int],
    candidates: dict[str, dict[str, dict]],
) -> dict[str, Any]:
    """Bytes of the target and of every candidate with the caches of one longest request, the share of target and draft that
    the draft takes, its memory efficiency, and the peak of the whole evaluation, which holds them all.

    `candidates` are the metrics of each by domain, `draft_lengths` the k of each.
    """
    positions = max(len(answer.prompt_ids) for answer in timed) + new_tokens + max(draft_lengths.values())
    target = _bytes(models.target, positions)
    none = {"weight_bytes": 0, "cache_bytes": 0}
    taken = {
        name: _bytes(models.drafts[name].model, positions) if name in models.drafts else none for name in candidates
    }
    found = {}
    for name, own in taken.items():
        extra = sum(own.values())
        efficiency = _efficiency(extra, candidates[name].get(models.domain, {}))
        share = ratio([extra], [extra + sum(target.values())])
        found[name] = {**own, "draft_share": share, "memory_efficiency": efficiency}
    return {
        **{f"target_{name}": value for name, value in target.items()},
        "cache_positions": positions,
        "candidates": found,
        "peak_bytes": peak_bytes(),
    }


def _bytes(model: PreTrainedModel, positions: int) -> dict[str, int]:
    return {"weight_bytes": weight_bytes(model), "cache_bytes": kv_cache_bytes(model.config, 1, positions, model.dtype)}


def _efficiency(extra: int, measured: dict[str, dict]) -> dict[str, Any]:
    """Target passes saved per token and GiB of `extra` bytes."""
    if not extra:
        return no_data("it takes no memory")
    return scaled(measured.get("target_passes_saved") or no_data("not measured in this domain"), GIB / extra)


def weight_bytes(model: PreTrainedModel) -> int:
    """Of all weights, tied ones once."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def peak_bytes() -> int:
    """Most that this process has taken so far: on its accelerators, else resident."""
    if torch.cuda.is_available():
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
