"""Chunked, full, stored and online losses agree in value and gradient; the sampled normaliser is right on average."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_answers import answers_of
from tiny_models import noisy_copy, tiny_llama

from pipeline.core.batches import AnswerBatches, answer_logits
from pipeline.core.decoding import DecodeConfig, decode
from pipeline.core.drafters import ModelDrafter
from pipeline.core.losses import NAMES, divergence
from pipeline.core.objective import Objective, as_forward_of, chunked_sum

VOCABULARY = 100
HEAD = list(range(0, 100, 2)) + [1, 3]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(std=0.1, num_hidden_layers=3)


@pytest.fixture(scope="module")
def draft(target):
    return noisy_copy(target, 0.5)


@pytest.fixture(scope="module")
def batch(target):
    """All entries stored, so that stored and online see the same."""
    return AnswerBatches(answers_of(target, 6, top=VOCABULARY), list(range(VOCABULARY)), 10_000, seed=0)[0]


def objective(name="forward_kl", head=tuple(range(VOCABULARY)), **options) -> Objective:
    settings = {"sampled_rows": None, "chunk_tokens": 1000, **options}
    return Objective(divergence(name, 0.5), torch.tensor(head), VOCABULARY, **settings)


def loss_and_gradient(measured: Objective, draft, batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = copy.deepcopy(draft).train()
    total, losses = measured.loss(model, batch)
    total.backward()
    return total.detach(), losses, torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_give_the_loss_and_gradient_of_plain_autograd(name, tied, target, batch):
    """L05"""
    draft = tiny_llama(seed=3, std=0.1, tie_word_embeddings=tied)
    model = copy.deepcopy(draft)
    log_q = answer_logits(model, batch, None).log_softmax(-1)
    order = batch["top_ids"].argsort(-1)
    log_p = batch["top_logprobs"].gather(-1, order)
    plain = divergence(name, 0.5)(log_p, log_q)
    plain.sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    by_chunk = {chunk: loss_and_gradient(objective(name, chunk_tokens=chunk), draft, batch) for chunk in (1, 7, 1000)}
    for total, losses, found in by_chunk.values():
        assert torch.isclose(total, by_chunk[1000][0], rtol=1e-6) and relative(found, by_chunk[1000][2]) < 1e-6
        assert torch.allclose(losses, plain, atol=1e-5) and torch.isclose(total, plain.sum(), rtol=1e-5)
        assert relative(found, gradient) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_stored_and_online_agree(name, target, draft, batch):
    stored = loss_and_gradient(objective(name), draft, batch)
    online = loss_and_gradient(objective(name, target=target), draft, batch)
    assert torch.allclose(stored[1], online[1], atol=1e-5)
    assert relative(stored[2], online[2]) < 1e-4


@pytest.mark.parametrize("options", [{}, {"online": True}, {"online": True, "kl_temperature": 3.0}])
@pytest.mark.parametrize("name", NAMES)
def test_the_target_as_its_own_draft_has_no_loss_on_any_path(name, options, target, batch):
    options = dict(options)
    online = target if options.pop("online", False) else None
    _, losses = objective(name, target=online, **options).loss(target, batch)
    assert losses.abs().max() < 1e-4


def test_the_temperature_acts_on_both_sides(target, draft, batch):
    total, losses = objective(target=target, kl_temperature=2.0).loss(draft, batch)
    p = (answer_logits(target, batch, None) / 2).log_softmax(-1)
    q = (answer_logits(draft, batch, None) / 2).log_softmax(-1)
    assert torch.allclose(losses, divergence("forward_kl", 0.5)(p, q), atol=1e-5)


def test_a_certain_draft_is_still_told_of_the_targets_tail(target):
    """What the draft leaves to the tail is far below single precision's 1 - p; the gradient is exact nonetheless."""
    measured = objective(head=list(range(VOCABULARY)))
    head = measured.head(target)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :2] = 20.0
    logits.requires_grad_()
    batch = {"top_ids": torch.tensor([[0, 1]]), "top_logprobs": torch.tensor([[0.4, 0.3]]).log()}
    loss = measured._token_losses(slice(0, 1), logits, head, batch, None)
    loss.sum().backward()
    q = logits.detach().double().softmax(-1)[0]
    exact = 0.4 * math.log(0.4 / q[0]) + 0.3 * math.log(0.3 / q[1]) + 0.3 * math.log(0.3 / q[2:].sum())
    assert loss.item() == pytest.approx(exact, rel=1e-5)
    assert logits.grad[0, 2:].sum().item() == pytest.approx(-0.3, rel=1e-3)


def test_the_sampled_normaliser_is_unbiased_and_the_whole_rest_is_exact(draft, batch):
    logits = answer_logits(draft, batch, None).detach()
    exact = logits.logsumexp(-1).exp()

    def estimate(rows: int, seed: int) -> torch.Tensor:
        sampled = objective(head=HEAD, sampled_rows=rows)
        sampled.draw_rows(seed)
        head = sampled.head(draft)
        columns = torch.cat([sampled.columns, sampled.sampled])
        nothing = torch.full((len(logits), 1), head.exact)
        return head.log_mass_without(logits[:, columns], nothing).squeeze(-1).exp()

    assert torch.allclose(estimate(len(HEAD), 0), exact, rtol=1e-5), "as many as there are: every row once"
    mean = torch.stack([estimate(8, seed) for seed in range(2000)]).mean(0)
    assert ((mean / exact - 1).abs() < 0.02).all()
    assert not torch.allclose(estimate(8, 0), estimate(8, 1))
    assert torch.equal(estimate(8, 5), estimate(8, 5))


@pytest.fixture(scope="module")
def trimmed(target):
    """What the default recipe trains on: stored entries of the trimmed head, and one tail; for the whole head the same."""
    batch = AnswerBatches(answers_of(target, 6, top=VOCABULARY), HEAD, 10_000, seed=0)[0]
    return {**batch, "top_ids": batch["top_ids"].masked_fill(batch["top_index"] < 0, VOCABULARY)}


def with_drawn_rows(draft, batch, rows: int, seed: int, name="forward_kl"):
    """Loss, losses and gradient of the trimmed head with `rows` of the others."""
    measured = objective(name, HEAD, sampled_rows=rows)
    measured.draw_rows(seed)
    return loss_and_gradient(measured, draft, batch)


@pytest.mark.parametrize("name", NAMES)
def test_the_trimmed_head_with_all_other_rows_is_the_whole_head(name, target, draft, trimmed):
    _, losses, gradient = with_drawn_rows(draft, trimmed, VOCABULARY, 0, name)
    _, whole, expected = loss_and_gradient(objective(name, HEAD), draft, trimmed)
    assert torch.allclose(losses, whole, atol=1e-5) and relative(gradient, expected) < 1e-4
    assert with_drawn_rows(target, trimmed, VOCABULARY, 0, name)[1].abs().max() < 1e-4


def test_drawn_rows_come_near_the_whole_heads_loss_and_gradient_nearer_on_average_and_with_more_rows(draft, trimmed):
    whole, _, expected = loss_and_gradient(objective(head=HEAD), draft, trimmed)
    biases, apart_on_average = [], []
    for rows in (12, 36):
        drawn = [with_drawn_rows(draft, trimmed, rows, seed) for seed in range(60)]
        totals, gradients = torch.stack([found[0] for found in drawn]), torch.stack([found[2] for found in drawn])
        apart = [relative(gradient, expected) for gradient in gradients]
        biases.append((totals.mean() / whole - 1).abs().item())
        apart_on_average.append(relative(gradients.mean(0), expected))
        assert (totals / whole - 1).abs().max() < 0.1 and max(apart) < 0.6
        assert apart_on_average[-1] < min(apart), "what a draw gets wrong averages out"
    assert biases[1] < biases[0] < 0.05 and apart_on_average[1] < apart_on_average[0] < 0.1


def test_the_target_as_its_own_draft_has_little_loss_whichever_rows_are_drawn(target, draft, trimmed):
    """Never below zero; and what pulls it away is small, and smaller on average."""
    whole, _, gradient = loss_and_gradient(objective(head=HEAD), draft, trimmed)
    drawn = [with_drawn_rows(target, trimmed, 12, seed) for seed in range(60)]
    assert all(losses.min() > -1e-5 and total < 0.1 * whole for total, losses, _ in drawn)
    pulls = torch.stack([pull for _, _, pull in drawn])
    assert pulls.norm(dim=1).max() < 0.5 * gradient.norm() and pulls.mean(0).norm() < 0.1 * gradient.norm()


def test_sampled_rows_take_as_much_mass_off_the_rest_of_the_head_as_all_of_them(target, batch):
    """A draft trained on the trimmed head alone leaves mass on the rows it never sees, from which other engines draw."""
    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    outside[HEAD] = False
    shares = {}
    for rows in (0, 8, int(outside.sum())):
        draft = copy.deepcopy(target).train()
        draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.detach().clone(), requires_grad=False)
        measured = objective(head=HEAD, sampled_rows=rows)
        optimiser = torch.optim.AdamW([p for p in draft.model.parameters() if p.requires_grad], lr=3e-3)
        for step in range(80):
            measured.draw_rows(step)
            optimiser.zero_grad()
            measured.loss(draft, {**batch, **_within_head(batch)})[0].backward()
            optimiser.step()
        with torch.no_grad():
            shares[rows] = answer_logits(draft, batch, None).softmax(-1)[:, outside].sum(-1).mean().item()
    alone, sampled, whole = shares.values()
    assert whole < sampled < whole + 0.05 < 0.6 * alone


def _within_head(batch) -> dict[str, torch.Tensor]:
    """The target answers within the trimmed head only: its probabilities there, renormalised."""
    column = torch.full((VOCABULARY,), -1)
    column[HEAD] = torch.arange(len(HEAD))
    index = column[batch["top_ids"]]
    logprobs = batch["top_logprobs"].masked_fill(index < 0, -1e4).log_softmax(-1)
    return {"top_index": index, "top_logprobs": logprobs}


def test_selection_trains_the_tokens_that_are_hard_and_learnable(target, draft, batch):
    """AdaSPEC: largest excess over the reference; here the reference is the target itself, so excess is the loss."""
    selected = objective(reference=target, selected_share=0.25)
    total, losses = selected.loss(draft, batch)
    count = round(0.25 * len(losses))
    expected = losses.topk(count).values.sum() * len(losses) / count
    assert torch.isclose(total, expected, rtol=1e-5)


def test_agreement_counts_both_heads_and_the_overlap(target, draft, batch):
    found = objective(head=HEAD).agreement(draft, batch)
    trimmed, full, overlap = found.sum(dim=0).tolist()
    p, q = (answer_logits(model, batch, None) for model in (target, draft))
    head = torch.tensor(HEAD)
    assert found.shape == (len(batch["labels"]), 3)
    assert full == (p.argmax(-1) == q.argmax(-1)).sum()
    assert trimmed == (p.argmax(-1) == head[q[:, head].argmax(-1)]).sum()
    assert overlap == pytest.approx(torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item(), rel=1e-4)


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_the_acceptance_rate_is_that_of_the_decoder(target, noise):
    """Greedy rounds are decided by what the draft says on the target's own answers: no decoding is needed to count them."""
    draft, answers = noisy_copy(target, noise), answers_of(target, 12)
    batches = AnswerBatches(answers, HEAD, 64, seed=0)
    figures = objective(head=HEAD).dev_figures(draft, batches)
    accepted = drafted = 0
    for answer in answers:
        config = DecodeConfig(draft_length=4, max_new_tokens=len(answer.answer_ids), allowed_token_ids=range(100))
        found = decode(target, ModelDrafter(draft, HEAD, False), [answer.prompt_ids.tolist()], config).sequences[0]
        assert found.token_ids == answer.answer_ids.tolist()
        accepted += sum(block.accepted for block in found.rounds)
        drafted += sum(block.drafted for block in found.rounds)
    assert 0 < accepted < drafted
    assert figures["dev_acceptance_rate"] == pytest.approx(accepted / drafted)


def test_padding_rows_of_target_and_draft_play_no_part(target, batch):
    """T01, in the loop: 112 and 104 rows, 100 real ids, huge weights beyond."""
    wide, draft = (
        tiny_llama(seed=s, std=0.1, vocabulary=v, tie_word_embeddings=False) for s, v in ((1, 112), (2, 104))
    )
    reference = objective(target=wide).loss(draft, batch)[0]
    with torch.no_grad():
        wide.lm_head.weight[100:] = 1e4
        draft.lm_head.weight[100:] = 1e4
    total, losses = objective(target=wide).loss(draft, batch)
    assert torch.isfinite(losses).all() and torch.isclose(total, reference)


def test_a_function_runs_as_the_forward_pass_of_a_module():
    """Within its hooks, by which FSDP and ZeRO gather weights; the module itself can be called meanwhile and afterwards."""
    module, seen, ones = torch.nn.Linear(2, 3), [], torch.ones(1, 2)
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    doubled = as_forward_of(module, lambda inputs: 2 * torch.nn.Linear.forward(module, inputs), ones)
    assert seen == ["before", "after"]
    assert torch.equal(doubled, 2 * module(ones)) and torch.equal(as_forward_of(module, module, ones), module(ones))


class _Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest number of elements that any operation gave back."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_logits_exist_for_one_chunk_only():
    """Memory: nothing of the size tokens x vocabulary is ever made, forward or backward."""
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)

    def loss(part, rows, weight, bias):
        return torch.nn.functional.linear(rows, weight).logsumexp(-1)

    widest = {}
    for chunk in (32, 512):
        with _Widest() as mode:
            chunked_sum(loss, chunk, torch.ones(512), hidden, weight)[0].backward()
        widest[chunk] = mode.largest
    assert widest == {32: 32 * 5000, 512: 512 * 5000}
