"""Turn documents into prompts and split them into train, dev and golden without leaks.

Every choice is a hash of the seed and a name (of a cluster, of a document), never a draw from a shared generator:
adding a document moves no other document to another split.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import logging
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Dict, List

import numpy as np

from pipeline.core.artifacts import fingerprint
from pipeline.core.errors import PipelineError

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "golden")
HELD_OUT_PROMPTS_PER_DOCUMENT = 2
# Documents set aside for dev and golden per prompt wanted: some of their prompts fall to the overlap check.
HELD_OUT_MARGIN = 2

# A line of rules, boxes or dots, without one letter or digit.
_DECORATION_LINE = re.compile(r"[ \t]*[^\w\s]{4,}[^\w]*")
_SENTENCE_END = re.compile(r".*[.!?][\"'”’)\]]*")
_ABBREVIATION = re.compile(
    r"\W*(?:(?:[A-Za-z]\.)*[A-Za-z]|Inc|Corp|Ltd|Co|No|Nos|Sec|Art|St|Mr|Ms|Mrs|Dr|vs|cf|etc)\.\W*"
)
_ITEM_MARKER = re.compile(r"(?:\(?(?:\d{1,3}(?:\.\d+)*|[A-Za-z]|[ivxIVX]{1,5})[.)]|[-*•])")
_DEFINITION = re.compile(r"def$|class$|async$|@")
_DECORATION = re.compile(r"[^\w\s]{4,}|[\u2500-\u259f]")
_LETTER = re.compile(r"[^\W\d_]")
_VISIBLE = re.compile(r"\S")
_COLUMN_GAP = re.compile(r"\S {4,}\S|\S\t+\S")

MIN_LETTER_SHARE = 0.65  # of the characters that are not spaces: less is a table, a list of numbers or a drawing


@dataclass
class PromptWords:
    minimum: int  # words in the shortest window
    maximum: int  # words in the longest window

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise PipelineError(
                f"domain.prompt_words runs from {self.minimum} to {self.maximum}.", "choose 1 <= minimum <= maximum."
            )


@dataclass
class PromptCounts:
    train: Dict[str, int]  # domain -> prompts wanted
    dev: Dict[str, int]  # domain -> prompts wanted
    golden: Dict[str, int]  # domain -> prompts wanted


@dataclass
class PromptConfig:
    name: str  # the target domain: each split needs prompts of it
    prompts: PromptCounts
    instruction_share: float  # share in [0, 1] of the prompts cut from documents that become chat instructions
    instructions: Dict[str, List[str]]  # domain -> templates, each with {text}
    prompt_words: PromptWords
    overlap_ngram_words: int  # words in a row that a dev or golden prompt may not share with train

    def __post_init__(self) -> None:
        if not 0 <= self.instruction_share <= 1:
            raise PipelineError(
                f"domain.instruction_share is {self.instruction_share}.", "choose a share between 0 and 1."
            )
        if self.overlap_ngram_words < 1:
            raise PipelineError(f"domain.overlap_ngram_words is {self.overlap_ngram_words}.", "choose 1 or more.")
        for domain, templates in self.instructions.items():
            for template in templates:
                if "{text}" not in template:
                    raise PipelineError(
                        f"An instruction of domain {domain} lacks {{text}}: {template!r}.",
                        "add {text} to the template.",
                    )


@dataclass(frozen=True)
class Document:
    """A text out of which prompts are cut, or (with `messages`) one finished chat prompt."""

    document_id: str
    source: str
    domain: str
    text: str
    messages: tuple[dict[str, str], ...] | None = None
    title: str | None = None
    is_code: bool = False  # cut at definitions and lines instead of sentences


@dataclass(frozen=True)
class Prompt:
    domain: str
    source: str
    document_id: str
    cluster: str
    task: str  # "continuation" | "instruction"
    body: str  # the words taken from the document, without the template around them
    content: str  # the text to continue, or the JSON list of messages
    title: str | None

    def row(self) -> dict[str, Any]:
        """The Parquet row: `text` for a continuation, `messages` for an instruction, the other null."""
        instruction = self.task == "instruction"
        return {
            "prompt_id": fingerprint(self.domain, self.task, self.content),
            "domain": self.domain,
            "source": self.source,
            "document_id": self.document_id,
            "cluster": self.cluster,
            "task": self.task,
            "text": None if instruction else self.content,
            "messages": self.content if instruction else None,
            "title": self.title,
        }


@dataclass
class PromptSplits:
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)  # split -> prompts
    dropped_by_overlap: dict[str, int] = field(default_factory=dict)  # split -> prompts that shared words with train


@functools.lru_cache(maxsize=1 << 20)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def normalised_words(text: str) -> list[str]:
    """The words of `text` without case, spacing and punctuation; the text itself where it holds no word."""
    folded = text.casefold()
    return re.findall(r"\w+", folded) or ["".join(folded.split())]


def ngram_hashes(text: str, words: int) -> np.ndarray:
    """Sorted 64-bit hashes `[ngrams]` of the distinct runs of `words` normalised words (of all, if there are fewer)."""
    hashes = np.array([_word_hash(word) for word in normalised_words(text)], dtype=np.uint64)
    words = min(words, len(hashes))
    rolling = np.zeros(len(hashes) - words + 1, dtype=np.uint64)
    for offset in range(words):
        rolling = rolling * np.uint64(0x9E3779B97F4A7C15) + hashes[offset : offset + len(rolling)]
    return np.unique(rolling)


class OverlapIndex:
    """Which prompts share a run of `ngram_words` words (or all of theirs, if shorter) with one of `texts`."""

    def __init__(self, texts: Iterable[str], ngram_words: int) -> None:
        self._texts = list(texts)
        self._ngram_words = ngram_words
        self._hashes: dict[int, np.ndarray] = {}  # run length in words -> hashes of all texts

    def shares_words(self, text: str) -> bool:
        words = min(self._ngram_words, len(normalised_words(text)))
        if words not in self._hashes:
            parts = [ngram_hashes(known, words) for known in self._texts]
            self._hashes[words] = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.uint64)
        return bool(np.isin(ngram_hashes(text, words), self._hashes[words]).any())


def clean_text(text: str) -> str:
    """`text` without decoration lines, trailing spaces and runs of blank lines; its other line breaks stay."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").expandtabs(4).split("\n")]
    kept = ["" if _DECORATION_LINE.fullmatch(line) else line for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")


def is_readable(window: str) -> bool:
    """Whether a window is sentences or code rather than a table, a drawing or a list of numbers."""
    letters = len(_LETTER.findall(window))
    visible = len(_VISIBLE.findall(window))
    return (
        letters >= MIN_LETTER_SHARE * visible
        and not _DECORATION.search(window)
        and not any(_COLUMN_GAP.search(line.strip()) for line in window.split("\n"))
    )


def _ends_sentence(word: str) -> bool:
    is_marker = _ABBREVIATION.fullmatch(word) or _ITEM_MARKER.fullmatch(word)
    return bool(_SENTENCE_END.fullmatch(word)) and not is_marker


def _begins_sentence(word: str) -> bool:
    return not word.lstrip("\"'“‘([")[:1].islower() or bool(_ITEM_MARKER.fullmatch(word))


def _gaps(text: str, words: list[re.Match[str]]) -> list[str]:
    """The spacing after each word; a blank line after the last."""
    return [text[word.end() : after.start()] for word, after in zip(words, words[1:])] + ["\n\n"]


def _prose_starts(words: list[re.Match[str]], gaps: list[str]) -> list[int]:
    """Indices of the words that begin a paragraph, a list item or a sentence."""
    starts = [0]
    for index in range(1, len(words)):
        before, gap, word = words[index - 1].group(), gaps[index - 1], words[index].group()
        new_item = "\n" in gap and _ITEM_MARKER.fullmatch(word)
        new_sentence = _ends_sentence(before) and _begins_sentence(word)
        if gap.count("\n") > 1 or new_item or new_sentence:
            starts.append(index)
    return starts


def _line_starts(gaps: list[str]) -> list[int]:
    return [0] + [index + 1 for index, gap in enumerate(gaps[:-1]) if "\n" in gap]


def _code_starts(words: list[re.Match[str]], gaps: list[str]) -> list[int]:
    """Indices of the words that begin a decorator, function or class; without any, those that begin a line."""
    lines = _line_starts(gaps)
    starts = [index for index in lines if _DEFINITION.match(words[index].group())]
    return [index for index in starts if index == 0 or not words[index - 1].group().startswith("@")] or lines


def _next(starts: list[int], position: int) -> int | None:
    index = bisect.bisect_left(starts, position)
    return starts[index] if index < len(starts) else None


def _sentence_length(words: list[re.Match[str]], gaps: list[str], lengths: range, is_code: bool) -> int | None:
    """The longest of `lengths` at which `words` end a paragraph, else a sentence (in code: a line), else None."""
    paragraphs = [length for length in lengths if gaps[length - 1].count("\n") > 1]
    if is_code:
        sentences = [length for length in lengths if "\n" in gaps[length - 1]]
    else:
        sentences = [length for length in lengths if _ends_sentence(words[length - 1].group())]
        paragraphs = [length for length in paragraphs if length in sentences]
    ends = paragraphs or sentences
    return ends[-1] if ends else None


def _window_text(text: str, first: re.Match[str], last: re.Match[str]) -> str:
    """The text from one word to another; from the start of the line if the first word opens it, without the
    indent that all lines share."""
    line_start = text.rfind("\n", 0, first.start()) + 1
    begin = first.start() if text[line_start : first.start()].strip() else line_start
    return textwrap.dedent(text[begin : last.end()])


def cut_windows(
    text: str,
    limits: PromptWords,
    unit: Callable[..., float],
    whole_sentences: Callable[[int], bool],
    is_code: bool = False,
) -> Iterator[tuple[int, str]]:
    """Yield (index, window) for the non-overlapping, readable windows of `text`.

    `unit(*names)` in [0, 1) decides the lengths. A window for which `whole_sentences(index)` holds stops at the last
    end of a paragraph or sentence within the limits, if there is one. Prose without sentences is cut at lines, without
    lines at words; code at definitions alone, if it has any.
    """
    words = list(re.finditer(r"\S+", text))
    gaps = _gaps(text, words)
    starts, lines = (_code_starts if is_code else _prose_starts)(words, gaps), _line_starts(gaps)
    position = index = 0  # first word that is free, number of the window
    while position + limits.minimum <= len(words):
        first = _next(starts, position)
        if not is_code and (first is None or first > position + limits.maximum):
            line = _next(lines, position)
            first = position if line is None or line > position + limits.maximum else line
        if first is None or first + limits.minimum > len(words):
            return
        lengths = range(limits.minimum, min(limits.maximum, len(words) - first) + 1)
        length = lengths[int(unit("length", index) * len(lengths))]
        if whole_sentences(index):
            reach = slice(first, first + limits.maximum)
            length = _sentence_length(words[reach], gaps[reach], lengths, is_code) or length
        window = _window_text(text, words[first], words[first + length - 1])
        window = window if is_code else window.lstrip()
        if is_readable(window):
            yield index, window
        position, index = first + length, index + 1


def _unit(*parts: Any) -> float:
    """A number in [0, 1) that depends on `parts` alone."""
    return int(fingerprint(*parts), 16) / 2**64


def assign_split(cluster: str, domain: str, counts: PromptCounts, seed: int) -> str:
    """The split of a cluster: a hash against shares in proportion to the documents that each split asks for."""
    golden = counts.golden.get(domain, 0) * HELD_OUT_MARGIN
    dev = counts.dev.get(domain, 0) * HELD_OUT_MARGIN
    point = _unit(seed, "split", cluster) * (golden + dev + counts.train.get(domain, 0))
    return "golden" if point < golden else "dev" if point < golden + dev else "train"


def prompts_of_document(document: Document, cluster: str, config: PromptConfig, seed: int) -> list[Prompt]:
    """All prompts of a document, in the order in which they are to be used."""
    shared = (document.domain, document.source, document.document_id, cluster)
    if document.messages is not None:
        content = json.dumps(list(document.messages), ensure_ascii=False)
        return [Prompt(*shared, "instruction", document.text, content, document.title)]
    unit = functools.partial(_unit, seed, document.document_id)

    def is_instruction(index: int) -> bool:
        return unit("task", index) < config.instruction_share

    windows = cut_windows(
        clean_text(document.text), config.prompt_words, unit, whole_sentences=is_instruction, is_code=document.is_code
    )
    prompts = []
    for index, body in windows:
        if is_instruction(index):
            templates = config.instructions[document.domain]
            template = templates[int(unit("template", index) * len(templates))]
            messages = [{"role": "user", "content": template.replace("{text}", body)}]
            prompts.append(
                Prompt(*shared, "instruction", body, json.dumps(messages, ensure_ascii=False), document.title)
            )
        else:
            prompts.append(Prompt(*shared, "continuation", body, body, document.title))
    return sorted(prompts, key=lambda prompt: unit("order", prompt.body))


def _in_rounds(documents: list[list[Prompt]], rounds: int | None) -> Iterator[Prompt]:
    """The first prompt of every document, then the second of each, ... for `rounds` rounds (None: all)."""
    longest = max((len(prompts) for prompts in documents), default=0)
    for index in range(longest if rounds is None else min(rounds, longest)):
        yield from (prompts[index] for prompts in documents if index < len(prompts))


def representatives(documents: list[Document], clusters: dict[str, str]) -> list[Document]:
    """One document per cluster: the one with the smallest id."""
    chosen: dict[str, Document] = {}
    for document in sorted(documents, key=lambda item: item.document_id):
        chosen.setdefault(clusters[document.document_id], document)
    return list(chosen.values())


def build_prompts(documents: list[Document], clusters: dict[str, str], config: PromptConfig, seed: int) -> PromptSplits:
    """Cut, split and filter prompts.

    `clusters` maps each document id to its cluster of near-duplicates; a cluster lies in one split and gives one
    document. Raises `PipelineError` where a split ends without a prompt of the target domain.
    """
    _check_instructions(documents, config)
    by_group: dict[tuple[str, str], list[list[Prompt]]] = {}  # (split, domain) -> prompts of each document
    chosen = representatives(documents, clusters)
    chosen.sort(key=lambda document: _unit(seed, "rank", clusters[document.document_id]))
    for document in chosen:
        cluster = clusters[document.document_id]
        split = assign_split(cluster, document.domain, config.prompts, seed)
        prompts = prompts_of_document(document, cluster, config, seed)
        by_group.setdefault((split, document.domain), []).append(prompts)

    result = PromptSplits()
    used: set[tuple[str, ...]] = set()  # normalised words of every prompt taken so far
    index = OverlapIndex([], config.overlap_ngram_words)
    for split in SPLITS:  # train comes first: the others are checked against it
        rounds = None if split == "train" else HELD_OUT_PROMPTS_PER_DOCUMENT
        result.prompts[split], result.dropped_by_overlap[split] = [], 0
        for domain, wanted in getattr(config.prompts, split).items():
            candidates = _in_rounds(by_group.get((split, domain), []), rounds)
            taken, dropped = _take(candidates, wanted, used, index)
            result.prompts[split] += taken
            result.dropped_by_overlap[split] += dropped
            _check_count(len(taken), wanted, split, domain, config.name)
        if split == "train":
            index = OverlapIndex((prompt.body for prompt in result.prompts["train"]), config.overlap_ngram_words)
    return result


def _take(
    candidates: Iterator[Prompt], wanted: int, used: set[tuple[str, ...]], index: OverlapIndex
) -> tuple[list[Prompt], int]:
    """The first `wanted` new candidates that share no words with `index`, and how many shared some."""
    taken: list[Prompt] = []
    dropped = 0
    while len(taken) < wanted and (prompt := next(candidates, None)):
        words = tuple(normalised_words(prompt.body))
        if words in used:
            continue
        if index.shares_words(prompt.body):
            dropped += 1
            continue
        used.add(words)
        taken.append(prompt)
    return taken, dropped


def _check_instructions(documents: list[Document], config: PromptConfig) -> None:
    domains = {document.domain for document in documents if document.messages is None}
    missing = sorted(domain for domain in domains if not config.instructions.get(domain))
    if missing and config.instruction_share > 0:
        raise PipelineError(
            f"domain.instructions has no template for {', '.join(missing)}.",
            "add one with {text}, or set domain.instruction_share=0.",
        )


def _check_count(found: int, wanted: int, split: str, domain: str, target_domain: str) -> None:
    if found == 0 and domain == target_domain:
        raise PipelineError(
            f"The sources give no {split} prompt of the target domain {domain} ({wanted} wanted).",
            "add documents of that domain, shorten domain.prompt_words, or raise domain.near_duplicate_similarity.",
        )
    if found < wanted:
        logger.warning(
            "%d %s prompts of domain %s instead of %d: the sources hold no more.", found, split, domain, wanted
        )


def prompt_statistics(
    documents: list[Document], clusters: dict[str, str], config: PromptConfig, splits: PromptSplits
) -> dict[str, Any]:
    """The facts of `stats.json`: counts, words (of the bodies, separated by spaces) and what was left out."""
    counts: dict[str, dict[str, Counter[str]]] = {split: {} for split in SPLITS}
    for split, prompts in splits.prompts.items():
        for prompt in prompts:
            counts[split].setdefault(prompt.domain, Counter())[prompt.task] += 1
    domain_documents = Counter(document.domain for document in documents)
    domain_clusters = Counter(document.domain for document in representatives(documents, clusters))
    return {
        "target_domain": config.name,
        "prompts": {split: {domain: dict(tasks) for domain, tasks in found.items()} for split, found in counts.items()},
        "prompts_wanted": {split: dict(getattr(config.prompts, split)) for split in SPLITS},
        "documents": dict(domain_documents),
        "clusters": dict(domain_clusters),
        "near_duplicate_share": {
            domain: round(1 - domain_clusters[domain] / found, 4) for domain, found in domain_documents.items()
        },
        "dropped_by_overlap": splits.dropped_by_overlap,
        "words": {
            split: sum(len(prompt.body.split()) for prompt in prompts) for split, prompts in splits.prompts.items()
        },
    }
