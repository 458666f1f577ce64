"""What target and draft are to each other where they are served together, from their configs alone."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.checks import Passed, size_text
from pipeline.core.cost_model import Costs, break_even_acceptance
from pipeline.core.footprint import Pair
from pipeline.core.models import max_positions


@dataclass
class Load:
    """What a service does at one time, and with what."""

    batch: int  # requests decoded together
    positions: int  # tokens of each, prompt and answer
    memory_bytes: float | None  # for weights and caches; None: unknown


def family(pair: Pair) -> Passed:
    """Whether both are of one model type."""
    target, draft = (model.config.get_text_config().model_type for model in (pair.target, pair.draft))
    if target == draft:
        return Passed(None, f"one: {target}")
    return Passed(None, f"two: the target is {target}, the draft {draft}; token ids are what they must share")


def context_length(pair: Pair) -> Passed:
    """Positions of both."""
    target, draft = (max_positions(model.config) for model in (pair.target, pair.draft))
    detail = f"target {target or 'unlimited'}, draft {draft or 'unlimited'} tokens"
    if draft is None or (target is not None and draft >= target):
        return Passed(None, detail)
    warning = f"what outgrows {draft} tokens is decoded plainly from there on"
    return Passed(None, detail, warning, "choose a draft with a longer context if your texts are that long.")


def serving_memory(pair: Pair, load: Load) -> Passed:
    """Bytes at the load, and how many requests fit into the memory without and with the draft."""
    needs = pair.serving_memory(load.batch, load.positions)
    parts = ", ".join(f"{name} {size_text(amount)}" for name, amount in needs.items())
    detail = f"{parts} (target quantization {pair.quantization})"
    if load.memory_bytes is None:
        return Passed(None, detail, "free memory is unknown here", "set diagnose.memory_gib.")
    alone, both = pair.requests_that_fit(load.memory_bytes, load.positions)
    detail += (
        f"; in {size_text(load.memory_bytes)} fit {alone:,} requests without the draft, {both:,} with it:"
        f" {alone - both:,} fewer"
    )
    if both >= load.batch:
        return Passed(None, detail)
    remedy = (
        "serve on a larger instance (its price is roi.price_per_hour_after), set target.quantization, or take a smaller"
        " draft."
    )
    return Passed(None, detail, f"with the draft the load of {load.batch} requests does not fit", remedy)


def cost_ratio(pair: Pair, load: Load, lengths: list[int], head_tokens: int, half_weights: bool) -> Passed:
    """c from the bytes that a step reads; the value is the `Costs`."""
    head_tokens = min(head_tokens, pair.draft.get_output_embeddings().weight.shape[0])
    costs = pair.costs_by_bytes(load.batch, load.positions, lengths, head_tokens, half_weights)
    detail = (
        f"c = {costs.cost_ratio:.3f}: a draft step reads {size_text(costs.draft_step_seconds)} (head trimmed to"
        f" {head_tokens:,} tokens), a target step {size_text(costs.target_pass_seconds[0])}, caches included"
    )
    return Passed(costs, detail)


def break_even(costs: Costs, lengths: list[int]) -> Passed:
    """The token acceptance from which on drafting pays, for each draft length."""
    needed = {k: break_even_acceptance(k, costs) for k in lengths}
    shown = ", ".join(f"k = {k} {'never' if share is None else f'{100 * share:.1f} %'}" for k, share in needed.items())
    detail = (
        f"drafting pays above a token acceptance of: {shown}; assuming that memory bandwidth decides, so that a dense"
        " target checks k + 1 tokens in the time of one"
    )
    if all(share is None for share in needed.values()):
        return Passed(None, detail, "no acceptance pays", "choose a smaller draft, or trim more of its head.")
    return Passed(None, detail)
