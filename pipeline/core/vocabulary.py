"""Which tokens a target and a draft share, and which of them a domain uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.core.answers import Answer
from pipeline.core.errors import PipelineError

PROBE = "The Licensee shall not sub-license, assign or transfer §4(b).\n\n    return x ** 2  # 東京 🙂"


@dataclass
class VocabularyMatch:
    """What comparing two tokenizers gave: ids that mean the same on both sides, and harmless differences."""

    shared_ids: range
    warnings: list[str] = field(default_factory=list)


def match_vocabularies(target_tokenizer, draft_tokenizer, target_rows: int, draft_rows: int) -> VocabularyMatch:
    """Compare token -> id maps, not sizes: padded embeddings and extra tokens at the end are masked, not fatal.

    `target_rows`, `draft_rows`: rows of each model's embedding. The shared ids are 0 .. n - 1, where n is the first id
    that one side lacks. Raises `PipelineError` with the sizes when an id means different tokens; a special token may go
    by another name, but not be at another id.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    by_id = ({index: token for token, index in vocabulary.items()} for vocabulary in (target, draft))
    target_by_id, draft_by_id = by_id
    both = target_by_id.keys() & draft_by_id.keys()
    unequal = sorted(index for index in both if target_by_id[index] != draft_by_id[index])
    special = _special_ids(target_tokenizer) & _special_ids(draft_tokenizer)
    moved = [index for index in unequal if target_by_id[index] in draft or draft_by_id[index] in target]
    different = sorted({*moved, *(index for index in unequal if index not in special)})
    sizes = (
        f"target: {len(target)} tokens, {target_rows} embedding rows; draft: {len(draft)} tokens, {draft_rows}"
        " embedding rows"
    )
    if different:
        first = different[0]
        raise PipelineError(
            f"The tokenizers differ at {len(different)} ids; the first is {first}: {target_by_id[first]!r} in the"
            f" target, {draft_by_id[first]!r} in the draft ({sizes}).",
            "a draft must speak the target's token ids: choose a sibling of the same family, or draft.init=pruned.",
        )
    limit = min(target_rows, draft_rows)
    shared = next((index for index in range(limit) if index not in both), limit)
    if shared < 0.9 * min(len(target), len(draft)):
        raise PipelineError(
            f"The tokenizers share only the first {shared} ids ({sizes}).",
            "choose a draft of the same family, or draft.init=pruned.",
        )
    pieces = [tokenizer(PROBE, add_special_tokens=False).input_ids for tokenizer in (target_tokenizer, draft_tokenizer)]
    if pieces[0] != pieces[1]:
        raise PipelineError(
            "The tokenizers split the same text differently although their ids agree.",
            "use the target's tokenizer files for the draft, or choose a sibling of the same family.",
        )
    warnings = []
    if unequal:
        names = f"{target_by_id[unequal[0]]!r} in the target, {draft_by_id[unequal[0]]!r} in the draft"
        warnings.append(f"{len(unequal)} special tokens have other names; the first is {unequal[0]}: {names}")
    if target_rows != draft_rows or max(len(target), len(draft)) > shared:
        warnings.append(f"ids from {shared} on are never drafted ({sizes})")
    return VocabularyMatch(range(shared), warnings + _harmless_differences(target_tokenizer, draft_tokenizer))


def _special_ids(tokenizer) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _harmless_differences(target_tokenizer, draft_tokenizer) -> list[str]:
    found = []
    for name in ("eos_token", "pad_token", "bos_token", "unk_token"):
        values = getattr(target_tokenizer, name), getattr(draft_tokenizer, name)
        if values[0] != values[1]:
            found.append(f"{name} differs: {values[0]!r} in the target, {values[1]!r} in the draft")
    return found


def domain_token_ids(answers: list[Answer], size: int, always: tuple[int, ...], vocabulary: range) -> list[int]:
    """The `size` ids that matter most in `answers`, sorted: the draft's trimmed head.

    Ids are ranked by the target's probability mass on them, summed over all answer tokens, so that likely alternatives
    count and not only what was drawn. Ids in `always` (end-of-answer tokens) are kept in any case; ids outside
    `vocabulary`, what target and draft share, never.
    """
    mass = np.zeros(1 + max(vocabulary[-1], *(max(a.top_ids.max(), a.answer_ids.max()) for a in answers)))
    for answer in answers:
        np.add.at(mass, answer.top_ids.reshape(-1), np.exp(answer.top_logprobs).reshape(-1))
        np.add.at(mass, answer.answer_ids, 1e-3)
    mass = mass[: len(vocabulary)]
    ranked = np.argsort(-mass, kind="stable")[:size]
    used = ranked[mass[ranked] > 0].tolist()
    return sorted(set(used).union(token for token in always if token in vocabulary))
