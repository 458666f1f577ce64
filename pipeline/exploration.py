"""exploration: what the notebooks show, the evaluation's artifacts as tables and single answers round by round.

Reads:  params.yaml, data/draft, data/answers/golden, data/eval/{metrics.json,requests.parquet,rounds.parquet}; the target
        where answers are decoded.
Writes: nothing.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import pandas as pd
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from pipeline.adapters.answer_files import read_answers
from pipeline.adapters.drafts import load_draft
from pipeline.adapters.targets import Target
from pipeline.core.artifacts import read_json
from pipeline.core.decoding import DecodeConfig, Decoder
from pipeline.core.drafters import Drafter, ModelDrafter
from pipeline.core.evaluation import HEADLINE, teacher_forced, time_one
from pipeline.core.evaluation_settings import DISTILLED
from pipeline.core.metrics import acceptance_by_position
from pipeline.core.models import ModelConfig
from pipeline.core.report_page import SHARES, candidates, domains, found
from pipeline.core.sampling import Sampling
from pipeline.core.templates import encode_prompts
from pipeline.core.token_classes import token_class
from pipeline.stage import input_path, typed_config

TOKENS_PER_FORWARD = 2048
COLOURS = {  # kind of token: text and background, readable on light and dark pages
    "prefill": ("#1c1c1c", "#d9d9d9"),
    "accepted": ("#0b3d17", "#b6e3bf"),
    "rejected": ("#6b1010", "#f3c0c0"),
    "target": ("#0b2d5c", "#b9d4f5"),
}


@dataclass
class Config:
    target: ModelConfig


def metrics() -> dict[str, Any]:
    """The whole of data/eval/metrics.json."""
    return read_json(input_path("data/eval/metrics.json"), "domain-draft/metrics", 1)


def acceptance() -> pd.DataFrame:
    """One row per candidate, domain and kind of acceptance: value, lower and upper end of its 95 % interval."""
    document = metrics()
    rows = []
    for candidate in candidates(document):
        for domain in domains(document):
            for name in SHARES:
                entry = found(document, candidate, domain, name)
                lower, upper = entry["interval"] or (None, None)
                row = {"candidate": candidate, "domain": domain, "metric": name, "value": entry["value"]}
                rows.append({**row, "lower": lower, "upper": upper, "prompts": entry["count"]})
    return pd.DataFrame(rows)


def acceptance_by_round_position(candidate: str = DISTILLED) -> pd.DataFrame:
    """Share of rounds of the headline's requests in which the i-th drafted token was accepted: one row per position, one
    column per domain."""
    requests, rounds = (pd.read_parquet(input_path(f"data/eval/{name}.parquet")) for name in ("requests", "rounds"))
    chosen = requests[(requests["candidate"] == candidate) & (requests["condition"] == HEADLINE)]
    length = metrics()["draft_lengths"][candidate]
    columns = {}
    for domain, rows in rounds[rounds["request"].isin(chosen["request"])].groupby("domain"):
        sequences = [list(zip(own["accepted"], own["drafted"])) for _, own in rows.groupby("request", sort=False)]
        columns[domain] = acceptance_by_position(sequences, length) or [None] * length
    return pd.DataFrame(columns, index=pd.RangeIndex(1, length + 1, name="position"))


def golden_tokens() -> pd.DataFrame:
    """One row per token of the target's greedy golden answers: its text and class, and whether the draft's best token is the
    same (`agreed`, trimmed head). The target's weights are not loaded."""
    target = _target()
    draft, head = load_draft(input_path("data/draft"), target)
    answers = read_answers(input_path("data/answers/golden"))
    vocabulary = range(target.vocabulary_size)
    agreements = teacher_forced(ModelDrafter(draft, head), None, answers, vocabulary, Sampling(), TOKENS_PER_FORWARD)
    ids = {answer.prompt_id: answer.answer_ids.tolist() for answer in answers}
    special = set(target.tokenizer.all_special_ids)
    rows = []
    for row in agreements:
        for position, (token, agreed) in enumerate(zip(ids[row.prompt_id], row.overlaps, strict=True)):
            text = target.tokenizer.decode([token])
            facts = {"prompt_id": row.prompt_id, "domain": row.domain, "task": row.task, "position": position}
            rows.append({**facts, "text": text, "class": token_class(text, token in special), "agreed": bool(agreed)})
    return pd.DataFrame(rows)


@dataclass
class WatchedRound:
    """Token ids of one round: what was drafted, of which the first `accepted` were kept, and the target's own token after
    them; None where the answer ended before it."""

    drafted: list[int]
    accepted: int
    own: int | None


@dataclass
class Watched:
    """An answer with its rounds; its first token comes from the prefill."""

    first: int
    rounds: list[WatchedRound]
    tokenizer: PreTrainedTokenizerBase

    @property
    def counts(self) -> pd.DataFrame:
        """One row per round: drafted and accepted tokens, and the texts of what was accepted, rejected and put in its place."""
        return pd.DataFrame(
            {
                "drafted": len(row.drafted),
                "accepted": row.accepted,
                "accepted text": self.tokenizer.decode(row.drafted[: row.accepted]),
                "rejected text": self.tokenizer.decode(row.drafted[row.accepted :]),
                "the target's own": "" if row.own is None else self.tokenizer.decode([row.own]),
            }
            for row in self.rounds
        )

    def page(self) -> str:
        """HTML: accepted tokens green, rejected ones red and struck out, the target's own blue, the prefill's grey."""
        spans = [self._span(self.first, "prefill")]
        for row in self.rounds:
            spans += [self._span(token, "accepted") for token in row.drafted[: row.accepted]]
            spans += [self._span(token, "rejected") for token in row.drafted[row.accepted :]]
            spans += [self._span(row.own, "target")] if row.own is not None else []
        legend = " ".join(_coloured(name, name) for name in COLOURS)
        return f'<p>{legend}</p><p style="line-height:1.9">{"".join(spans)}</p>'

    def _span(self, token: int, kind: str) -> str:
        return _coloured(self.tokenizer.decode([token]), kind)


def _coloured(text: str, kind: str) -> str:
    colour, background = COLOURS[kind]
    line = ";text-decoration:line-through" if kind == "rejected" else ""
    shown = html.escape(text).replace("\n", "↵<br>") or "·"
    return f'<span title="{kind}" style="color:{colour};background:{background};padding:1px{line}">{shown}</span>'


class _Recorder:
    """A drafter that remembers what it proposed for the only row."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.proposed: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, batch, lengths):
        proposal = self.drafter.propose(batch, lengths)
        self.proposed.append(proposal.token_ids[0, : int(proposal.lengths[0])].tolist())
        return proposal


def watch(
    prompt: str, draft_length: int = 4, max_new_tokens: int = 48, temperature: float = 0.0, seed: int = 0
) -> Watched:
    """Let target and draft answer `prompt` (a text to continue) and note every round."""
    target = _target()
    draft, head = load_draft(input_path("data/draft"), target)
    row = {"prompt_id": "the prompt", "text": prompt, "messages": None}
    (prompt_ids,) = encode_prompts(target.tokenizer, [row], None)
    config = DecodeConfig(
        draft_length=draft_length,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        eos_token_ids=target.eos_token_ids,
        allowed_token_ids=range(target.vocabulary_size),
    )
    recorder = _Recorder(ModelDrafter(draft, head))
    sequence = time_one(Decoder(target.model, recorder, config), prompt_ids, seed).sequence
    return Watched(sequence.token_ids[0], _rounds(sequence, recorder.proposed), target.tokenizer)


def _rounds(sequence, proposed: list[list[int]]) -> list[WatchedRound]:
    rounds, position = [], 1
    for counted, drafted in zip(sequence.rounds, proposed, strict=True):
        emitted = sequence.token_ids[position : position + counted.emitted]
        own = emitted[-1] if counted.emitted > counted.accepted else None
        rounds.append(WatchedRound(drafted[: max(counted.drafted, counted.accepted)], counted.accepted, own))
        position += counted.emitted
    return rounds


def _target() -> Target:
    root = input_path("")
    return Target(typed_config(OmegaConf.load(root / "params.yaml"), Config).target, root)
