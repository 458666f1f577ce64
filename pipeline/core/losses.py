"""Divergences between the target's distribution p and the draft's q: one value per token, zero exactly where q equals p.

All take log-probabilities over the same entries, `log_p` and `log_q` [tokens, entries], each row summing to one, and return
[tokens] in nats (shares of probability for total variation). The entries are the whole vocabulary, or the target's stored top and one bucket for everything
else (`top_and_tail`): merging entries never raises any of these divergences, so the bucketed value is a lower bound that
is zero only where the draft agrees on every stored entry and on the mass of the rest.

What each means for acceptance: a round keeps a drafted token with probability a = sum min(p, q) = 1 - TV(p, q) (Leviathan
et al., 2023, Corollary 3.6). `total_variation` and `lk` train that number itself; the KL divergences bound it (Pinsker:
TV <= sqrt(KL / 2)) and have the better-behaved gradients where p and q are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST_MASS = 1e-6  # of the target's tail bucket, so that its logarithm stays finite
LOG_ABSENT = -1e4  # log-probability of an entry that neither side has: exp gives an exact 0, differences stay finite
LK_HYBRID_RATE = 3.0

Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q): the draft must cover all that the target may say (Hinton et al., 2015)."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) = sum q (log q - log p): the draft may leave out, but must not invent (MiniLLM, Gu et al., 2024)."""
    return forward_kl(log_q, log_p)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (Agarwal et al., 2024, GKD, eq. 1).

    At beta 0 and 1, where that expression vanishes, the limits of its direction: KL(p || q) at 0, KL(q || p) at 1. Just
    beside the ends the expression gives almost no gradient: `check_beta` refuses that.
    """
    if beta == 0:
        return forward_kl(log_p, log_q)
    if beta == 1:
        return reverse_kl(log_p, log_q)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def check_beta(beta: float) -> None:
    """Raise `ValueError` unless `beta` is 0, 1 or between 0.001 and 0.999."""
    if beta not in (0, 1) and not 1e-3 <= beta <= 1 - 1e-3:
        raise ValueError(
            f"beta={beta} is no divergence to train with: use 0 (forward KL), 1 (reverse KL) or 0.001 to 0.999"
        )


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - sum min(p, q) = sum |p - q| / 2: the share of drafted tokens that is rejected (DistillSpec, Zhou et al., 2024)."""
    return (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum min(p, q): the negative logarithm of the acceptance (LK losses, arXiv 2602.23881)."""
    return -torch.minimum(log_p, log_q).logsumexp(dim=-1)


def lk_hybrid(log_p: Tensor, log_q: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q) with w = exp(-3 a), a the token's present acceptance, no gradient through w.

    Forward KL while the draft is far from the target, total variation as it comes close (LK losses, arXiv 2602.23881).
    """
    variation = total_variation(log_p, log_q)
    weight = (-LK_HYBRID_RATE * (1 - variation.detach())).exp()
    return weight * forward_kl(log_p, log_q) + (1 - weight) * variation


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}
JENSEN_SHANNON = "jensen_shannon"  # the one with a parameter
NAMES = (*DIVERGENCES, JENSEN_SHANNON)


def divergence(name: str, beta: float) -> Divergence:
    """The divergence called `name`; `beta` is Jensen-Shannon's."""
    if name == JENSEN_SHANNON:
        return lambda log_p, log_q: jensen_shannon(log_p, log_q, beta)
    return DIVERGENCES[name]


def top_and_tail(top_logprobs: Tensor, log_q_top: Tensor, log_q_rest: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """The target's stored top and a bucket for all else, for both sides: log p and log q, [tokens, top + 1] float32.

    top_logprobs  [tokens, top] the target's log-probabilities of its stored entries
    log_q_top     [tokens, top] the draft's log-probabilities of the same entries
    log_q_rest    [tokens, 1] the draft's log-probability of all other tokens together
    present       bool [tokens, top] false where the draft cannot name the entry: its mass counts as the target's tail
    """
    log_p = top_logprobs.float().masked_fill(~present, LOG_ABSENT)
    log_q = log_q_top.float().masked_fill(~present, LOG_ABSENT)
    rest = 1 - log_p.exp().sum(dim=-1, keepdim=True)
    nothing = (
        log_q_rest.detach().float().clamp(max=math.log(SMALLEST_MASS))
    )  # a tail of rounding errors: q's, if small too
    log_p_rest = torch.where(rest > SMALLEST_MASS, rest.clamp(min=SMALLEST_MASS).log(), nothing)
    return torch.cat([log_p, log_p_rest], dim=-1), torch.cat([log_q, log_q_rest.float()], dim=-1)
