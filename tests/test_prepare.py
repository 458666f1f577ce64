import json
import logging
import random

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from pipeline import prepare, stage
from pipeline.core.artifacts import read_json
from pipeline.core.errors import PipelineError
from pipeline.core.prompts import normalised_words

TINY = stage.PROJECT_ROOT / "conf" / "domain" / "tiny.yaml"


def typed(domain, seed=0) -> prepare.Config:
    return stage.typed_config(OmegaConf.create({"domain": domain, "seed": seed}), prepare.Config)


def own_domain(path: str, reader: str) -> dict:
    return {
        "name": "legal",
        "sources": [{"name": "own", "domain": "legal", "reader": reader, "path": path}],
        "prompts": {"train": {"legal": 60}, "dev": {"legal": 12}, "golden": {"legal": 18}},
        "instruction_share": 0.25,
        "instructions": {"legal": ["Explain:\n\n{text}"]},
        "prompt_words": {"minimum": 14, "maximum": 20},
        "near_duplicate_similarity": 0.6,
        "overlap_ngram_words": 13,
    }


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PROJECT_ROOT", tmp_path)
    return tmp_path


def rows_of(root) -> dict[str, list[dict]]:
    return {split: pq.read_table(root / f"data/prompts/{split}.parquet").to_pylist() for split in prepare.SPLITS}


def body(row: dict) -> str:
    return row["text"] or "\n".join(message["content"] for message in json.loads(row["messages"]))


def test_tiny_domain_from_end_to_end(root, caplog):
    with caplog.at_level(logging.WARNING):
        prepare.run(typed(OmegaConf.load(TINY)))
    rows = rows_of(root)
    statistics = read_json(root / "data/prompts/stats.json", "domain-draft/prompts", 1)
    for split, found in rows.items():
        assert list(found[0]) == list(prepare.COLUMNS)
        assert {row["domain"] for row in found} == set(statistics["prompts_wanted"][split])
        assert len(found) == sum(sum(tasks.values()) for tasks in statistics["prompts"][split].values())
    identities = [row["prompt_id"] for found in rows.values() for row in found]
    assert len(identities) == len(set(identities))
    clusters = [{row["cluster"] for row in found} for found in rows.values()]
    assert not clusters[0] & clusters[1] and not clusters[0] & clusters[2] and not clusters[1] & clusters[2]
    assert OmegaConf.load(root / "data/prompts/config.yaml").domain.overlap_ngram_words == 13
    assert sorted(path.name for path in (root / "data").iterdir()) == ["prompts"]


def test_a_second_run_writes_the_same_bytes(root):
    prepare.run(typed(OmegaConf.load(TINY)))
    first = {path.name: path.read_bytes() for path in (root / "data/prompts").iterdir()}
    prepare.run(typed(OmegaConf.load(TINY)))
    assert {path.name: path.read_bytes() for path in (root / "data/prompts").iterdir()} == first


def made_prompts(count: int) -> list[str]:
    draw = random.Random(0)
    words = [first + second for first in "abcdefghijklmnopqrst" for second in "abcdefghijklmnopqrst"]
    return [" ".join(draw.choices(words, k=18)) for _ in range(count)]


def test_the_same_prompt_twice_lands_in_one_split_once(root):
    texts = made_prompts(300)
    respaced = [text.replace(" ", "\n  ").upper() for text in texts]
    rows = [*texts, *texts[:200], *respaced]
    (root / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    prepare.run(typed(own_domain("rows.jsonl", "jsonl")))
    found = [tuple(normalised_words(body(row))) for split in rows_of(root).values() for row in split]
    assert len(found) == 90 == len(set(found))
    statistics = read_json(root / "data/prompts/stats.json", "domain-draft/prompts", 1)
    assert statistics["documents"] == {"legal": 800} and statistics["clusters"] == {"legal": 300}


def test_golden_shares_no_run_of_13_words_with_train(root):
    clauses = made_prompts(6)
    draw = random.Random(1)
    documents = [f"{text.capitalize()}. {draw.choice(clauses).capitalize()}." for text in made_prompts(300)[6:]]
    (root / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare.run(typed(own_domain("rows.jsonl", "jsonl")))
    rows = rows_of(root)

    def grams(row):
        words = normalised_words(body(row))
        return {tuple(words[start : start + 13]) for start in range(len(words) - 12)}

    train = set().union(*(grams(row) for row in rows["train"]))
    assert rows["golden"] and not any(grams(row) & train for row in [*rows["golden"], *rows["dev"]])


def test_a_failed_run_leaves_nothing(root):
    (root / "rows.jsonl").write_text('{"prompt": "only one"}\n')
    with pytest.raises(PipelineError, match="no .* prompt of the target domain"):
        prepare.run(typed(own_domain("rows.jsonl", "jsonl")))
    (root / "empty.parquet").write_bytes(b"")
    with pytest.raises(PipelineError, match="empty.parquet"):
        prepare.run(typed(own_domain("empty.parquet", "parquet")))
    assert not (root / "data").exists()


def test_the_word_for_all_domains_is_no_domain():
    domain = own_domain("rows.jsonl", "jsonl")
    domain["prompts"]["golden"]["all"] = 4
    with pytest.raises(PipelineError, match="cannot be called 'all'"):
        typed(domain)


def test_domains_of_sources_and_counts_must_agree():
    domain = own_domain("rows.jsonl", "jsonl")
    domain["prompts"]["golden"]["code"] = 4
    with pytest.raises(PipelineError, match=r"offers \['legal'\].*asks for \['code', 'legal'\]"):
        typed(domain)
