"""What a forward pass of the draft computes while it is distilled: the loss over its tokens, or its agreement on dev.

The output head and the loss run over chunks of tokens, each chunk's gradients being taken at once, so that logits exist
for one chunk only: memory does not grow with batch x length x vocabulary (the fused losses of Liger Kernel, Hsu et al., 2024, by autograd).

With the whole head, or with all rows outside the trimmed one drawn, loss and gradient are exact. With fewer rows drawn only
the normaliser, the sum of exponentials, is right in expectation; the loss and its gradient are functions of its logarithm,
and in expectation off by the order of its relative variance, the less the more rows are drawn. At q = p the gradient of a
draw is not zero, as the whole head's is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.core.batches import AnswerBatches, answer_hidden
from pipeline.core.losses import Divergence, top_and_tail
from pipeline.core.rounds import greedy_rounds

DRAFT_LENGTH = 4  # k of the acceptance rate that is followed while training
LOG_NOTHING = 25.0  # so far below the largest logit lies a column that stands for no mass

ChunkLoss = Callable[[slice, Tensor, Tensor, Tensor | None], Tensor]


class _ChunkedSum(torch.autograd.Function):
    """sum_i w_i loss_i, gradients with respect to hidden states, head and bias taken chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx, chunk_loss: ChunkLoss, chunk: int, token_weights, hidden, weight, bias):
        needed = ctx.needs_input_grad[3:]
        inputs = (hidden, weight, bias)
        grads = [torch.zeros_like(tensor) if need else None for tensor, need in zip(inputs, needed, strict=True)]
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        head = [None if t is None else t.detach().requires_grad_(need) for t, need in zip(inputs[1:], needed[1:])]
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad():
                rows = hidden[part].detach().requires_grad_(needed[0])
                values = chunk_loss(part, rows, *head)
                losses[part] = values.detach()
                wanted = [tensor for tensor, need in zip((rows, *head), needed, strict=True) if need]
                found = iter(torch.autograd.grad((values * token_weights[part]).sum(), wanted) if wanted else ())
            for place, need in enumerate(needed):
                if need and place == 0:
                    grads[0][part] = next(found)
                elif need:
                    grads[place] += next(found)
        ctx.grads = grads
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights).sum(), losses

    @staticmethod
    def backward(ctx, scale, _):
        return (None, None, None, *(None if grad is None else grad * scale for grad in ctx.grads))


def chunked_sum(
    chunk_loss: ChunkLoss, chunk: int, token_weights: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum of token_weights x losses, losses [tokens] without gradient), `chunk` tokens at a time.

    chunk_loss     (part, hidden [chunk, width], weight, bias) -> losses [chunk]; `part` is the slice of the tokens
    token_weights  [tokens]; hidden [tokens, width]; weight [columns, width]; bias [columns] or None
    """
    return _ChunkedSum.apply(chunk_loss, chunk, token_weights, hidden, weight, bias)


def as_forward_of(module: nn.Module, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """`function(*inputs)` run as the forward pass of `module`.

    Where the weights of `module` are split over processes (FSDP, ZeRO), its hooks gather them for `function` and again for
    the backward pass; read from outside, they would be one process's share.
    """

    def forward(*inputs: Tensor) -> Any:
        del module.forward  # `function` may call the module as it is
        return function(*inputs)

    module.forward = forward
    return module(*inputs)


@dataclass
class Head:
    """The columns over which the draft's distribution is normalised.

    The first are the trimmed head's, or every real token's; after them come `sampled` rows drawn from the remaining ones
    to stand for all of these: their logits are raised by log(remaining / drawn), which makes the sum of exponentials an
    unbiased estimate of the whole one (sampled softmax; Bengio and Senecal, 2008, uniform proposal).
    """

    weight: Tensor  # [columns, width]
    bias: Tensor | None  # [columns]
    exact: int  # columns before the sampled ones
    correction: float  # log(remaining rows / sampled rows)

    def log_mass_without(self, logits: Tensor, left_out: Tensor) -> Tensor:
        """log sum exp over the whole head but for the columns `left_out`, [tokens, 1] float32.

        logits [tokens, columns]; left_out int64 [tokens, any], `exact` where there is none. Summed without them, not as a
        difference, so that little mass keeps its value and its gradient.
        """
        columns = F.pad(logits[:, : self.exact].float(), (0, 1), value=-math.inf)
        rest = columns.scatter(-1, left_out, -math.inf)
        rest[:, -1] = logits.detach().float().amax(dim=-1) - LOG_NOTHING  # else the sum over no column at all is -inf
        mass = rest.logsumexp(dim=-1, keepdim=True)
        if logits.shape[1] == self.exact:
            return mass
        sampled = logits[:, self.exact :].float().logsumexp(dim=-1, keepdim=True) + self.correction
        return torch.logaddexp(mass, sampled)


class Objective:
    """The loss of distillation, and the agreement that is measured on dev.

    draft_loss   p and q -> one value per token (pipeline.core.losses)
    head_ids     int64 [head] ids of the trimmed head
    vocabulary   ids from 0 on that target and draft share; rows beyond are never trained nor drawn
    sampled_rows rows of the rest of the head drawn for each optimiser step; `None`: all of them
    target       in the loop, for its probabilities over the whole vocabulary; `None`: the stored ones are used
    reference    a draft distilled before: only the `selected_share` of the tokens on which the present draft's loss exceeds
                 the reference's most are trained, those still to be learnt and learnable (AdaSPEC, arXiv 2510.19779)
    """

    def __init__(
        self,
        draft_loss: Divergence,
        head_ids: Tensor,
        vocabulary: int,
        *,
        sampled_rows: int | None,
        chunk_tokens: int,
        kl_temperature: float = 1.0,
        target: PreTrainedModel | None = None,
        reference: PreTrainedModel | None = None,
        selected_share: float = 1.0,
    ) -> None:
        self.draft_loss = draft_loss
        self.head_ids = head_ids
        self.chunk_tokens = chunk_tokens
        self.kl_temperature = kl_temperature
        self.target = target
        self.reference = reference
        self.selected_share = selected_share
        everything = torch.arange(vocabulary, device=head_ids.device)
        self.whole = target is not None or sampled_rows is None
        self.columns = everything if self.whole else head_ids
        outside = torch.ones(vocabulary, dtype=torch.bool, device=head_ids.device)
        outside[self.columns] = False
        self.rest = outside.nonzero().squeeze(-1)
        self.sampled_rows = min(sampled_rows or 0, len(self.rest))
        self.sampled = self.rest[:0]
        self.vocabulary = everything

    def draw_rows(self, seed: int) -> None:
        """Choose the sampled rows of one optimiser step; the same on every process."""
        if self.sampled_rows:
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(len(self.rest), generator=generator)[: self.sampled_rows]
            self.sampled = self.rest[chosen.to(self.rest.device)]

    def head(self, draft: PreTrainedModel) -> Head:
        module = draft.get_output_embeddings()
        rows = torch.cat([self.columns, self.sampled])
        correction = torch.tensor(len(self.rest) / max(1, self.sampled_rows)).log().item()
        bias = None if module.bias is None else module.bias[rows]
        return Head(module.weight[rows], bias, len(self.columns), correction)

    def loss(self, draft: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(sum over the batch's scored tokens, one value per token [n] without gradient)."""
        hidden = answer_hidden(draft, batch)
        target_hidden = None
        if self.target is not None:
            with torch.no_grad():
                target_hidden = answer_hidden(self.target, batch)
        head_loss = functools.partial(self._head_loss, draft, batch, target_hidden)
        return as_forward_of(draft.get_output_embeddings(), head_loss, hidden)

    def _head_loss(
        self, draft: PreTrainedModel, batch: dict[str, Tensor], target_hidden: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        head = self.head(draft)
        count = len(batch["query"])

        def chunk_loss(part: slice, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            known = slice(part.start, min(part.stop, count))
            logits = F.linear(rows, weight, bias)[: max(0, count - part.start)]
            values = self._token_losses(known, logits, head, batch, target_hidden)
            return F.pad(values, (0, len(rows) - len(values)))

        weights = self._token_weights(batch, chunk_loss, hidden, head)
        total, losses = chunked_sum(chunk_loss, self.chunk_tokens, weights, hidden, head.weight, head.bias)
        return total, losses[:count]

    def _token_losses(
        self, part: slice, logits: Tensor, head: Head, batch: dict[str, Tensor], target_hidden: Tensor | None
    ) -> Tensor:
        if target_hidden is not None:
            with torch.no_grad():
                scores = self.target.get_output_embeddings()(target_hidden[part])[:, : len(self.columns)]
                log_p = (scores.float() / self.kl_temperature).log_softmax(dim=-1)
            return self.draft_loss(log_p, (logits.float() / self.kl_temperature).log_softmax(dim=-1))
        index = batch["top_ids"][part] if self.whole else batch["top_index"][part]
        present = (index >= 0) & (index < len(self.columns))
        chosen = logits.gather(-1, index.masked_fill(~present, 0)).float()
        rest = head.log_mass_without(logits, index.masked_fill(~present, head.exact))
        named = chosen.masked_fill(~present, -math.inf)
        normaliser = torch.cat([named, rest], dim=-1).logsumexp(dim=-1, keepdim=True)
        top_logprobs = batch["top_logprobs"][part]
        return self.draft_loss(*top_and_tail(top_logprobs, chosen - normaliser, rest - normaliser, present))

    @torch.no_grad()
    def _token_weights(self, batch: dict[str, Tensor], chunk_loss: ChunkLoss, hidden: Tensor, head: Head) -> Tensor:
        """One per token; with a selection n / selected on the selected tokens and 0 elsewhere. [n rounded up]"""
        ones = hidden.new_ones(len(hidden), dtype=torch.float32)
        if self.selected_share == 1:
            return ones
        count = len(batch["query"])
        bias = None if head.bias is None else head.bias.detach()
        parts = (hidden.detach(), head.weight.detach(), bias)  # else the chunks' gradients would be made, and dropped
        own = chunked_sum(chunk_loss, self.chunk_tokens, ones, *parts)[1][:count]
        other, states = self.head(self.reference), answer_hidden(self.reference, batch)
        learnable = chunked_sum(chunk_loss, self.chunk_tokens, ones, states, other.weight, other.bias)[1][:count]
        selected = max(1, round(self.selected_share * count))
        chosen = (own - learnable).topk(selected).indices
        return torch.zeros_like(ones).index_fill_(0, chosen, count / selected)

    @torch.no_grad()
    def agreement(self, draft: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        """Float64 [n, 3], for each of the batch's scored tokens: whether the draft's best token is the target's, with the
        trimmed head and with the full one; and the overlap sum min(p, q) at temperature 1 of the full head with the
        target's stored top (its tail left out: a lower bound of the token acceptance there)."""
        hidden = answer_hidden(draft, batch)[: len(batch["query"])]
        module = draft.get_output_embeddings()
        return as_forward_of(module, functools.partial(self._head_agreement, module, batch), hidden)

    def dev_figures(self, draft: PreTrainedModel, batches: AnswerBatches) -> dict[str, float]:
        """`agreement_figures` of a draft on all of `batches`, under the names of the history."""

        def run(batch: dict[str, Tensor]) -> Tensor:
            return self.agreement(draft, {name: tensor.to(draft.device) for name, tensor in batch.items()})

        return {f"dev_{name}": value for name, value in agreement_figures(run, batches).items()}

    def _head_agreement(self, module: nn.Module, batch: dict[str, Tensor], hidden: Tensor) -> Tensor:
        found = hidden.new_zeros(len(hidden), 3, dtype=torch.float64)
        for start in range(0, len(hidden), self.chunk_tokens):
            part = slice(start, start + self.chunk_tokens)
            logits = F.linear(hidden[part], module.weight, module.bias)[:, : len(self.vocabulary)].float()
            wanted = batch["target"][part]
            found[part, 0] = (self.head_ids[logits[:, self.head_ids].argmax(dim=-1)] == wanted).double()
            found[part, 1] = (logits.argmax(dim=-1) == wanted).double()
            ids = batch["top_ids"][part]
            present = ids < logits.shape[1]
            q = logits.gather(-1, ids.masked_fill(~present, 0)) - logits.logsumexp(dim=-1, keepdim=True)
            overlap = torch.minimum(batch["top_logprobs"][part], q).exp() * present
            found[part, 2] = overlap.sum(dim=-1).double()
        return found


def agreement_figures(run: Callable[[dict[str, Tensor]], Tensor], batches: AnswerBatches) -> dict[str, float]:
    """What a draft reaches on the greedy answers of `batches`; `run` gives the `Objective.agreement` of a batch.

    token_acceptance, token_acceptance_full_head and overlap are means over tokens. acceptance_rate is accepted / drafted
    tokens of greedy speculative decoding at k = `DRAFT_LENGTH` with the trimmed head: what is accepted is the target's own
    text, so what the draft says on that text decides every round.
    """
    found = torch.cat([run(batches[index]).cpu() for index in range(len(batches))])
    counts = [count for index in range(len(batches)) for count in batches.counts(index)]
    names = ("token_acceptance", "token_acceptance_full_head", "overlap")
    figures = dict(zip(names, found.mean(dim=0).tolist(), strict=True))
    agreed = (found[:, 0] > 0).split(counts)
    rounds = [found for hits in agreed for found in greedy_rounds(hits.tolist(), DRAFT_LENGTH)]
    if not rounds:
        return figures
    accepted, drafted = map(sum, zip(*rounds, strict=True))
    return {**figures, "acceptance_rate": accepted / drafted}
