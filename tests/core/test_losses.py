"""L01, L05, L06: every divergence is the formula, in its direction, and the top of the target with a tail is a true one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.core.losses import DIVERGENCES, NAMES, check_beta, divergence, top_and_tail

BETAS = (0, 0.1, 0.5, 0.9, 1)
ALL = [(name, 0.5) for name in DIVERGENCES] + [("jensen_shannon", beta) for beta in BETAS]


def in_numpy(name: str, p: np.ndarray, q: np.ndarray, beta: float) -> np.ndarray:
    """The definitions once more, in probabilities."""

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    accepted = np.minimum(p, q).sum(-1)
    if name == "jensen_shannon" and beta not in (0, 1):
        mixture = beta * p + (1 - beta) * q
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    weight = np.exp(-3 * accepted)
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jensen_shannon": kl(p, q) if beta == 0 else kl(q, p),
        "total_variation": 1 - accepted,
        "lk": -np.log(accepted),
        "lk_hybrid": weight * kl(p, q) + (1 - weight) * (1 - accepted),
    }[name]


def pair(tokens: int = 50, entries: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple((2 * torch.randn(tokens, entries, generator=generator, dtype=torch.float64)) for _ in range(2))


@pytest.mark.parametrize(("name", "beta"), ALL)
def test_values_are_those_of_the_formula(name, beta):
    target, draft = pair()
    value = divergence(name, beta)(target.log_softmax(-1), draft.log_softmax(-1))
    expected = in_numpy(name, target.softmax(-1).numpy(), draft.softmax(-1).numpy(), beta)
    assert value.shape == (50,)
    assert np.allclose(value.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("name", "beta"), ALL)
def test_zero_exactly_where_the_draft_equals_the_target_and_positive_elsewhere(name, beta):
    target, draft = pair()
    log_p = target.log_softmax(-1)
    assert divergence(name, beta)(log_p, log_p).abs().max() < 1e-12
    assert (divergence(name, beta)(log_p, draft.log_softmax(-1)) > 1e-3).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_leads_to_the_target(name):
    target, draft = pair(tokens=8)
    log_p, logits = target.log_softmax(-1), draft.clone().requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.05)
    for _ in range(1500):
        optimiser.zero_grad()
        divergence(name, 0.5)(log_p, logits.log_softmax(-1)).sum().backward()
        optimiser.step()
    assert torch.minimum(log_p.exp(), logits.softmax(-1)).sum(-1).min() > 0.97


@pytest.mark.parametrize("beta", [1e-4, 1 - 1e-4, -0.5, 1.5, float("nan")])
def test_a_beta_beside_the_ends_is_refused(beta):
    """The paper's expression is 6e-5 there, whatever the draft: nothing would be learnt."""
    with pytest.raises(ValueError, match="beta"):
        check_beta(beta)


def test_half_a_kl_bounds_the_square_of_the_rejections():
    log_p, log_q = (logits.log_softmax(-1) for logits in pair())
    rejected = DIVERGENCES["total_variation"](log_p, log_q)
    assert (rejected**2 <= DIVERGENCES["forward_kl"](log_p, log_q) / 2).all()


def stored(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, index = logits.log_softmax(-1).topk(top, dim=-1)
    return index, values


def bucketed(name: str, draft: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    present = index >= 0
    log_q = draft.log_softmax(-1)
    named = torch.zeros_like(draft).scatter_add(-1, index.clamp(min=0), present.to(draft)) > 0
    rest = log_q.masked_fill(named, -30.0).logsumexp(-1, keepdim=True)
    return divergence(name, 0.5)(*top_and_tail(values, log_q.gather(-1, index.clamp(min=0)), rest, present))


@pytest.mark.parametrize("name", NAMES)
def test_top_and_tail_is_never_negative_and_blind_only_to_the_order_of_the_tail(name):
    torch.manual_seed(0)
    target, draft = torch.randn(200, 50) * 2, torch.randn(200, 50) * 2
    index, values = stored(target, 5)
    assert (bucketed(name, draft, index, values) > 0).all()
    assert bucketed(name, target, index, values).abs().max() < 1e-5
    shuffled = target.clone()
    rest = torch.ones_like(target, dtype=torch.bool).scatter(1, index, False)
    shuffled[rest] = target[rest].reshape(200, -1).flip(1).reshape(-1)
    assert bucketed(name, shuffled, index, values).abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_merging_entries_never_raises_the_divergence_and_all_entries_give_it_exactly(name):
    torch.manual_seed(1)
    target, draft = torch.randn(64, 30), torch.randn(64, 30)
    exact = divergence(name, 0.5)(target.log_softmax(-1), draft.log_softmax(-1))
    assert torch.allclose(bucketed(name, draft, *stored(target, 30)), exact, atol=1e-5)
    assert (bucketed(name, draft, *stored(target, 5)) <= exact + 1e-5).all()


def test_a_draft_that_overweights_the_top_is_punished_through_the_tail():
    """L06: the target's top five have 0.30 together, flat, the draft gives them 0.76. Without a tail term the value is
    negative, after renormalising both sides it is 0, with one bucket for the tail it is 0.47."""
    index, values = torch.arange(5)[None], torch.full((1, 5), 0.30 / 5).log()
    draft = torch.full((1, 100), 0.24 / 95).log()
    draft[0, :5] = torch.tensor(0.76 / 5).log()
    without_tail = (values.exp() * (values - draft[:, :5])).sum()
    renormalised = (values.softmax(-1) * (values.log_softmax(-1) - draft[:, :5].log_softmax(-1))).sum()
    found = bucketed("forward_kl", draft, index, values).item()
    assert [without_tail.item(), renormalised.item(), found] == pytest.approx([-0.28, 0.00, 0.47], abs=5e-3)


def test_entries_that_the_draft_cannot_name_count_as_tail():
    target = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    index, values = stored(target, 2)
    draft = torch.tensor([[2.0, 0.0]])
    p, q = values.exp()[0, 0], draft.softmax(-1)[0, 0]
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert torch.allclose(bucketed("forward_kl", draft, torch.tensor([[0, -1]]), values)[0], expected, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_storage_moves_the_loss_by_less_than_a_percent(name):
    torch.manual_seed(2)
    target, draft = torch.randn(500, 200) * 3, torch.randn(500, 200) * 3
    index, values = stored(target, 20)
    exact = bucketed(name, draft, index, values).mean()
    assert abs(bucketed(name, draft, index, values.half().float()).mean() / exact - 1) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_finite_when_the_draft_is_certain(name):
    logits = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)
    bucketed(name, logits, torch.tensor([[0]]), torch.tensor([[-0.1]])).sum().backward()
    assert torch.isfinite(logits.grad).all()
