"""Distillation losses: one value per token, zero exactly where the draft's distribution equals the target's."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_MASS = 1e-6


def forward_kl_top(logits: Tensor, top_index: Tensor, top_logprobs: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q) over the target's top entries and one bucket for everything else, [tokens].

    The bucket keeps the loss a true divergence when only the top of p is stored: it is never negative, and zero only if
    q agrees with p on every top entry and on the mass of the rest (Hinton et al., 2015, with a tail bucket). With all
    entries stored it is the full forward KL.

    logits        [tokens, head] raw logits of the draft; q is their softmax over its head
    top_index     int64 [tokens, top] column of each stored entry in the head; -1 where the head lacks it
    top_logprobs  [tokens, top] the target's log-probabilities at temperature 1
    """
    in_head = top_index >= 0
    log_q = logits.log_softmax(dim=-1, dtype=torch.float32).gather(-1, top_index.clamp(min=0))
    p = top_logprobs.exp() * in_head
    q = log_q.exp() * in_head
    top_terms = torch.where(in_head, p * (top_logprobs - log_q), 0.0).sum(dim=-1)
    p_rest = (1 - p.sum(dim=-1)).clamp(min=0)
    q_rest = (1 - q.sum(dim=-1)).clamp(min=SMALLEST_MASS)
    return top_terms + torch.xlogy(p_rest, p_rest) - p_rest * q_rest.log()
