"""L06: the top of the target with a tail bucket is a true divergence."""

from __future__ import annotations

import torch

from pipeline.core.losses import forward_kl_top


def stored(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, index = logits.log_softmax(-1).topk(top, dim=-1)
    return index, values


def test_never_negative_and_zero_only_for_equal_head_and_tail():
    torch.manual_seed(0)
    target, draft = torch.randn(200, 50) * 2, torch.randn(200, 50) * 2
    index, values = stored(target, 5)
    assert (forward_kl_top(draft, index, values) > 0).all()
    assert forward_kl_top(target, index, values).abs().max() < 1e-6
    shuffled = target.clone()
    rest = torch.ones_like(target, dtype=torch.bool).scatter(1, index, False)
    shuffled[rest] = target[rest].reshape(200, -1).flip(1).reshape(-1)
    assert forward_kl_top(shuffled, index, values).abs().max() < 1e-5, "the bucket is blind to the order of the tail"


def test_all_entries_stored_give_the_full_forward_kl():
    torch.manual_seed(1)
    target, draft = torch.randn(64, 30), torch.randn(64, 30)
    exact = (target.softmax(-1) * (target.log_softmax(-1) - draft.log_softmax(-1))).sum(-1)
    assert torch.allclose(forward_kl_top(draft, *stored(target, 30)), exact, atol=1e-5)


def test_a_draft_that_overweights_the_top_is_punished_through_the_tail():
    """Without the tail term the value would be negative, after renormalising both sides it would be 0."""
    index, values = torch.arange(5)[None], torch.full((1, 5), 0.01).log()
    draft = torch.zeros(1, 100)
    draft[0, :5] = 3.0
    without_tail = (values.exp() * (values - draft.log_softmax(-1)[:, :5])).sum()
    assert without_tail < 0
    assert forward_kl_top(draft, index, values).item() > 0.2


def test_entries_outside_the_head_count_as_tail():
    target = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    index, values = stored(target, 2)
    columns = torch.tensor([[0, -1]])
    draft = torch.tensor([[2.0, 0.0]])
    p, q = values.exp()[0, 0], draft.softmax(-1)[0, 0]
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert torch.allclose(forward_kl_top(draft, columns, values)[0], expected, atol=1e-6)


def test_half_precision_storage_moves_the_loss_by_less_than_a_percent():
    torch.manual_seed(2)
    target, draft = torch.randn(500, 200) * 3, torch.randn(500, 200) * 3
    index, values = stored(target, 20)
    exact = forward_kl_top(draft, index, values).mean()
    assert abs(forward_kl_top(draft, index, values.half().float()).mean() / exact - 1) < 0.01


def test_gradient_is_finite_when_the_draft_is_certain():
    logits = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)
    forward_kl_top(logits, torch.tensor([[0]]), torch.tensor([[-0.1]])).sum().backward()
    assert torch.isfinite(logits.grad).all()
