"""Speculative decoding: one loop for plain and speculative, greedy and sampled, one row and many.

A round feeds the target the last committed token and the k drafted ones, keeps the leading run that verification allows
and adds one token of the target's own (Leviathan et al., 2023). Plain decoding is the same round with nothing drafted.
Prompts in flight occupy slots 0 .. n - 1 of the caches; when a row ends, the last row moves into its slot and a waiting
prompt takes the freed one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import resource
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.core.cache import CachedModel
from pipeline.core.constraints import AllowedTokens, Constraints
from pipeline.core.drafters import Batch, Drafter, ModelDrafter, certain_proposal, head_size, pad_right
from pipeline.core.replay import Replayed, padded_rows
from pipeline.core.sampling import Proposal, Sampling, row_seed, verify, wrap_seed

REFILL_SHARE = 16  # prompts wait until a 16th of the slots is free: larger prefill passes cost less
PREFILL_TOKENS = 4096  # tokens of one prefill pass, padding included, unless a single prompt is longer
PREFILL_SCORED = 1024  # tokens of one prefill pass whose log-probabilities are asked for
NO_TOKEN = -1  # stands for the token that the constraints leave none for
HALF_CHARACTER = "\ufffd"  # what tokenizers decode the first bytes of an unfinished character to
PREFILL_LOGITS = 64  # positions at which a prefill pass computes logits: rows times distinct prompt lengths

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeConfig:
    """What to decode and how."""

    draft_length: int  # k, tokens drafted in a round; without a drafter it has no effect
    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    eos_token_ids: tuple[int, ...] = ()  # a row ends with any of these
    stop: tuple[str, ...] = ()  # a row ends when its text contains one of these; needs the tokenizer
    allowed_token_ids: Sequence[int] | None = None  # the only ids that may be emitted; None: every logit of the target
    repetition_penalty: float = 1.0  # 1: off; divides logits of ids in prompt and answer (multiplies negative ones)
    frequency_penalty: float = 0.0  # 0: off; taken from an id's logit for each time that it occurs in the answer
    min_new_tokens: int = 0  # no EOS before so many tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of ids that are never emitted
    return_logprobs: int | None = None  # alternatives returned per token with its own log-probability; None: neither
    prompt_logprobs: int | None = None  # the same for the prompt's tokens after the first, scored while it is prefilled

    def __post_init__(self) -> None:
        for name in ("draft_length", "max_new_tokens", "top_k", "min_new_tokens"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), SupportsIndex):
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a sequence of strings, got the string {self.stop!r}")
        if not all(isinstance(token, SupportsIndex) and token >= 0 for token in self.eos_token_ids):
            raise ValueError(f"eos_token_ids must be token ids, got {self.eos_token_ids}")
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be >= 1, got {self.draft_length}; for plain decoding pass no drafter")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens must lie in [0, {self.max_new_tokens}], got {self.min_new_tokens}")
        if not 0 < self.repetition_penalty < math.inf or not math.isfinite(self.frequency_penalty):
            raise ValueError(
                "repetition_penalty must be a number above 0 and frequency_penalty a number, got"
                f" {self.repetition_penalty} and {self.frequency_penalty}"
            )
        if not all(word and min(word) >= 0 for word in self.bad_words):
            raise ValueError("bad_words must be sequences of at least one token id")
        self.sampling  # noqa: B018 - checks the ranges

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Round:
    """One target pass over a block of drafted tokens (counts of tokens)."""

    drafted: int
    accepted: int
    emitted: int


@dataclass
class Logprobs:
    """Log-softmax of the target's raw logits at temperature 1 over the allowed ids, for each token; minus infinity for a
    prompt's token that is not allowed.

    token [n]; top_ids and top [n][alternatives], most probable first.
    """

    token: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)


@dataclass
class GeneratedSequence:
    """The answer to one prompt."""

    token_ids: list[int]  # new ones, the EOS or what completes a stop string included
    text: str | None  # without special tokens, cut before a stop string; None without a tokenizer
    finish_reason: str  # eos | stop | length
    rounds: list[Round]  # the prefill, which emits the first token, is none
    timestamps: list[float]  # seconds on time.perf_counter's clock, when each token was delivered
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


@dataclass
class Stats:
    """Totals over a decoder's life, or a call of `decode`: counts of finished rows, passes and seconds of all."""

    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # in rounds: all new tokens but the first of each row
    rounds: int = 0  # of each row: a pass over three rows is three
    target_passes: int = 0  # prefills included
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_memory_bytes: int = 0


@dataclass
class Event:
    """Tokens that a step delivered to one request, and the finished sequence if they ended it."""

    request: int
    token_ids: list[int]
    finished: GeneratedSequence | None


@dataclass
class DecodeResult:
    sequences: list[GeneratedSequence]
    stats: Stats


@dataclass
class _Row:
    """Host-side state of a request in a slot; `tokens` are the committed ones, prompt first."""

    request: int
    tokens: list[int]
    prompt_length: int
    seed: int
    rounds: list[Round] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    finish_reason: str | None = None
    text: str | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]


class Decoder:
    """Owns the caches of a target and a drafter and decodes any number of prompts through `slots` rows (default: 1).

    `drafter` is None (plain decoding), a causal LM, or an object of the `Drafter` protocol. Neither model nor its
    generation config is changed. A row that outgrows the draft's context is decoded plainly from there on.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel | Drafter | None,
        config: DecodeConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        slots: int | None = None,
    ) -> None:
        slots = 1 if slots is None else slots
        if slots < 1:
            raise ValueError(f"slots must be >= 1, got {slots}")
        if config.stop and tokenizer is None:
            raise ValueError("stop strings need the tokenizer")
        allowed = _allowed_ids(config, head_size(target))
        self.config = config
        self.sampling = config.sampling
        self.tokenizer = tokenizer
        self.slots = slots
        self.target = CachedModel(target, slots)
        self.drafter = ModelDrafter(drafter) if isinstance(drafter, PreTrainedModel) else drafter
        self._embedded = target.get_input_embeddings().weight.shape[0]
        self._allowed = AllowedTokens(allowed, head_size(target), self.target.device)
        self._constraints = Constraints(
            config.repetition_penalty,
            config.frequency_penalty,
            config.min_new_tokens,
            config.eos_token_ids,
            config.bad_words,
            self._allowed.logits,
            self.target.device,
        )
        if self.drafter is not None:
            self.drafter.open(slots, self.sampling, allowed)
            self.target.wants_head_input = self.drafter.wants_hidden_states
        self._verify = Replayed(self._verify_block, self.target.device, self.target.is_whole)
        self.stats = Stats()
        self._rows: list[_Row] = []
        self._waiting: deque[_Row] = deque()
        self._requests = 0
        self._batch: Batch | None = None  # None: the rows changed since the last round
        self._hidden_states: Tensor | None = None  # [slots, hidden], as in `Batch`
        self._warned = False

    def submit(self, prompt_ids: list[int], seed: int | None = None) -> int:
        """Queue a prompt; returns its request number. `seed` None draws one."""
        prompt_ids = [operator.index(token) for token in prompt_ids]
        if not prompt_ids:
            raise ValueError("a prompt needs at least one token")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._embedded:
            raise ValueError(f"prompt ids must lie between 0 and {self._embedded - 1}, the target's embedding")
        size = f"a prompt of {len(prompt_ids)} tokens and {self.config.max_new_tokens} new ones exceed"
        needed = len(prompt_ids) + self.config.max_new_tokens
        if self.target.max_positions and needed > self.target.max_positions:
            raise ValueError(f"{size} the target's {self.target.max_positions} positions")
        limit = self.drafter and self.drafter.max_positions
        if limit and needed > limit and not self._warned:
            self._warned = True
            logger.warning("%s the draft's %d positions: beyond them rows are decoded plainly", size, limit)
        seed = secrets.randbits(63) if seed is None else wrap_seed(seed)
        self._waiting.append(_Row(self._requests, prompt_ids, len(prompt_ids), seed))
        self._requests += 1
        return self._requests - 1

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._rows or self._waiting)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting prompts to free slots, or else run one round for all rows; returns what was delivered."""
        free = self.slots - len(self._rows)
        if free and self._waiting and (free >= self.slots // REFILL_SHARE or not self._rows):
            return self._prefill()
        return self._round() if self._rows else []

    def _prefill(self) -> list[Event]:
        """Run the next prompts through both models and emit their first tokens."""
        started = time.perf_counter()
        first_row = len(self._rows)
        rows = self._admit(self.slots - first_row)
        prompts = [row.tokens for row in rows]
        room = max(map(len, prompts)) + self.config.max_new_tokens + self.config.draft_length + 1
        if self.target.reserve(room):
            self._verify.clear()
        logits = self._allowed.restrict(self._prompt_logits(first_row, rows))
        if self.drafter is not None:
            self.drafter.begin(first_row, prompts, room)
        self._rows.extend(rows)
        proposal = certain_proposal([[]] * len(rows), self.target.device)
        sizes, _, seeds = self._on_device(rows, len(rows))
        accepted, block = self._decide(logits, sizes, seeds, *self._history(rows, len(rows)), proposal)
        table = torch.cat([accepted[:, None], proposal.lengths[:, None], block], dim=1)
        events = self._settle(rows, table.tolist(), logits, is_prefill=True)
        self.stats.prefill_seconds += time.perf_counter() - started
        return events

    def _admit(self, room: int) -> list[_Row]:
        """The waiting rows that share the next prefill pass, at most `room`: together they stay within its limits."""
        rows: list[_Row] = []
        lengths: set[int] = set()
        most = PREFILL_TOKENS if self.config.prompt_logprobs is None else PREFILL_SCORED
        while self._waiting and len(rows) < room:
            lengths.add(len(self._waiting[0].tokens))
            count = len(rows) + 1
            if rows and (count * max(lengths) > most or (len(lengths) > 1 and count * len(lengths) > PREFILL_LOGITS)):
                break
            rows.append(self._waiting.popleft())
        return rows

    def _prompt_logits(self, first_row: int, rows: list[_Row]) -> Tensor:
        """The target's logits after each prompt, [rows, 1, vocab]; scores the prompts where that is asked for."""
        prompts = [row.tokens for row in rows]
        longest = max(map(len, prompts))
        device = self.target.device
        token_ids, positions = pad_right(prompts, longest, device)
        visible = self.target.visible(longest)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        row = torch.arange(len(rows), device=device)
        if self.config.prompt_logprobs is None:
            kept, index = last.unique(return_inverse=True)
            logits = self.target.forward(first_row, token_ids, positions, visible, kept)
        else:
            index = last
            logits = self.target.forward(first_row, token_ids, positions, visible)
            records = [(row.prompt_logprobs, row.tokens[1:]) for row in rows]
            self._record_logprobs(records, self._allowed.restrict(logits), self.config.prompt_logprobs)
        if self.target.wants_head_input:
            self._remember(first_row, self.target.head_input[row, index])
        return logits[row, index][:, None]

    def _round(self) -> list[Event]:
        """Draft, verify in one target pass, commit."""
        started = time.perf_counter()
        rows = self._rows
        if self._batch is None:
            width = padded_rows(len(rows), self.slots, self.target.device)
            self._batch = Batch([row.tokens for row in rows], *self._on_device(rows, width))
        batch = self._batch
        if self._hidden_states is not None:
            batch.hidden_states = self._hidden_states[: len(batch.sizes)]
        if self.drafter is None:
            proposal = certain_proposal([[]] * len(batch.sizes), self.target.device)
        else:
            proposal = self.drafter.propose(batch, [self.config.draft_length] * len(rows))
        longest = max(len(row.tokens) for row in rows) + proposal.token_ids.shape[1]
        table, batch.sizes, batch.tail, logits, hidden = self._verify(
            (self.target.visible(longest),),
            batch.sizes,
            batch.tail,
            batch.seeds,
            *self._history(rows, len(batch.sizes)),
            *proposal.tensors(),
        )
        if hidden is not None:
            self._remember(0, hidden)
        events = self._settle(rows, table[: len(rows)].tolist(), logits, is_prefill=False)
        self.stats.decode_seconds += time.perf_counter() - started
        return events

    def _verify_block(
        self,
        visible: int,
        sizes: Tensor,
        tail: Tensor,
        seeds: Tensor,
        history: Tensor | None,
        prompt_sizes: Tensor | None,
        *proposed: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """One target pass over the last committed token and the drafted ones, and all that follows from it on the device.

        Returns a table int64 [rows, 2 + width] for the host (accepted, drafted, then the block of which the first accepted
        + 1 tokens count), the new sizes and tail, logits [rows, width, vocab] and the new hidden states.
        """
        proposal = Proposal(*proposed)
        token_ids = torch.cat([tail[:, 1:], proposal.token_ids], dim=1)
        positions = sizes[:, None] + torch.arange(-1, token_ids.shape[1] - 1, device=sizes.device)
        logits = self._allowed.restrict(self.target.forward(0, token_ids, positions, visible))
        accepted, block = self._decide(logits, sizes, seeds, history, prompt_sizes, proposal)
        ends = accepted[:, None] + torch.arange(1, 3, device=sizes.device)
        tail = torch.cat([tail, block], dim=1).gather(1, ends)
        table = torch.cat([accepted[:, None], proposal.lengths[:, None], block], dim=1)
        hidden = None
        if self.target.wants_head_input:
            hidden = self.target.head_input[torch.arange(len(sizes), device=sizes.device), accepted]
        return table, torch.where(sizes > 1, sizes + accepted + 1, sizes), tail, logits, hidden

    def _decide(
        self,
        logits: Tensor,
        sizes: Tensor,
        seeds: Tensor,
        history: Tensor | None,
        prompt_sizes: Tensor | None,
        proposal: Proposal,
    ) -> tuple[Tensor, Tensor]:
        """Accepted counts [rows], and the drafted block with the target's own token after the accepted ones
        [rows, width]."""
        if self._constraints.active:
            logits = self._constraints.apply(logits, history, prompt_sizes, sizes, proposal.token_ids)
        positions = sizes[:, None] + torch.arange(logits.shape[1], device=sizes.device)
        accepted, following = verify(logits, proposal, self.sampling, seeds, positions)
        if self._constraints.active:
            best = logits.amax(dim=-1).gather(1, accepted[:, None])[:, 0]
            following = following.masked_fill(best == -torch.inf, NO_TOKEN)
        return accepted, F.pad(proposal.token_ids, (0, 1)).scatter(1, accepted[:, None], following[:, None])

    def _on_device(self, rows: list[_Row], width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sizes [width], last two tokens [width, 2] and seeds [width]; idle rows after the given ones stay at one token,
        fewer than any row in flight has, and write where nobody looks."""
        idle = width - len(rows)
        sizes = [len(row.tokens) for row in rows] + [1] * idle
        tail = [row.tokens[-2:] if len(row.tokens) > 1 else row.tokens * 2 for row in rows] + [[0, 0]] * idle
        seeds = [row.seed for row in rows] + [0] * idle
        return tuple(torch.tensor(values, device=self.target.device) for values in (sizes, tail, seeds))

    def _history(self, rows: list[_Row], width: int) -> tuple[Tensor | None, Tensor | None]:
        """What the constraints look at: committed tokens, then -1, [width, length], and prompt sizes [width]."""
        if not self._constraints.active:
            return None, None
        length = self.target.visible(max(len(row.tokens) for row in rows))
        idle = width - len(rows)
        tokens = [row.tokens + [-1] * (length - len(row.tokens)) for row in rows] + [[-1] * length] * idle
        prompts = [row.prompt_length for row in rows] + [0] * idle
        return torch.tensor(tokens, device=self.target.device), torch.tensor(prompts, device=self.target.device)

    def _remember(self, first_row: int, hidden: Tensor) -> None:
        """Keep the hidden states [rows, hidden] of rows from `first_row` on for the drafter."""
        if self._hidden_states is None:
            self._hidden_states = hidden.new_zeros(self.slots, hidden.shape[-1])
        self._hidden_states[first_row : first_row + len(hidden)] = hidden

    def _settle(self, rows: list[_Row], table: list[list[int]], logits: Tensor, is_prefill: bool) -> list[Event]:
        """Commit what a pass decided (a row of `table`: accepted, drafted, block), and retire the rows that ended."""
        now = time.perf_counter()
        if any(block[kept] == NO_TOKEN for kept, _, *block in table):
            raise ValueError(
                "the constraints leave no token to emit: loosen bad_words, min_new_tokens or allowed_token_ids"
            )
        emitted = [
            self._commit(row, block[: kept + 1], now) for row, (kept, _, *block) in zip(rows, table, strict=True)
        ]
        if self.config.return_logprobs is not None:
            records = [(row.logprobs, tokens) for row, tokens in zip(rows, emitted, strict=True)]
            self._record_logprobs(records, logits, self.config.return_logprobs)
        for row, tokens, (kept, proposed, *_) in zip(rows, emitted, table, strict=True):
            if not is_prefill:
                ends = row.finish_reason is not None
                cap = len(tokens) if ends else proposed
                row.rounds.append(Round(min(proposed, cap), min(kept, cap) if ends else kept, len(tokens)))
        self.stats.target_passes += 1
        return self._retire(rows, emitted)

    def _commit(self, row: _Row, block: list[int], now: float) -> list[int]:
        """Append the tokens of `block` up to the first that ends the row; returns those appended."""
        for index, token in enumerate(block):
            row.tokens.append(token)
            row.timestamps.append(now)
            row.finish_reason = self._finish_reason(row, token)
            if row.finish_reason is not None:
                return block[: index + 1]
        return block

    def _finish_reason(self, row: _Row, token: int) -> str | None:
        if self.config.stop:
            text = self.tokenizer.decode(row.generated, skip_special_tokens=False).rstrip(HALF_CHARACTER)
            starts = [text.index(stop) for stop in self.config.stop if stop in text]
            if starts:
                row.text = self._without_special_tokens(text[: min(starts)])
                return "stop"
        if token in self.config.eos_token_ids:
            return "eos"
        return "length" if len(row.tokens) - row.prompt_length >= self.config.max_new_tokens else None

    def _without_special_tokens(self, text: str) -> str:
        for special in self.tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text

    def _record_logprobs(self, records: list[tuple[Logprobs, list[int]]], logits: Tensor, alternatives: int) -> None:
        """Append to each record what [rows, queries, vocab] logits give its tokens, the first from the first query on."""
        width = max(len(tokens) for _, tokens in records)
        scores = logits[:, :width].float().log_softmax(dim=-1)
        padded = [tokens + [0] * (width - len(tokens)) for _, tokens in records]
        index = torch.tensor(padded, dtype=torch.long, device=logits.device).reshape(len(records), width, 1)
        last = scores.shape[-1] - 1
        own = scores.gather(-1, index.clamp(max=last))[..., 0].masked_fill(index[..., 0] > last, -torch.inf).tolist()
        top, top_ids = (tensor.tolist() for tensor in scores.topk(alternatives, dim=-1))
        for row, (record, tokens) in enumerate(records):
            record.token.extend(own[row][: len(tokens)])
            record.top.extend(top[row][: len(tokens)])
            record.top_ids.extend(top_ids[row][: len(tokens)])

    def _retire(self, rows: list[_Row], emitted: list[list[int]]) -> list[Event]:
        """Turn the step into events; the last row moves into the slot of a row that ended."""
        events = [
            Event(row.request, tokens, self._finish(row) if row.finish_reason else None)
            for row, tokens in zip(list(rows), emitted, strict=True)
        ]
        if len(rows) < len(self._rows) or any(event.finished for event in events):
            self._batch = None
        for slot in range(len(self._rows) - 1, -1, -1):
            if self._rows[slot].finish_reason is None:
                continue
            last = self._rows.pop()
            if slot < len(self._rows):
                self._rows[slot] = last
                self.target.move_row(len(self._rows), slot)
                if self._hidden_states is not None:
                    self._hidden_states[slot] = self._hidden_states[len(self._rows)]
                if self.drafter is not None:
                    self.drafter.move_row(len(self._rows), slot)
        return events

    def _finish(self, row: _Row) -> GeneratedSequence:
        text = row.text
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(row.generated, skip_special_tokens=True)
        self.stats.drafted += sum(block.drafted for block in row.rounds)
        self.stats.accepted += sum(block.accepted for block in row.rounds)
        self.stats.emitted += sum(block.emitted for block in row.rounds)
        self.stats.rounds += len(row.rounds)
        self.stats.peak_memory_bytes = peak_memory_bytes(self.target.device)
        logprobs = row.logprobs if self.config.return_logprobs is not None else None
        prompt_logprobs = row.prompt_logprobs if self.config.prompt_logprobs is not None else None
        return GeneratedSequence(
            row.generated, text, row.finish_reason, row.rounds, row.timestamps, logprobs, prompt_logprobs
        )


def _allowed_ids(config: DecodeConfig, vocabulary: int) -> Sequence[int]:
    """The ids that may be emitted, in order, without repeats."""
    allowed = range(vocabulary) if config.allowed_token_ids is None else config.allowed_token_ids
    if not len(allowed) or min(allowed) < 0 or max(allowed) >= vocabulary:
        raise ValueError(f"allowed_token_ids must be ids below {vocabulary}, the target's number of logits")
    allowed = allowed if isinstance(allowed, range) and allowed.step == 1 else sorted(set(allowed))
    for alternatives in (config.return_logprobs, config.prompt_logprobs):
        if alternatives is not None and not 0 <= alternatives <= len(allowed):
            raise ValueError(
                f"log-probabilities of {alternatives} alternatives asked for, {len(allowed)} ids are allowed"
            )
    return allowed


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: of the accelerator's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def decode(
    target: PreTrainedModel,
    drafter: PreTrainedModel | Drafter | None,
    prompt_ids: list[list[int]],
    config: DecodeConfig,
    seed: int | list[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    slots: int | None = None,
) -> DecodeResult:
    """Decode all `prompt_ids` (ragged token ids), in a batch of at most `slots` rows (default: all of them at once).

    `seed`: an int gives row i its own seed derived from (seed, i); a list gives each row's; None draws them. A row's
    tokens depend on its prompt and its seed, not on the other rows. `result.sequences` is in the order of the prompts.
    """
    decoder = Decoder(target, drafter, config, tokenizer, max(1, len(prompt_ids)) if slots is None else slots)
    if isinstance(seed, SupportsIndex):
        seeds = [row_seed(operator.index(seed), row) for row in range(len(prompt_ids))]
    else:
        seeds = [None] * len(prompt_ids) if seed is None else list(seed)
    if len(seeds) != len(prompt_ids):
        raise ValueError(f"{len(seeds)} seeds for {len(prompt_ids)} prompts")
    for prompt, row_seeded in zip(prompt_ids, seeds, strict=True):
        decoder.submit(prompt, row_seeded)
    sequences: dict[int, GeneratedSequence] = {}
    while decoder.busy:
        sequences.update({event.request: event.finished for event in decoder.step() if event.finished})
    return DecodeResult([sequences[row] for row in range(len(prompt_ids))], dataclasses.replace(decoder.stats))
