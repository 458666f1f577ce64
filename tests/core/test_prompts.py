import dataclasses
import json
import random

import pytest

from pipeline.core import prompts as module
from pipeline.core.errors import PipelineError
from pipeline.core.prompts import (
    Document,
    PromptConfig,
    PromptCounts,
    PromptWords,
    build_prompts,
    clean_text,
    cut_windows,
    ngram_hashes,
    normalised_words,
)

ENDINGS = ("lor", "min", "rat", "sek", "tov")
WORDS = [first + ending for first in ("ba", "co", "di", "fu", "ge", "ha") for ending in ENDINGS]


def document(number: int, sentences: int = 12) -> Document:
    draw = random.Random(number)
    text = " ".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences))
    return Document(f"made/{number}", "made", "legal", text)


def config(**changes) -> PromptConfig:
    base = PromptConfig(
        name="legal",
        prompts=PromptCounts(train={"legal": 40}, dev={"legal": 8}, golden={"legal": 12}),
        instruction_share=0.25,
        instructions={"legal": ["Explain:\n\n{text}"]},
        prompt_words=PromptWords(14, 24),
        overlap_ngram_words=13,
    )
    return dataclasses.replace(base, **changes)


def alone(documents: list[Document]) -> dict[str, str]:
    return {document.document_id: document.document_id for document in documents}


def split_of_documents(splits) -> dict[str, str]:
    return {prompt.document_id: split for split, prompts in splits.prompts.items() for prompt in prompts}


def grams(text: str, words: int) -> set[tuple[str, ...]]:
    found = normalised_words(text)
    return {tuple(found[start : start + words]) for start in range(len(found) - words + 1)}


def test_the_same_input_gives_the_same_prompts_in_any_order():
    documents = [document(number) for number in range(60)]
    first = build_prompts(documents, alone(documents), config(), seed=3)
    second = build_prompts(documents[::-1], alone(documents), config(), seed=3)
    assert first == second
    assert {split: len(prompts) for split, prompts in first.prompts.items()} == {"train": 40, "dev": 8, "golden": 12}
    other = build_prompts(documents, alone(documents), config(), seed=4)
    assert split_of_documents(other) != split_of_documents(first)


def test_an_added_document_moves_no_other():
    documents = [document(number) for number in range(60)]
    before = split_of_documents(build_prompts(documents, alone(documents), config(), seed=0))
    for number in range(60, 70):
        more = [*documents, document(number)]
        splits = build_prompts(more, alone(more), config(), seed=0)
        after = split_of_documents(splits)
        shared = before.keys() & after.keys()
        assert all(before[name] == after[name] for name in shared)
        assert len(before.keys() - after.keys()) <= 1  # its prompt may take the last place of a full split


def test_a_cluster_lies_in_one_split_and_gives_one_document():
    documents = [document(number) for number in range(60)]
    clusters = {item.document_id: f"cluster-{index // 3}" for index, item in enumerate(documents)}
    splits = build_prompts(documents, clusters, config(), seed=0)
    places: dict[str, set[tuple[str, str]]] = {}
    for split, prompts in splits.prompts.items():
        for prompt in prompts:
            places.setdefault(prompt.cluster, set()).add((split, prompt.document_id))
    assert all(len(found) == 1 for found in places.values())


def test_golden_and_dev_share_no_run_of_13_words_with_train():
    clause = " ".join(random.Random("clause").choices(WORDS, k=16)).capitalize() + "."
    documents = [document(number) for number in range(60)]
    documents = [dataclasses.replace(item, text=f"{clause} {item.text}") for item in documents]
    splits = build_prompts(documents, alone(documents), config(), seed=0)
    assert splits.dropped_by_overlap["golden"] > 0
    train = set().union(*(grams(prompt.body, 13) for prompt in splits.prompts["train"]))
    for split in ("dev", "golden"):
        assert splits.prompts[split]
        assert not any(grams(prompt.body, 13) & train for prompt in splits.prompts[split])


def test_a_short_held_out_prompt_is_compared_as_a_whole():
    index = module.OverlapIndex(["one two three four five six"], 13)
    assert index.shares_words("Three  FOUR five!")
    assert not index.shares_words("three five")
    assert not module.OverlapIndex([], 13).shares_words("three")


def test_no_prompt_text_comes_twice():
    rows = [
        Document(f"made/{number}", "made", "legal", text, ({"role": "user", "content": text},))
        for number, text in enumerate(f"question number {number // 2} about the lease" for number in range(200))
    ]
    splits = build_prompts(rows, alone(rows), config(), seed=0)
    texts = [prompt.body for prompts in splits.prompts.values() for prompt in prompts]
    assert len(texts) == len(set(texts))


def test_held_out_documents_give_two_prompts_at_most():
    documents = [document(number, sentences=60) for number in range(12)]
    splits = build_prompts(documents, alone(documents), config(), seed=1)
    for split in ("dev", "golden"):
        names = [prompt.document_id for prompt in splits.prompts[split]]
        assert max(names.count(name) for name in names) <= 2
    assert len(splits.prompts["train"]) > len({prompt.document_id for prompt in splits.prompts["train"]})


def test_rows_of_both_tasks():
    documents = [document(number) for number in range(60)]
    splits = build_prompts(documents, alone(documents), config(), seed=0)
    rows = [prompt.row() for prompt in splits.prompts["train"]]
    assert {row["task"] for row in rows} == {"continuation", "instruction"}
    assert len({row["prompt_id"] for row in rows}) == len(rows)
    for row in rows:
        assert (row["text"] is None) == (row["task"] == "instruction") != (row["messages"] is None)
        if row["task"] == "instruction":
            (message,) = json.loads(row["messages"])
            assert message["role"] == "user" and message["content"].startswith("Explain:\n\n")


def test_messages_are_used_as_they_are():
    messages = ({"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Why\u2028not?"})
    rows = [Document(f"made/{n}", "made", "legal", f"Why not? {n}", messages) for n in range(40)]
    splits = build_prompts(rows, alone(rows), config(instructions={}), seed=0)
    assert json.loads(splits.prompts["train"][0].row()["messages"]) == list(messages)


def test_too_few_documents_warn_and_none_is_an_error(caplog):
    documents = [document(number, sentences=4) for number in range(20)]
    build_prompts(documents, alone(documents), config(), seed=0)
    assert "the sources hold no more" in caplog.text
    with pytest.raises(PipelineError, match="no .* prompt of the target domain legal .*Remedy"):
        build_prompts(documents[:1], alone(documents), config(), seed=0)


def test_bad_configuration_is_refused():
    with pytest.raises(PipelineError, match="lacks {text}"):
        config(instructions={"legal": ["Explain."]})
    with pytest.raises(PipelineError, match="instruction_share"):
        config(instruction_share=1.5)
    with pytest.raises(PipelineError, match="prompt_words"):
        PromptWords(9, 8)
    with pytest.raises(PipelineError, match="no template for legal"):
        documents = [document(1)]
        build_prompts(documents, alone(documents), config(instructions={}), seed=0)


def windows(text: str, minimum: int, maximum: int, whole: bool = False, is_code: bool = False) -> list[str]:
    limits = PromptWords(minimum, maximum)
    return [window for _, window in cut_windows(text, limits, lambda *names: 0.0, lambda index: whole, is_code)]


def test_windows_begin_with_a_sentence_and_keep_their_line_breaks():
    text = "The tenant pays\n  the rent. No. 5 of U.S. Law applies. (a) The landlord repairs the roof at once and so"
    assert windows(text, 5, 6) == [
        "The tenant pays\n  the rent.",
        "No. 5 of U.S. Law",
        "(a) The landlord repairs the",
        "roof at once and so",
    ]


def test_whole_windows_end_with_a_sentence():
    text = "One two three. Four five six. Seven eight nine ten."
    assert windows(text, 2, 7, whole=True)[0] == "One two three. Four five six."


def test_code_windows_begin_with_a_definition_and_lose_their_indent():
    text = "import os\n\nclass A:\n    x = 1\n\n    @property\n    def f(self):\n        return os.name\n"
    assert windows(text, 5, 5, is_code=True) == ["class A:\n    x = 1", "@property\ndef f(self):\n    return os.name"]


def test_text_without_sentences_is_cut_at_words():
    assert windows("a word " * 8, 4, 4) == ["a word a word"] * 4


def test_tables_and_drawings_are_no_prompts():
    table = "Release        Derived     Year\nfrom one        two         three"
    assert windows(table, 3, 6) == []
    assert clean_text("Title\n=======\n\n\n\nBody  text \n+----+\nend") == "Title\n\nBody  text\n\nend"


def test_ngram_hashes_ignore_case_spacing_and_punctuation():
    assert (ngram_hashes("The  Tenant,\npays rent", 3) == ngram_hashes("the tenant pays RENT.", 3)).all()
    assert len(ngram_hashes("one two", 5)) == 1
    assert (ngram_hashes("!!", 5) != ngram_hashes("??", 5)).all()
