"""Measuring what a draft step and a verification cost, on this hardware."""

from __future__ import annotations

import functools
import statistics
import time

import torch
from transformers import PreTrainedModel

from pipeline.core.cache import CachedModel
from pipeline.core.cost_model import Costs
from pipeline.core.drafters import Batch, ModelDrafter, head_size, pad_right
from pipeline.core.replay import Replayed
from pipeline.core.sampling import Sampling


@torch.inference_mode()
def measure_costs(
    target: PreTrainedModel,
    drafter: ModelDrafter,
    draft_lengths: list[int],
    context: int,
    repeats: int,
    rows: int = 1,
    sampling: Sampling | None = None,
) -> Costs:
    """Time passes of `rows` rows at `context` tokens of context, all shapes in turn, and take medians over `repeats`.

    Opens `drafter` anew: it must not be in use by a decoder. It drafts as `sampling` says, greedily without.

    The tokens are arbitrary but varied: a mixture of experts is charged for the experts that several tokens touch.
    """
    if drafter.adaptive:
        raise ValueError("costs are those of whole drafts: measure them with a drafter that is not adaptive")
    steps = max(draft_lengths)
    room = context + steps + 1
    cached = CachedModel(target, rows)
    cached.reserve(room)
    vocabulary = min(head_size(target), target.get_input_embeddings().weight.shape[0])
    drafter.open(rows, sampling or Sampling(), range(vocabulary))
    texts = [[(row + 7919 * index) % vocabulary for index in range(room)] for row in range(rows)]
    token_ids, positions = pad_right(texts, room, cached.device)
    run = Replayed(lambda visible, *tensors: (cached.forward(0, *tensors, visible),), cached.device, cached.is_whole)
    cached.forward(0, token_ids[:, :context], positions[:, :context], cached.visible(context), logits_to_keep=1)

    def target_pass(k: int) -> None:
        block = slice(context, context + k + 1)
        run((cached.visible(context + k + 1),), token_ids[:, block], positions[:, block])

    prompts = [text[:context] for text in texts]
    drafter.begin(0, prompts, room)
    seeds = torch.zeros(rows, dtype=torch.long, device=cached.device)
    batch = Batch(prompts, seeds + context, token_ids[:, context - 2 : context], seeds)

    def draft() -> None:
        for row in range(rows):
            drafter.withdraw(row)
        drafter.propose(batch, [steps] * rows)

    shapes = {k: functools.partial(target_pass, k) for k in [0, *draft_lengths]} | {-1: draft}
    seconds: dict[int, list[float]] = {key: [] for key in shapes}
    for _ in range(repeats + 1):
        for key, run_shape in shapes.items():
            started = time.perf_counter()
            run_shape()
            if cached.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[key].append(time.perf_counter() - started)
    median = {key: statistics.median(times[1:]) for key, times in seconds.items()}
    return Costs(median.pop(-1) / steps, median)
